"""The callbacks of ciclo. Each can be unpacked into tasks: `{**ciclo.keras_bar(total=100)}`."""

import os
from typing import Any, Literal

import millstream as ms
from millstream.dialects.ciclo._loops import LoopCallbackBase as LoopCallbackBase
from millstream.dialects.ciclo._loops import LoopElement as LoopElement
from millstream.dialects.ciclo._loops import WrappedCallback, wrapping
from millstream.loops.elapsed import Elapsed
from millstream.loops.log_entries import Logs

__all__ = [
    "LoopCallbackBase",
    "LoopElement",
    "checkpoint",
    "early_stopping",
    "inner_loop",
    "keras_bar",
    "noop",
    "tqdm_bar",
    "wandb_logger",
]

inner_loop = wrapping(ms.inner_loop)
keras_bar = wrapping(ms.callbacks.keras_bar)
wandb_logger = wrapping(ms.callbacks.wandb_logger)
noop = WrappedCallback(ms.loops.noop)


class checkpoint(WrappedCallback):
    """Saves a run whenever it is due, and always its final state.

    Args:
        ckpt_dir: Where; one run per directory.
        keep: How many of the latest checkpoints are kept, and of the best, if there is a monitor.
        overwrite: Whether a new run replaces what an earlier one has left.
        keep_every_n_steps: Checkpoints at multiples of this many steps are kept for good.
        monitor: The entry of the logs that says which are best.
        mode: Whether the best has the smallest ("min") or the largest ("max") value.
    """

    def __init__(
        self,
        ckpt_dir: str | os.PathLike[str],
        *,
        keep: int = 3,
        overwrite: bool = False,
        keep_every_n_steps: int | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        best = 0 if monitor is None else keep
        options: dict[str, Any] = {"overwrite": overwrite, "keep_every": keep_every_n_steps, "mode": mode}
        super().__init__(ms.checkpoint(ckpt_dir, keep=keep, best=best, monitor=monitor, **options))

    def __call__(self, elapsed: Elapsed, state: Any, logs: Any = None) -> None:
        """Save by hand.

        Args:
            elapsed: From `ciclo.elapse`.
            state: The state after this step.
            logs: What the step has logged, for a monitor.
        """
        entries = Logs({} if logs is None else logs).entries()
        self.unwrap()(elapsed, state, metrics={name: value for (_, name), value in entries})


class early_stopping(WrappedCallback):
    """Stops a loop when a value has not become better for some time.

    Args:
        monitor: The value to watch, as "name" or "collection.name".
        patience: How long to continue without an improvement: steps, or `at(...)`.
        min_delta: An improvement is a change by more than this.
        mode: Whether "min" or "max" is better.
        baseline: What the first improvement has to be better than.
        restore_best_weights: Whether the loop returns the state of the best value.
    """

    def __init__(
        self,
        monitor: str,
        patience: Any,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        baseline: float | None = None,
        restore_best_weights: bool = False,
    ) -> None:
        options: dict[str, Any] = {"baseline": baseline, "restore_best_weights": restore_best_weights}
        super().__init__(ms.callbacks.early_stopping(monitor, patience, min_delta=min_delta, mode=mode, **options))


class tqdm_bar(WrappedCallback):
    """A bar of tqdm.

    Args:
        total: Where the run will end: steps, or `at(...)`.
        **tqdm_options: Anything else that tqdm takes.
    """

    def __init__(self, total: Any = None, **tqdm_options: Any) -> None:
        super().__init__(ms.callbacks.tqdm_bar(total, **tqdm_options))

    def __call__(self, elapsed: Elapsed, batch: Any = None) -> None:
        """Show by hand how far a run is.

        Args:
            elapsed: From `ciclo.elapse`.
            batch: Not needed: the elapsed has counted it.
        """
        self.unwrap()(elapsed)
