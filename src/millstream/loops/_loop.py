"""The loop."""

import os
from collections.abc import Callable, Sequence

import jax
import numpy as np

from millstream.loops._acting import Policy
from millstream.loops._history import History
from millstream.loops._run import Run
from millstream.loops._run_parts import LoopOptions
from millstream.loops.elapsed import Elapsed
from millstream.loops.loop_state import LoopOutput, S
from millstream.loops.signatures import Dataset, Point, Stop, Table, Tasks
from millstream.reading.contracts import PyTree
from millstream.text.keywords import answer_keywords


@answer_keywords
def loop(
    state: S,
    dataset: Dataset[PyTree],
    tasks: Tasks[Table],
    *,
    stop: Stop | None = None,
    on_start: object = None,
    on_end: object = None,
    history: History | None = None,
    elapsed: Elapsed | None = None,
    key: jax.Array | np.ndarray | None = None,
    data_state: PyTree = None,
    resume: str | os.PathLike[str] | bool | None = None,
    skip: Sequence[tuple[int, int]] | None = None,
    epoch_duration: Point | None = None,
    fuse: int | None = None,
    catch_keyboard_interrupt: bool = True,
    batch_size_fn: Callable[[PyTree], int] | None = None,
    metadata: object = None,
    policy: Policy = None,
    name: str = "loop",
) -> LoopOutput[S]:
    """Go through batches and call what is due at each step.

    Example:
        >>> def train_step(state, batch):
        ...     return ms.logs().add_metric("mean", batch.mean()), state + 1
        >>> batches = [np.ones(4), np.zeros(4), np.ones(4)]
        >>> state, history, elapsed = ms.loop(0, batches, {ms.every(1): [train_step]}, stop=2)
        >>> state, history.collect("mean"), elapsed.samples
        (2, [1.0, 0.0], 8)

    A callback gets as many of (state, batch, elapsed, loop_state) as it has arguments without a default, and returns
    nothing, logs, a state, or (logs, state). The first Ctrl-C ends the loop after the current step, the second at once;
    what there is so far is returned. An exception has it as its `loop_output`.

    Args:
        state: What callbacks hand from step to step: any value.
        dataset: An iterable of batches, or a `DataLoader`: batches are then (batch, mask), and epochs continue by
            themselves. Or a function that returns one.
        tasks: A dict from schedule to callbacks, or a list of such pairs; done in this order at each step.
        stop: When to end: a number of steps, `at(...)`, or a function of the elapsed. None: with the data.

    Other Args:
        on_start: Callbacks before the first batch.
        on_end: Callbacks after the last one, however the loop ends.
        history: An earlier history to continue with.
        elapsed: How far an earlier run had come; with the same key, the loader continues from there.
        key: The key of a loader's run.
        data_state: The state of a loader to begin with, instead of a key.
        resume: A directory that `ms.checkpoint` saves to, or True for that of the loop's own: continue with the run
            that was saved there last, as if it had never stopped; if there is none, begin.
        skip: Batches of a `DataLoader` to leave out, as ranges of their numbers, such as `[(51_200, 51_260)]`: the 60
            batches that come after the first 51,200, which are those of steps 51,201 to 51,260 of a run that leaves out
            nothing. Steps are counted without a gap; an epoch ends where that of the data does, so it has fewer steps,
            and one that is left out as a whole counts as complete. The ranges are saved with the run: when it is
            resumed, those that were saved hold as well as those given, which may not lie where it has already been.
        epoch_duration: How long an epoch is, in steps or as `at(samples=...)`; a `DataLoader` says it itself.
        fuse: Steps per dispatch, for compiled steps over a `DataLoader` whose data are arrays: that many steps become
            one program. Logs and schedules stay the same; callbacks see no batch.
        catch_keyboard_interrupt: Whether Ctrl-C ends the loop as described above, or raises.
        batch_size_fn: How many samples a batch has, where its shape does not say it.
        metadata: For callbacks, as `loop_state.metadata`.
        policy: Over an environment, the part of the state that acts: a function of the state, or of the state and the
            policy state so far, for a policy with a memory. The batch of a step is made with the policy of the state
            before that step, fused or not. "fixed" acts with the policy that the source has.
        name: For callbacks, as `loop_state.name`, and for errors.

    Returns:
        (state, history, elapsed); see `LoopOutput` for the rest.
    """
    return Run(
        state,
        dataset,
        tasks,
        LoopOptions(
            stop=stop,
            on_start=on_start,
            on_end=on_end,
            history=history,
            elapsed=elapsed,
            key=key,
            data_state=data_state,
            resume=resume,
            skip=skip,
            epoch_duration=epoch_duration,
            fuse=fuse,
            catch_keyboard_interrupt=catch_keyboard_interrupt,
            batch_size_fn=batch_size_fn,
            metadata=metadata,
            policy=policy,
            name=name,
        ),
    ).run()
