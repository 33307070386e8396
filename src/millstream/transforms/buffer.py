"""The replay buffer: values go in one by one and come out as the mode says."""

import dataclasses
from typing import Literal

from millstream.pipeline.pipeline import MAX_IN_GRAPH, as_stream
from millstream.pipeline.transform import Transform
from millstream.reading.contracts import IndexedSource, Stream
from millstream.reading.iterable import IterableSource
from millstream.text.errors import describe_value, require_bool, require_choice, require_int
from millstream.text.summaries import call_text
from millstream.transforms.buffer_stream import BufferedStream

Mode = Literal["sequential", "uniform", "without_replacement", "prioritised"]
WriteMode = Literal["fifo", "reservoir"]


@dataclasses.dataclass(frozen=True)
class BufferTransform(Transform):
    """Keep the last values, or a fair sample of all, and give out `sample_size` of them at every step.

    Each step draws one value, stores it if its mask is True, and gives out a sample. Until `prefill` values are
    stored it gives out the value just drawn, alone, with the other rows masked. `scan_epoch` writes into the buffer
    in place; a step from Python makes a new state and copies it.

    Example:
        >>> replay = ms.BufferTransform(capacity=10_000, prefill=1_000, sample_size=64, mode="uniform")
        >>> loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(5000.0)}), replay])

    In mode "prioritised" values are drawn with a probability proportional to `priority ** priority_exponent`. A new
    value gets the highest priority so far; `set_buffer_priorities(state, indices, priorities)` changes them. Values
    must be dicts and come with two more keys: `buffer_index`, what to give to `set_buffer_priorities`, and
    `importance_weight`, `(stored * probability) ** -importance_exponent` divided by the largest of any stored value.

    Args:
        capacity: Values the buffer holds.
        prefill: Stored values it takes before samples are drawn; from `sample_size` to `capacity`.
        sample_size: Values per step, stacked; 1 gives a value without a batch axis.
        mode: "sequential" reads on through the buffer, "uniform" draws with replacement, "without_replacement" draws
            values that differ within a step, "prioritised" draws by priority, with replacement.
        write_mode: "fifo" replaces the oldest value; "reservoir" keeps every value seen with equal probability.
        by_row: Store the rows of a batch one by one and not the batch as one value; for instance the transitions of
            `GymnaxSource(..., num_envs=256)`. Until the buffer is filled, the first `sample_size` rows pass through.
        priority_exponent: 0 is uniform, 1 is proportional to the priority.
        importance_exponent: 0 is no correction, 1 is a full one.
    """

    capacity: int
    prefill: int
    sample_size: int = 1
    mode: Mode = "sequential"
    write_mode: WriteMode = "fifo"
    by_row: bool = False
    priority_exponent: float = 0.6
    importance_exponent: float = 0.4

    def __post_init__(self) -> None:
        for name in ("capacity", "prefill", "sample_size"):
            require_int("BufferTransform", name, getattr(self, name), least=1)
        if self.capacity > MAX_IN_GRAPH:
            raise ValueError(
                f"BufferTransform needs a capacity of at most {MAX_IN_GRAPH:,}, which a compiled program can index. "
                f"Got {self.capacity:,}."
            )
        if not self.sample_size <= self.prefill <= self.capacity:
            raise ValueError(
                "BufferTransform needs sample_size <= prefill <= capacity, so that there is enough to draw from. "
                f"Got sample_size={self.sample_size}, prefill={self.prefill}, capacity={self.capacity}."
            )
        require_choice(
            "BufferTransform", "mode", self.mode, ("sequential", "uniform", "without_replacement", "prioritised")
        )
        require_choice("BufferTransform", "write_mode", self.write_mode, ("fifo", "reservoir"))
        require_bool("BufferTransform", "by_row", self.by_row)
        for name in ("priority_exponent", "importance_exponent"):
            exponent = getattr(self, name)
            is_number = isinstance(exponent, int | float) and not isinstance(exponent, bool)
            if not is_number or not 0 <= exponent <= 1:
                raise ValueError(f"BufferTransform needs {name} from 0 to 1. Got {describe_value(exponent)}.")

    # What comes after a buffer is a stream, whatever came before it.
    def __call__(self, source: IndexedSource | Stream | IterableSource) -> Stream:  # pyright: ignore[reportIncompatibleMethodOverride]
        return BufferedStream(as_stream(source), self)

    def __repr__(self) -> str:
        return call_text(self)
