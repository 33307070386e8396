"""Which items each host reads, and how its batches become parts of global ones."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, overload

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from millstream.loader.agreement import require_agreement
from millstream.reading.contracts import PyTree
from millstream.sharding import distribute_global_batch, rows_by_process, shard_count
from millstream.sharding.batch_sharding import nearest
from millstream.sharding.mesh_config import checked_axes, given_or_context_mesh, over_axes
from millstream.text.errors import require_int

_CALLER = "DataLoader.shard"


@dataclasses.dataclass(frozen=True)
class JaxShardingStrategy:
    """Rows of a batch over an axis of a mesh; `.shard(mesh, data_axis_name="data")` makes one.

    Example:
        >>> strategy = JaxShardingStrategy(jax.make_mesh((1,), ("data",)), "data")
        >>> strategy.distribute_global_batch(np.ones((4, 2), np.float32)).sharding.spec
        P('data',)

    Args:
        mesh: The mesh.
        data_shard_axis: The axis that rows are divided over, or several; "data" by default. The first versions took a
            `PartitionSpec` here, whose first axis is meant.
        num_shards: In how many parts the items are divided, if not as the mesh has it: by default each process reads
            what its devices need, which is the same for processes that share rows.
        shard_id: Which part this process reads, with `num_shards`; by default the number of the process.
    """

    mesh: Mesh
    data_shard_axis: str | tuple[str, ...] | PartitionSpec | None = None
    num_shards: int | None = None
    shard_id: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", given_or_context_mesh(_CALLER, self.mesh))
        self._over(self.data_shard_axis)
        if self.num_shards is not None or self.shard_id is not None:
            shards = jax.process_count() if self.num_shards is None else self.num_shards
            shard = jax.process_index() if self.shard_id is None else self.shard_id
            _require_shard(_CALLER, shards, shard)
            object.__setattr__(self, "num_shards", shards)
            object.__setattr__(self, "shard_id", shard)

    def named_sharding(self, *names: Any) -> NamedSharding:
        """A sharding over this mesh: one name of an axis, or None, for each axis of an array.

        Example:
            >>> JaxShardingStrategy(jax.make_mesh((1,), ("data",))).named_sharding(None, "data").spec
            P(None, 'data')
        """
        return NamedSharding(self.mesh, PartitionSpec(*names))

    def distribute_global_batch(self, local_batch: PyTree, *, data_axis: str | None = None) -> PyTree:
        """One global batch of the local batches of all processes. Nothing is sent between hosts.

        Example:
            >>> strategy = JaxShardingStrategy(jax.make_mesh((1,), ("data",)))
            >>> batch = strategy.distribute_global_batch({"x": np.ones((4, 2), np.float32), "y": np.arange(4)})

        Args:
            local_batch: A tree of arrays with one row per item, as the loader gives it.
            data_axis: A different axis to divide rows over.
        """
        return distribute_global_batch(
            local_batch, self._over(self.data_shard_axis if data_axis is None else data_axis)
        )

    def get_shard(self, dataset_size: int, shard_id: int, num_shards: int) -> list[int]:
        """The items of one part of a dataset: neighbours, and in the last part also what is left over.

        This is a division for loops of your own. A loader with `.shard(mesh)` divides each batch instead.

        Example:
            >>> JaxShardingStrategy(jax.make_mesh((1,), ("data",))).get_shard(7, 1, 2)
            [3, 4, 5, 6]
        """
        require_int("JaxShardingStrategy.get_shard", "dataset_size", dataset_size, least=0)
        _require_shard("JaxShardingStrategy.get_shard", num_shards, shard_id)
        length = dataset_size // num_shards
        end = dataset_size if shard_id == num_shards - 1 else (shard_id + 1) * length
        return [*range(shard_id * length, end)]

    def items_of_process(self, size: int, batch_size: int) -> "Shard":
        """Which of `size` items this process reads, in batches of `batch_size` of its own."""
        if self.num_shards is not None and self.shard_id is not None:
            return _checked(Shard(size, self.num_shards, (self.shard_id,), batch_size))
        sharding = self._over(self.data_shard_axis)
        if not sharding.is_fully_addressable:
            mesh = tuple(self.mesh.shape.items())
            facts = (("items", f"{size:,}"), ("batch_size", f"{batch_size}"), ("mesh", f"{mesh}"))
            require_agreement("DataLoader.build", facts)
        held = _held(sharding)
        if batch_size % len(held):
            raise ValueError(
                f"{_CALLER} needs a batch_size that divides by {len(held)}, the parts of a batch that the devices of "
                f"this process hold (of {shard_count(sharding)} in all). Got {batch_size}. "
                f"{nearest(batch_size, len(held))}"
            )
        return _checked(Shard(size, shard_count(sharding), held, batch_size // len(held)))

    def _over(self, axes: Any) -> NamedSharding:
        if isinstance(axes, PartitionSpec):
            axes = next(iter(axes), None)
        return over_axes(self.mesh, checked_axes(_CALLER, "data" if axes is None else axes, self.mesh.axis_names))


@dataclasses.dataclass(frozen=True)
class Shard(Sequence[int]):
    """The items that one process reads, in order: its parts of each global batch.

    A global batch is a run of neighbouring items, divided into parts of one length, so it does not depend on which
    process holds which part. The last one is as long as it can be with parts of one length: of the items at the end,
    fewer than there are parts are left out.

    Example:
        >>> list(Shard(11, 2, (1,), 3)), list(Shard(11, 2, (0, 1), 3))
        ([3, 4, 5, 8, 9], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])

    Args:
        size: Items in all.
        parts: Parts of a global batch.
        held: Which of them this process holds.
        width: Items per part.
    """

    size: int
    parts: int
    held: tuple[int, ...]
    width: int

    @functools.cached_property
    def _whole(self) -> int:
        """Global batches of full length."""
        return self.size // (self.parts * self.width)

    @functools.cached_property
    def _last_width(self) -> int:
        """Items per part of the global batch after them."""
        return (self.size - self._whole * self.parts * self.width) // self.parts

    def __len__(self) -> int:
        return len(self.held) * (self._whole * self.width + self._last_width)

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[int]: ...
    def __getitem__(self, index: int | slice, /) -> int | list[int]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        batch, row = divmod(range(len(self))[index], len(self.held) * self.width)
        width = self.width if batch < self._whole else self._last_width
        part, inside = divmod(row, width)
        return batch * self.parts * self.width + self.held[part] * width + inside


def _require_shard(caller: str, num_shards: int, shard_id: int) -> None:
    require_int(caller, "num_shards", num_shards, least=1)
    require_int(caller, "shard_id", shard_id, least=0)
    if shard_id >= num_shards:
        raise ValueError(f"{caller} needs shard_id below num_shards, {num_shards}. Got {shard_id}.")


def _checked(shard: Shard) -> Shard:
    if 0 < shard.size < shard.parts:
        raise ValueError(
            f"{_CALLER} divides a batch into {shard.parts} parts, with at least one item each. Got {shard.size} items."
        )
    return shard


def _held(sharding: NamedSharding) -> tuple[int, ...]:
    """The parts of a batch that the devices of this process hold."""
    by_process = {process: rows.tolist() for process, rows in rows_by_process(sharding, shard_count(sharding)).items()}
    counts = {process: len(rows) for process, rows in by_process.items()}
    if len(set(counts.values())) > 1 or len(counts) < jax.process_count():
        raise ValueError(
            f"{_CALLER} needs every process to hold as many parts of a batch as the others. Got, by process: {counts}. "
            "Lay the devices out evenly, or give num_shards and shard_id."
        )
    return tuple(by_process[jax.process_index()])
