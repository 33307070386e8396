"""What changes from epoch to epoch: the order, the keys of the samples, the order of the batches."""

import dataclasses
from typing import Any, Literal

from millstream.text.errors import describe_value, require_bool, require_choice, require_int
from millstream.text.summaries import call_text

Mode = Literal["itemwise", "reseed", "repeat", "batchwise", "blocks"]
_MODES = ("itemwise", "reseed", "repeat", "batchwise", "blocks")


@dataclasses.dataclass(frozen=True)
class Shuffle:
    """How the epochs of a source differ: `ordering=Shuffle(...)`.

    Every epoch goes through every sample once in all modes. With "reseed", "repeat" and "batchwise", `drop_last=True`
    leaves out the same samples every epoch.

    Example:
        >>> source = ms.ArraySampleSource({"x": np.arange(10)}, ordering=ms.Shuffle("batchwise"))
        >>> loader = ms.DataLoader([source, ms.BatchTransform(5)])
        >>> batches = loader.iterate(loader.init_state(jax.random.key(0)), steps=4)
        >>> len({tuple(batch["x"].tolist()) for batch, mask in batches})  # two epochs of the same two batches
        2
        >>> ordering = ms.Shuffle("blocks", block_size=100, lanes=4, window=200)
        >>> source = ms.ArraySampleSource({"x": np.arange(10_000)}, ordering=ordering)
        >>> loader = ms.DataLoader([source, ms.BatchTransform(64)])
        >>> batch, mask = next(loader.iterate(loader.init_state(jax.random.key(0))))
        >>> len(set((batch["x"] // 100).tolist())) <= 12  # blocks: two or three for each lane
        True

    Args:
        mode: What an epoch has in common with the one before it. "itemwise": nothing, a new order and new keys for
            random stages; `ordering="shuffle"` is short for it. "reseed": the order. "repeat": the order and the keys,
            so the same batches. "batchwise": the batches, with their keys, which come in a new order; of batches of
            batches those are the outermost ones, and without a `BatchTransform` every sample is a batch. "repeat" and
            "batchwise" need batches that end with their epoch. A stage after a stream has keys of its own. "blocks":
            nothing, as "itemwise", but samples are read almost in sequence: for files larger than memory, and files on
            other machines.
        first_epoch: False to leave epoch 0 unshuffled: samples and batches come in sequence. The order that "reseed"
            and "repeat" keep, and the batches that "batchwise" keeps, are then those of the sequence.
        block_size: For "blocks", the most samples of a block. Blocks that are stored larger are divided. Sources that
            have no blocks need it.
        lanes: For "blocks", how many parts of the data are read side by side. Each gives the same number of rows to
            every batch, so it divides the batch size; hosts whose number divides it read no block twice. By default up
            to 64.
        window: For "blocks", how many samples of a lane are mixed at a time. By default as many as keep half of the
            source's `cache_bytes` in use, of all lanes together, or 256 MiB where a source keeps no blocks.
    """

    mode: Mode = "itemwise"
    first_epoch: bool = True
    block_size: int | None = dataclasses.field(default=None, kw_only=True)
    lanes: int | None = dataclasses.field(default=None, kw_only=True)
    window: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        require_choice("Shuffle", "mode", self.mode, _MODES)
        require_bool("Shuffle", "first_epoch", self.first_epoch)
        for name in ("block_size", "lanes", "window"):
            given = getattr(self, name)
            if given is None:
                continue
            if self.mode != "blocks":
                raise ValueError(f'Shuffle takes {name} with the mode "blocks" alone. Got {self.mode!r}.')
            require_int("Shuffle", name, given, least=1, most=(1 << 31) - 1)
        if self.mode == "blocks" and not self.first_epoch:
            raise ValueError(
                'Shuffle("blocks") shuffles every epoch: rows of a batch come from all lanes. Leave out '
                "first_epoch, or use a different mode."
            )

    @property
    def recurs(self) -> bool:
        """Whether every epoch is made of the same batches."""
        return self.mode in ("repeat", "batchwise")

    @property
    def words(self) -> str:
        """A name, equal for equal orders."""
        for name, known in _NAMED.items():
            if self == known:
                return name
        return self.mode if self.first_epoch else f"{self.mode}, first epoch in sequence"

    def __repr__(self) -> str:
        return call_text(self)


Ordering = Literal["shuffle", "sequential"] | Shuffle

# "sequential" has one order and new keys every epoch, which is what keeping the order of the sequence means.
_NAMED = {"shuffle": Shuffle("itemwise"), "sequential": Shuffle("reseed", first_epoch=False)}


def as_shuffle(caller: str, ordering: Any) -> Shuffle:
    """An ordering in full; refuses one that is not known."""
    if isinstance(ordering, Shuffle):
        return ordering
    if isinstance(ordering, str) and ordering in _NAMED:
        return _NAMED[ordering]
    raise ValueError(
        f"{caller} needs ordering 'shuffle' or 'sequential', or a Shuffle such as Shuffle('batchwise'). "
        f"Got {describe_value(ordering)}."
    )
