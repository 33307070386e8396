"""Batching."""

import dataclasses
from typing import ClassVar

from millstream._core.errors import describe_value, require_int
from millstream._core.plan import Batching, Ending
from millstream._core.transform import Transform


@dataclasses.dataclass(frozen=True)
class BatchTransform(Transform):
    """Stack `batch_size` elements along a new first axis.

    Example:
        >>> loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(10)}), ms.BatchTransform(4)])
        >>> loader.steps_per_epoch, loader.element_spec()["x"].shape
        (3, (4,))

    Args:
        batch_size: Elements per batch. Batches can be batched again.
        drop_last: Leave out the samples that do not fill a batch at the end of an epoch. Wins over `pad_last_batch`.
        pad_last_batch: Complete the last batch of an epoch with zeros whose mask is False. If both are False, it is
            completed with the first samples of the next epoch, which then starts that much later.
    """

    batches: ClassVar[bool] = True

    batch_size: int
    drop_last: bool = False
    pad_last_batch: bool = True

    def __post_init__(self) -> None:
        require_int("BatchTransform", "batch_size", self.batch_size, least=1)
        for name in ("drop_last", "pad_last_batch"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"BatchTransform needs {name} to be a bool. Got {describe_value(getattr(self, name))}.")

    @property
    def ending(self) -> Ending:
        """What becomes of an epoch's last, incomplete batch."""
        return "drop" if self.drop_last else "pad" if self.pad_last_batch else "wrap"

    def batching(self, inner: int) -> Batching:
        if self.drop_last and inner < self.batch_size:
            raise ValueError(
                f"BatchTransform(batch_size={self.batch_size}, drop_last=True) would drop everything: "
                f"an epoch has only {inner} elements. Use a batch_size of at most {inner}, or drop_last=False."
            )
        return Batching(self.batch_size, self.ending, inner)
