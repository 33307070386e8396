"""The batches that the steps of a saved run had."""

import contextlib
import dataclasses
import os
from typing import Generic

import jax
import numpy as np

from millstream.loader.batch_info import BatchInfo
from millstream.loader.loader import DataLoader
from millstream.loader.mixed import MixedLoader
from millstream.loops.saved_run import saved_batch
from millstream.plan.plan import STEP_LIMIT
from millstream.reading.contracts import B
from millstream.text.errors import describe_value, require_path, whole_number
from millstream.text.summaries import fields_text, never_raising


@dataclasses.dataclass(frozen=True, eq=False)
class ReplayedStep(Generic[B]):
    """A step of a saved run: its batch, and where that comes from. See `replay`.

    Example:
        >>> tasks = {ms.every(1): lambda state: state + 1, ms.every(5): ms.checkpoint("first run")}
        >>> _ = ms.loop(jnp.int32(0), loader, tasks, stop=5, key=jax.random.key(0))
        >>> replayed = ms.replay("first run", loader, step=2)
        >>> replayed.data_step, replayed.indices.shape
        (1, (4,))

    Attributes:
        step: The step, as the history of the run has it.
        batch: Its batch.
        mask: Which rows of the batch count.
        info: What else is known of the batch: its epoch, its samples, and in a `MixedLoader` its loader.
    """

    step: int
    batch: B
    mask: jax.Array
    info: BatchInfo

    @property
    def data_step(self) -> int:
        """The number of the batch among those of its loader, from 0 on: what `skip` and `init_state` take."""
        return self.info.step

    @property
    def indices(self) -> np.ndarray:
        """The indices of its samples in their source; -1 where a row is padding."""
        return self.info.indices

    @never_raising
    def __repr__(self) -> str:
        return fields_text(self)


def replay(
    directory: str | os.PathLike[str], loader: DataLoader[B] | MixedLoader[B], step: int | np.integer
) -> ReplayedStep[B]:
    """The batch that a step of a saved run had, or will have: made again, with its samples and its number.

    The newest checkpoint says where the run is in its data, and which batches it leaves out. No state of the run is
    loaded, and the step may come after the checkpoint: that at which a run broke off can be replayed as well. A run
    whose executor had `ordered=False` may have had its batches in a different order.

    Example:
        >>> tasks = {ms.every(1): lambda state: state + 1, ms.every(5): ms.checkpoint("run")}
        >>> _ = ms.loop(jnp.int32(0), loader, tasks, stop=5, key=jax.random.key(0), skip=[(1, 3)])
        >>> replayed = ms.replay("run", loader, step=2)
        >>> replayed.data_step, replayed.info.epoch, replayed.batch["x"].shape
        (3, 1, (4,))

    Args:
        directory: Where the run was saved by `ms.checkpoint`.
        loader: The loader of the run. The executor may be a different one; other data are refused.
        step: The step, as `elapsed.steps`, the history and the logs of the run have it: the first is 1.
    """
    require_path("replay", "directory to be a path", directory)
    if not isinstance(loader, DataLoader | MixedLoader):
        raise TypeError(f"replay needs loader to be the DataLoader of the run. Got {describe_value(loader)}.")
    step = whole_number("replay", "step", step, least=1, most=STEP_LIMIT)
    state = saved_batch("replay", directory, loader, step)
    with contextlib.closing(loader.iterate(state, steps=1, with_info=True)) as batches:
        for batch, mask, info in batches:
            return ReplayedStep(step, batch, mask, info)
    raise RuntimeError(
        f"replay cannot make batch {int(state.step):,} of step {step:,}: samples of it cannot be read, and the loader "
        'leaves such batches out. loader.replace(on_error="raise") shows their errors.'
    )
