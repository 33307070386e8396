"""A loader as a dataset of Grain."""

from typing import TYPE_CHECKING, Any

import grain

from millstream.reading.contracts import PyTree

if TYPE_CHECKING:
    from millstream.loader.iterator import BatchIterator
    from millstream.loader.loader import DataLoader


class LoaderDataset(grain.IterDataset):
    """The batches of a loader from a state on.

    Args:
        loader: The loader.
        state: Where to start.
        steps: How many batches; None for those left in the epoch.
    """

    def __init__(self, loader: "DataLoader", state: PyTree, steps: int | None) -> None:
        super().__init__()
        self._loader = loader
        self._state = state
        self._steps = steps

    def __repr__(self) -> str:
        return f"LoaderDataset({self._loader})"

    def __iter__(self) -> "LoaderIterator":
        return LoaderIterator(self._loader.iterate(self._state, steps=self._steps))


class LoaderIterator(grain.DatasetIterator):
    """An iterator of a loader, as Grain wants it.

    Args:
        batches: The iterator.
    """

    def __init__(self, batches: "BatchIterator") -> None:
        super().__init__()
        self._batches = batches

    def __repr__(self) -> str:
        return f"LoaderIterator({self._batches})"

    def __next__(self) -> Any:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        return self._batches.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._batches.set_state(state)

    def close(self) -> None:
        super().close()
        self._batches.close()
