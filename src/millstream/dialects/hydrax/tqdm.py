"""Progress bars of tqdm for a `Dataloader`: one for training, and inside it one for each validation pass."""

from collections.abc import Iterator
from typing import Any, Self, TypeVar

from millstream.dialects.hydrax._batch import Batch, TrainingBatch, ValidationBatch
from millstream.dialects.hydrax._dataloader import Dataloader
from millstream.text.errors import needs, require_int

D = TypeVar("D")


class ProgressMonitor:
    """Bars for the batches of a `Dataloader`, moved by `begin_batch` and `end_batch`.

    Example:
        >>> from millstream.dialects.hydrax import DataGroup, Dataloader
        >>> from millstream.dialects.hydrax.tqdm import ProgressMonitor
        >>> def load(number, arrays, seed):
        ...     arrays["x"][...] = number
        >>> group = DataGroup(2, range(6), loader_arrays={"x": ((), np.int32, jnp.int32)})
        >>> with Dataloader(load, group, end_at=("epoch", 1)) as dataloader:
        ...     with ProgressMonitor(dataloader, disable=True) as monitor:
        ...         for batch in dataloader:
        ...             monitor.begin_batch(batch)
        ...             monitor.end_batch(batch)

    Args:
        dataloader: Whose batches they are.
        report_interval: After that many batches, tell how long the loop had to wait for each and how many were left
            out, if it had to and any were. 0 for never.
        description: What stands before the bar.
        tqdm_options: Anything else that tqdm takes.
    """

    def __init__(
        self, dataloader: Dataloader[Any], report_interval: int = 0, description: str = "train", **tqdm_options: Any
    ) -> None:
        require_int("ProgressMonitor", "report_interval", report_interval, least=0)
        with needs("ProgressMonitor", "tqdm", "progress"):
            import tqdm.auto
        self._tqdm = tqdm.auto.tqdm
        self._options = tqdm_options
        self._dataloader = dataloader
        self._interval = report_interval
        self._batches = self._left_out = 0
        first = dataloader.first_batch
        self._train = self._bar(description, total=dataloader.last_batch, initial=first)
        self._last_train, self._last_valid = first - 1, -1
        self._valid: Any = None

    def begin_batch(self, batch: Batch[Any]) -> None:
        """A batch is begun: a pass gets a bar, which goes when it is over."""
        if batch.is_validation and self._valid is None:
            self._valid = self._bar("validation", total=self._dataloader.batches_per_validation, leave=False)
            self._last_valid = -1
        elif batch.is_training and self._valid is not None:
            self._end_pass()

    def end_batch(self, batch: Batch[Any]) -> None:
        """A batch is done."""
        if isinstance(batch, TrainingBatch):
            self._count(self._train, batch.batch_num - self._last_train)
            self._last_train = batch.batch_num
        elif isinstance(batch, ValidationBatch) and self._valid is not None:
            self._count(self._valid, batch.validation_epoch_batch - self._last_valid)
            self._last_valid = batch.validation_epoch_batch

    def close(self) -> None:
        """Close the bars; closing twice does no harm."""
        if self._valid is not None:
            self._end_pass()
        self._train.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bar(self, description: str, **options: Any) -> Any:
        return self._tqdm(**{"desc": description, "unit": "batch", "dynamic_ncols": True, **options, **self._options})

    def _end_pass(self) -> None:
        self._valid.close()
        self._valid = None
        self._train.unpause()  # validation does not count for the speed of training

    def _count(self, bar: Any, batches: int) -> None:
        """Numbers that are skipped are those of batches that were left out."""
        bar.update(batches)
        self._left_out += batches - 1
        self._batches += 1
        if self._interval and self._batches % self._interval == 0:
            self._report()

    def _report(self) -> None:
        waited = self._dataloader.idle_usec() / 1000 / self._interval
        if waited >= 1:
            self._tqdm.write(f"Dataloader: the loop waits {waited:.0f} ms for each batch. More loaders might help.")
        if self._left_out:
            share = self._left_out / (self._left_out + self._interval)
            self._tqdm.write(
                f"Dataloader: {self._left_out} batches were left out ({share:.1%}), as their loader raised."
            )
            self._left_out = 0


def tbatches(
    dataloader: Dataloader[D], report_interval: int = 0, description: str = "train", **tqdm_options: Any
) -> Iterator[Batch[D]]:
    """The batches of a `Dataloader`, with progress bars. The `with` block of the loader is in here.

    Example:
        >>> from millstream.dialects.hydrax import DataGroup, Dataloader
        >>> from millstream.dialects.hydrax.tqdm import tbatches
        >>> def load(number, arrays, seed):
        ...     arrays["x"][...] = number
        >>> group = DataGroup(2, range(6), loader_arrays={"x": ((), np.int32, jnp.int32)})
        >>> for batch in tbatches(Dataloader(load, group, end_at=("epoch", 1)), disable=True):
        ...     print(batch.arrays["x"])
        [0 1]
        [2 3]
        [4 5]

    Args:
        dataloader: The loader, not entered yet.
        report_interval: After that many batches, tell of waiting and of batches that were left out. 0 for never.
        description: What stands before the bar.
        tqdm_options: Anything else that tqdm takes.
    """
    with dataloader, ProgressMonitor(dataloader, report_interval, description, **tqdm_options) as monitor:
        for batch in dataloader:
            monitor.begin_batch(batch)
            yield batch
            monitor.end_batch(batch)
            del batch
