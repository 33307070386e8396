"""The builder: say how to load, then what."""

import dataclasses
from typing import Any, Generic, Self, TypeVar

from jax.sharding import Mesh

from millstream.dialects.loadax._dataset import Items
from millstream.dialects.loadax._loader import Batcher, Loader, Options
from millstream.dialects.loadax._sharding import JaxShardingStrategy
from millstream.text.errors import describe_value

T = TypeVar("T")
B = TypeVar("B")


@dataclasses.dataclass(frozen=True)
class DataLoader(Generic[T, B]):
    """How to load a dataset. Every method gives a new one, so a common part can be shared.

    Example:
        >>> from millstream.dialects.loadax import Batcher, InMemoryDataset
        >>> pairs = DataLoader(Batcher(lambda items: items)).batch_size(2)
        >>> list(pairs.workers(2).prefetch(3).build(InMemoryDataset([1, 2, 3, 4])))
        [[1, 2], [3, 4]]

    Args:
        batcher: Makes batches of lists of items; its types are those of the items and of the batches.
        options: How to load, without the methods.
    """

    batcher: Batcher[T, B]
    options: Options = dataclasses.field(default_factory=Options)

    def __post_init__(self) -> None:
        if not callable(getattr(self.batcher, "batch", None)):
            raise TypeError(
                f"DataLoader needs a Batcher, or an object with a method batch(items). "
                f"Got {describe_value(self.batcher)}. "
                "Write DataLoader(Batcher(function)).build(dataset), or Dataloader(dataset, batch_size) for lists."
            )

    def batch_size(self, batch_size: int) -> Self:
        """Items per batch; with `shard`, per batch of each process. 1 by default."""
        return self._with(batch_size=batch_size)

    def workers(self, num_workers: int) -> Self:
        """Threads that read, one batch each. 1 by default, and 0 means 1."""
        return self._with(workers=num_workers)

    def prefetch(self, factor: int) -> Self:
        """Batches that are read ahead, at least one for each worker. 2 by default."""
        return self._with(prefetch=factor)

    def shard(
        self,
        mesh: Mesh,
        data_axis_name: str | tuple[str, ...] | None = None,
        num_shards: int | None = None,
        shard_id: int | None = None,
    ) -> Self:
        """Read what this process needs of global batches over a mesh; see `JaxShardingStrategy`.

        Args:
            mesh: The mesh.
            data_axis_name: The axis that rows are divided over; "data" by default.
            num_shards: In how many parts the items are divided, if not as the mesh has it.
            shard_id: Which of them this process reads, if not the one with its number.
        """
        return self._with(sharding=JaxShardingStrategy(mesh, data_axis_name, num_shards, shard_id))

    def build(self, dataset: Items[T]) -> Loader[B]:
        """The loader for a dataset: anything with a length and `[index]` or `get(index)`."""
        return Loader(dataset, self.batcher, self.options)

    def _with(self, **options: Any) -> Self:
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **options))


DataloaderBuilder = DataLoader
