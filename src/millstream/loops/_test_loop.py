"""Loops over a whole dataset: testing and predicting."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from millstream.loops import named
from millstream.loops._acting import Policy
from millstream.loops._dataset import Loader, as_dataset, one_pass
from millstream.loops._history import History
from millstream.loops._run import Run
from millstream.loops._run_parts import LoopOptions, caller_of
from millstream.loops.elapsed import Elapsed
from millstream.loops.loop_state import LoopOutput, S
from millstream.loops.named import NamedTasks
from millstream.loops.schedules import Period, always
from millstream.loops.signatures import Dataset, Stop, Table, Tasks
from millstream.reading.contracts import PyTree
from millstream.text.keywords import answer_keywords


@answer_keywords
def test_loop(
    state: S,
    dataset: Dataset[PyTree],
    tasks: Tasks[Table] | None = None,
    *,
    callbacks: Sequence[object] | None = None,
    stop: Stop | None = None,
    history: History | None = None,
    elapsed: Elapsed | None = None,
    key: jax.Array | np.ndarray | None = None,
    data_state: PyTree = None,
    catch_keyboard_interrupt: bool = True,
    batch_size_fn: Callable[[PyTree], int] | None = None,
    metadata: object = None,
    policy: Policy = None,
) -> LoopOutput[S]:
    """Test a model on a dataset, once.

    Example:
        >>> def test_step(state, batch):
        ...     return ms.logs().add_metric("mean", batch.mean())
        >>> _, history, _ = ms.test_loop(None, [np.ones(4), np.zeros(2)], {ms.on_test_step: test_step})
        >>> round(history.mean("mean"), 4)  # weighted by samples
        0.6667

    Args:
        state: The model; its methods `test_step` and `reset_step`, if it has them, are used.
        dataset: An iterable of batches, or a `DataLoader`, of which one epoch is used, or a function that returns one.
        tasks: Callbacks by named schedule (`on_test_step` and its like) or by any other.
        callbacks: Objects with methods called like a named schedule.

    Other Args:
        stop: When to end before the data do.
        history: As in `loop`.
        elapsed: As in `loop`.
        key: The key of a loader's run.
        data_state: As in `loop`.
        catch_keyboard_interrupt: As in `loop`.
        batch_size_fn: As in `loop`.
        metadata: As in `loop`.
        policy: As in `loop`.
    """
    dataset = as_dataset("test_loop", dataset)
    due = NamedTasks("test_loop", named.TEST, state, tasks, callbacks, watched=(named.on_test_batch_end,))
    options = LoopOptions(
        stop=stop,
        history=history,
        elapsed=elapsed,
        key=key,
        data_state=data_state,
        catch_keyboard_interrupt=catch_keyboard_interrupt,
        batch_size_fn=batch_size_fn,
        metadata=metadata,
        policy=policy,
    )
    return run_test(state, dataset, due, options)


def run_test(state: Any, dataset: Any, tasks: NamedTasks, options: LoopOptions) -> LoopOutput:
    """A test loop with these tasks."""
    on_start = [*tasks[named.on_test_begin], *tasks[named.on_reset_step]]
    each = [tasks[named.on_test_batch_begin], tasks[named.on_test_step], tasks[named.on_test_batch_end]]
    return _run_once(
        state, dataset, tasks, each, options, name="test", on_start=on_start, on_end=tasks[named.on_test_end]
    )


def _run_once(
    state: Any, dataset: Any, tasks: NamedTasks, each: list[Any], options: LoopOptions, **more: Any
) -> LoopOutput:
    """A loop over a whole dataset, unless its options say when to stop, with these callbacks at each step."""
    options = dataclasses.replace(options, **more)
    if options.stop is None and isinstance(dataset, Loader):
        length, start = dataset.steps_per_epoch, 0 if options.elapsed is None else options.elapsed.steps
        if length is None:
            dataset = one_pass(caller_of(options.name), dataset, options.key, options.data_state, start)
            options = dataclasses.replace(options, data_state=None)
        else:
            options = dataclasses.replace(options, stop=Period(length))
    pairs = [*((always(), callbacks) for callbacks in each), *tasks.others]
    return Run(state, dataset, pairs, options).run()


@answer_keywords
def predict_loop(
    state: S,
    dataset: Dataset[PyTree],
    tasks: Tasks[Table] | None = None,
    *,
    callbacks: Sequence[object] | None = None,
    stop: Stop | None = None,
    history: History | None = None,
    elapsed: Elapsed | None = None,
    key: jax.Array | np.ndarray | None = None,
    data_state: PyTree = None,
    catch_keyboard_interrupt: bool = True,
    batch_size_fn: Callable[[PyTree], int] | None = None,
    metadata: object = None,
    policy: Policy = None,
) -> LoopOutput[S]:
    """Ask a model about a dataset, once.

    Example:
        >>> def predict_step(state, batch):
        ...     return ms.logs().add_output("double", batch * 2)
        >>> output = ms.predict_loop(None, [np.ones(2), np.zeros(1)], {ms.on_predict_step: predict_step})
        >>> output.outputs["double"]
        array([2., 2., 0.])

    Args:
        state: The model; its method `predict_step`, if it has one, is used.
        dataset: An iterable of batches, or a `DataLoader`, of which one epoch is used, or a function that returns one.
        tasks: Callbacks by named schedule (`on_predict_step` and its like) or by any other.
        callbacks: Objects with methods called like a named schedule.

    Other Args:
        stop: When to end before the data do.
        history: As in `loop`.
        elapsed: As in `loop`.
        key: The key of a loader's run.
        data_state: As in `loop`.
        catch_keyboard_interrupt: As in `loop`.
        batch_size_fn: As in `loop`.
        metadata: As in `loop`.
        policy: As in `loop`.

    Returns:
        As `loop`; `outputs` has what was logged with `add_output`, all batches joined, without padding.
    """
    dataset = as_dataset("predict_loop", dataset)
    due = NamedTasks("predict_loop", named.PREDICT, state, tasks, callbacks, watched=(named.on_predict_batch_end,))
    options = LoopOptions(
        stop=stop,
        history=history,
        elapsed=elapsed,
        key=key,
        data_state=data_state,
        catch_keyboard_interrupt=catch_keyboard_interrupt,
        batch_size_fn=batch_size_fn,
        metadata=metadata,
        policy=policy,
    )
    each = [due[named.on_predict_batch_begin], due[named.on_predict_step], due[named.on_predict_batch_end]]
    start, end = due[named.on_predict_begin], due[named.on_predict_end]
    return _run_once(state, dataset, due, each, options, name="predict", on_start=start, on_end=end)
