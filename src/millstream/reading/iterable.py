"""Samples that can only be drawn in order: generators, streaming datasets."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from millstream.reading.contracts import PyTree
from millstream.reading.host_source import SampleReader
from millstream.reading.samples import spec_or_objects
from millstream.text.errors import describe_value, function_name, noted, require_int
from millstream.text.keywords import answer_keywords
from millstream.text.summaries import never_raising

UNKNOWN_LENGTH = (1 << 31) - 1  # stands for it in a plan: a prime, so that no size of a batch divides it
_PARAMETERS = ("epoch", "start")


class Item(int):
    """The number of an item in its pass, which carries the item: host stages read samples by their numbers."""

    value: PyTree

    @classmethod
    def of(cls, number: int, value: PyTree) -> "Item":
        """An item and its number."""
        item = cls(number)
        item.value = value
        return item


class DrawnItems(SampleReader):
    """The samples that numbers carry; item 0, by which the spec was found, can be read by its number alone.

    Args:
        name: The name of the source, for errors.
        first: Item 0.
        length: Samples in a pass.
    """

    ordering = "sequential"
    whole_samples = True

    def __init__(self, name: str, first: PyTree, length: int) -> None:
        self._name = name
        self._first = first
        self._length = length
        self.sample_spec = spec_or_objects(name, first)

    def __len__(self) -> int:
        return self._length

    def read_row(self, index: int, out: Sequence[np.ndarray], row: int, key: np.ndarray | None) -> None:
        if isinstance(index, Item):
            sample = index.value
        elif index == 0:
            sample = self._first
        else:
            raise IndexError(f"{self._name} has no sample {index} at hand: its samples can only be drawn in order.")
        self.sample_spec.write(self._name, out, row, index, sample)


@answer_keywords
@dataclasses.dataclass(frozen=True, eq=False)
class IterableSource:
    """Samples that can only be drawn in order: a generator, a streaming dataset, lines of a pipe.

    Each pass over the iterable is an epoch. A thread draws ahead and shuffles within a buffer, by the key of the run. A
    state says how far the pass is: resuming starts the iterable again and draws up to there, so the batches continue
    bit for bit if it gives the same samples again. If it does not, resuming is refused.

    Where samples have an index, use another source: it shuffles all of them, starts anywhere at once, and works in
    compiled programs, in worker processes and on several hosts.

    Example:
        >>> def squares():
        ...     for number in range(6):
        ...         yield {"x": np.float32(number**2)}
        >>> loader = ms.DataLoader([ms.sources.IterableSource(squares, shuffle_buffer=3), ms.BatchTransform(4)])
        >>> for batch, mask in loader.iterate(loader.init_state(jax.random.key(0))):
        ...     print(batch["x"], mask)
        [ 0.  9. 16. 25.] [ True  True  True  True]
        [4. 1. 0. 0.] [ True  True False False]

    Args:
        iterable: A function that returns a new iterator at every call, or an object that can be iterated again and
            again. A function with an argument named `epoch` is told the number of the pass, and one with an argument
            named `start` how many items of the pass to leave out, so that resuming need not draw them.
        shuffle_buffer: How many samples are held to shuffle among them; 0 keeps the order. A sample comes at most that
            many places early. The buffer is not saved: its samples are drawn again.
        length: How many samples a pass has, if that is known. Loops then know epochs and `steps_per_epoch`; a pass that
            has more or fewer is an error.
    """

    iterable: Callable[..., Iterable[PyTree]] | Iterable[PyTree]
    shuffle_buffer: int = 0
    length: int | None = None
    items: DrawnItems = dataclasses.field(init=False)
    _arguments: tuple[str, ...] = dataclasses.field(init=False)
    _probed: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        require_int("IterableSource", "shuffle_buffer", self.shuffle_buffer, least=0)
        if self.length is not None:
            require_int("IterableSource", "length", self.length, least=1)
            if self.length >= UNKNOWN_LENGTH:
                raise ValueError(
                    f"IterableSource needs a length below {UNKNOWN_LENGTH:,}. Got {self.length:,}. Leave it out."
                )
        given: Any = self.iterable
        if isinstance(given, Iterator):
            raise TypeError(
                f"IterableSource needs what can be started again, for the next epoch and to resume. "
                f"{describe_value(given)} is used up after one pass. Give it the function that makes it, not its "
                "result: IterableSource(make), or IterableSource(lambda: make(path))."
            )
        if isinstance(given, str | bytes | Mapping):
            raise TypeError(
                f"IterableSource needs a function that returns an iterator over samples, or an object that gives one. "
                f"Got {describe_value(given)}. Wrap arrays in ms.ArraySampleSource(data); for anything else write "
                "IterableSource(lambda: samples)."
            )
        object.__setattr__(self, "_arguments", () if isinstance(given, Iterable) else _arguments_of(given))
        object.__setattr__(self, "_probed", None)
        made = self._make(0, 0)
        iterator = self._iterate(made)
        try:
            first = own(next(iterator))
        except StopIteration:
            raise ValueError(f"{self.name} needs at least one sample. It gave none.") from None
        except Exception as error:
            raise noted(error, f"This came from {self.name} at its first sample.")  # noqa: B904
        finally:
            close(iterator)
        object.__setattr__(self, "_probed", made if iterator is made else None)
        length = UNKNOWN_LENGTH if self.length is None else self.length
        object.__setattr__(self, "items", DrawnItems(self.name, first, length))

    @property
    def name(self) -> str:
        """The source in errors."""
        given: Any = self.iterable
        return f"IterableSource({type(given).__name__ if isinstance(given, Iterable) else function_name(given)})"

    @property
    def slots(self) -> int:
        """How many items are held: one at least, which says whether a pass is over."""
        return max(1, self.shuffle_buffer)

    def begin(self, epoch: int, start: int) -> tuple[Iterator[PyTree], int]:
        """A new iterator over a pass, and the number of its first item: `start`, or 0 if it begins at the beginning."""
        made = self._make(epoch, start)
        if made is self._probed:
            raise TypeError(
                f"{self.name}: the function must return a new iterator at every call. It returned the same "
                f"{type(made).__name__} again. Make it inside: IterableSource(lambda: make(path))."
            )
        return self._iterate(made), start if "start" in self._arguments else 0

    def _iterate(self, made: Iterable[PyTree]) -> Iterator[PyTree]:
        try:
            return iter(made)
        except Exception as error:  # an array without axes, for one
            raise noted(error, f"This came from iter(...) in {self.name}.")  # noqa: B904

    def _make(self, epoch: int, start: int) -> Iterable[PyTree]:
        given, values = self.iterable, {"epoch": epoch, "start": start}
        if isinstance(given, Iterable):
            return given
        try:
            made = given(**{name: values[name] for name in self._arguments})
        except Exception as error:
            raise noted(error, f"This came from {self.name} at the start of pass {epoch}.")  # noqa: B904
        if not isinstance(made, Iterable):
            raise TypeError(f"{self.name}: the function must return an iterator. It returned {describe_value(made)}.")
        return made

    @never_raising
    def __repr__(self) -> str:
        length = "" if self.length is None else f"{self.length:,} samples, "
        shuffled = f"shuffle buffer of {self.shuffle_buffer:,}, " if self.shuffle_buffer else ""
        return f"{self.name[:-1]}, {length}{shuffled}{self.items.sample_spec})"


def _arguments_of(fn: Any) -> tuple[str, ...]:
    """Which of its arguments a function wants to be given; refuses one that needs others."""
    if not callable(fn):
        raise TypeError(
            "IterableSource needs a function that returns an iterator over samples, or an object that can be "
            f"iterated again. Got {describe_value(fn)}."
        )
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some functions of C have none
        return ()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    wanted = tuple(one.name for one in named if one.name in _PARAMETERS)
    needed = [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) and one.name not in wanted
    ]
    if needed:
        raise TypeError(
            "IterableSource calls its function with epoch= and start=, if it has arguments of these names, and nothing "
            f"else. {function_name(fn)} needs {', '.join(needed)}. Write: lambda: {function_name(fn)}(...)."
        )
    return wanted


def close(iterator: Any) -> None:
    """End an iterator: a generator then runs its `finally` blocks."""
    end = getattr(iterator, "close", None)
    if callable(end):
        end()


def own(value: PyTree) -> PyTree:
    """An item whose arrays are copies: an iterator may use the memory of one item for the next."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {key: own(part) for key, part in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)([own(part) for part in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(own(part) for part in value))
    return value
