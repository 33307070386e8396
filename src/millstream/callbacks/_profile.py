"""A look at a few steps with JAX's profiler."""

import os
from typing import Any

import jax

from millstream.loops.callback import Observer
from millstream.loops.loop_state import LoopState
from millstream.text.errors import require_int, require_path

_CALLER = "profile"


class profile(Observer):
    """Record a few steps of a loop with JAX's profiler, to be looked at in TensorBoard or XProf.

    Earlier steps are waited for before the recording begins, and recorded ones before it ends, so that these steps are
    in it and no others. Each has a mark of its own, which begins with the waiting for its batch. It is done once per
    loop, by host 0.

    Example:
        >>> step = jax.jit(lambda state: state + 1)
        >>> tasks = {ms.every(1): [step, ms.callbacks.profile("traces", first=3, steps=2)]}
        >>> state, _, _ = ms.loop(jnp.zeros(4), range(6), tasks)

    Args:
        directory: The folder to write into; `tensorboard --logdir` shows it.
        first: The first step to record, counted from the beginning of the loop: the first ones compile. Where several
            steps run as one program, it is the first that begins one.
        steps: How many.
    """

    named_schedules = ("on_train_batch_end",)
    only_real_runs = True

    def __init__(self, directory: str | os.PathLike[str], first: int = 10, steps: int = 5) -> None:
        require_path(_CALLER, "directory to be a folder", directory)
        require_int(_CALLER, "first", first, least=1)
        require_int(_CALLER, "steps", steps, least=1)
        self._directory = os.fspath(directory)
        self._first = first
        self._steps = steps
        self._begun = 0  # the loop, in steps
        self._end: int | None = None  # of the recording
        self._is_done = False
        self._mark: Any = None

    def start(self, loop_state: LoopState) -> None:
        """A loop begins; with its first step, the recording may have to begin, too."""
        self._begun, self._is_done = loop_state.elapsed.steps, False
        self.observe(loop_state, 0, 0)

    def observe(self, loop_state: LoopState, start: int, stop: int) -> None:
        """Begin or end the recording between two steps."""
        if self._is_done:
            return
        steps = loop_state.elapsed.steps
        if self._end is not None and steps >= self._end:
            self._close(loop_state)
        elif self._end is not None:
            self._mark.__exit__(None, None, None)
            self._mark_next(loop_state)
        elif steps - self._begun >= self._first - 1:
            self._open(loop_state)

    def finish(self, loop_state: LoopState) -> None:
        """End the recording if the loop has ended in it."""
        if self._end is not None:
            self._close(loop_state)

    def _open(self, loop_state: LoopState) -> None:
        if jax.process_index() != 0:
            self._is_done = True
            return
        _wait(loop_state)
        try:
            jax.profiler.start_trace(self._directory)
        except RuntimeError as error:
            self._is_done = True
            raise RuntimeError(
                f"{_CALLER} cannot record step {loop_state.elapsed.steps + 1} and the next ones: {error} Let the "
                "windows of several ms.callbacks.profile not overlap, and end your own jax.profiler.start_trace before."
            ) from error
        self._end = loop_state.elapsed.steps + self._steps
        self._mark_next(loop_state)

    def _mark_next(self, loop_state: LoopState) -> None:
        """Open the mark of the next step."""
        self._mark = jax.profiler.StepTraceAnnotation(loop_state.name, step_num=loop_state.elapsed.steps + 1)
        self._mark.__enter__()

    def _close(self, loop_state: LoopState) -> None:
        self._end, self._is_done = None, True
        try:
            _wait(loop_state)
        finally:
            self._mark.__exit__(None, None, None)
            jax.profiler.stop_trace()


def _wait(loop_state: LoopState) -> None:
    """Wait for all steps that have been dispatched."""
    leaves = jax.tree.leaves((loop_state.state, loop_state.history.latest()))
    jax.block_until_ready([leaf for leaf in leaves if isinstance(leaf, jax.Array) and not leaf.is_deleted()])
