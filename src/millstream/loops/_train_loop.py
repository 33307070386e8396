"""The training loop: steps, epochs, and a test loop at the end of each."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from millstream.loops import named
from millstream.loops._acting import Policy, has_policy, resolve_policy
from millstream.loops._dataset import Loader, as_dataset, epoch_of
from millstream.loops._history import History
from millstream.loops._inner_loop import InnerLoopOptions, inner_loop
from millstream.loops._run import Run
from millstream.loops._run_parts import LoopOptions
from millstream.loops._test_loop import run_test
from millstream.loops.elapsed import Elapsed
from millstream.loops.loop_state import LoopOutput, S
from millstream.loops.named import NamedTasks
from millstream.loops.schedules import EpochBegins, EpochEnds, OrFinal, Period, Schedule, always, as_every, as_stop
from millstream.loops.signatures import Dataset, Every, Point, Stop, Table, Tasks
from millstream.plan.phases import EpochLengths
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value, require_int
from millstream.text.keywords import answer_keywords


@answer_keywords
def train_loop(
    state: S,
    dataset: Dataset[PyTree],
    tasks: Tasks[Table] | None = None,
    *,
    callbacks: Sequence[object] | None = None,
    test_dataset: Dataset[PyTree] | None = None,
    epoch_duration: Point | None = None,
    test_every: Every | None = None,
    test_duration: Point | None = None,
    test_name: str = "test",
    stop: Stop | None = None,
    history: History | None = None,
    elapsed: Elapsed | None = None,
    key: jax.Array | np.ndarray | None = None,
    data_state: PyTree = None,
    resume: str | os.PathLike[str] | bool | None = None,
    skip: Sequence[tuple[int, int]] | None = None,
    fuse: int | None = None,
    limit_batches: int | None = None,
    fast_dev_run: bool | int = False,
    sanity_batches: int = 0,
    inner_loop_kwargs: InnerLoopOptions | None = None,
    catch_keyboard_interrupt: bool = True,
    batch_size_fn: Callable[[PyTree], int] | None = None,
    metadata: object = None,
    policy: Policy = None,
) -> LoopOutput[S]:
    """Train a model, and test it at the end of every epoch and of the run.

    Example:
        >>> def train_step(state, batch):
        ...     return ms.logs().add_metric("loss", 1 / (1 + state)), state + 1
        >>> def test_step(state, batch):
        ...     return ms.logs().add_metric("loss", 1 / (1 + state))
        >>> state, history, elapsed = ms.train_loop(
        ...     0,
        ...     [np.ones(4)] * 6,
        ...     {ms.on_train_step: train_step, ms.on_test_step: test_step},
        ...     test_dataset=[np.ones(4)],
        ...     epoch_duration=3,
        ... )
        >>> history.collect("steps", "loss_test")
        ([3, 6], [0.25, 0.14285714285714285])

    At a step this order holds: on_epoch_begin and on_reset_step (at the first step of an epoch), on_train_batch_begin,
    on_train_step, testing, on_epoch_end (at the last step of an epoch), on_train_batch_end, all other tasks.

    Args:
        state: The model; its methods `train_step`, `test_step` and `reset_step`, if it has them, are used.
        dataset: An iterable of batches, or a `DataLoader`: batches are then (batch, mask), and epochs continue by
            themselves. Or a function that returns one.
        tasks: Callbacks by named schedule (`on_train_step` and its like) or by any other.
        callbacks: Objects with methods called like a named schedule, bars and loggers.
        test_dataset: What to test on: a `DataLoader`, an iterable, or a function that returns one.
        test_every: When to test, instead of at the end of every epoch: a number of steps, or a schedule such as
            `ms.every(time=600)`. The end of the run is always tested.
        epoch_duration: How long an epoch is, in steps or as `at(samples=...)`; a `DataLoader` says it itself.
        stop: When to end: a number of steps, `at(epochs=...)`, or a function of the elapsed.
        key: The key of a loader's run; also that of a test loader, which goes through the same batches every time.

    Other Args:
        test_duration: How many batches to test on, if not all of them.
        test_name: What test results are called: `loss` becomes `loss_test`.
        history: As in `loop`.
        elapsed: As in `loop`.
        data_state: As in `loop`.
        resume: As in `loop`.
        skip: As in `loop`.
        fuse: As in `loop`.
        limit_batches: At most that many batches per epoch and per test, to try things out.
        fast_dev_run: Run one step (or that many) and one test of as many batches, without callbacks that leave
            something after, to see whether all of it works.
        sanity_batches: Test on that many batches before the training, to see whether it works. Nothing is logged.
        inner_loop_kwargs: For the test loop: `aggregation` and `output_state`, see `inner_loop`.
        catch_keyboard_interrupt: As in `loop`.
        batch_size_fn: As in `loop`.
        metadata: As in `loop`.
        policy: As in `loop`; a test over an environment acts with the policy of the state that is tested.
    """
    if isinstance(fast_dev_run, bool):
        fast_dev_run = int(fast_dev_run)
    require_int("train_loop", "fast_dev_run", fast_dev_run, least=0)
    require_int("train_loop", "sanity_batches", sanity_batches, least=0)
    if limit_batches is not None:
        require_int("train_loop", "limit_batches", limit_batches, least=1)
    if fast_dev_run:
        limit_batches = fast_dev_run
        stop, resume = (0 if elapsed is None else elapsed.steps) + fast_dev_run, None
    dataset = as_dataset("train_loop", dataset)
    epoch: Point | EpochLengths | None = epoch_duration
    if epoch is None and isinstance(dataset, Loader):
        epoch = epoch_of(dataset)
    if limit_batches is not None:
        epoch = _shorter("epoch_duration", epoch, limit_batches)
    given = NamedTasks(
        "train_loop",
        (*named.TRAIN, *named.TEST),
        state,
        tasks,
        callbacks,
        watched=(named.on_epoch_end, named.on_train_batch_end),
        leave_out=bool(fast_dev_run),
    )
    common = LoopOptions(
        key=key, batch_size_fn=batch_size_fn, metadata=metadata, catch_keyboard_interrupt=catch_keyboard_interrupt
    )
    tested: Schedule = EpochEnds() if test_every is None else as_every("train_loop", "test_every", test_every)
    _require_sense(given, test_dataset, test_every, epoch)
    _require_policy(policy, dataset, test_dataset)
    evaluation, trial = [], []
    if test_dataset is not None:
        duration = test_duration
        if limit_batches is not None:
            duration = _shorter("test_duration", test_duration, limit_batches)
        test = functools.partial(
            _test, dataset=test_dataset, tasks=given.named_only(), duration=duration, policy=policy, options=common
        )
        evaluation = [inner_loop(test_name, test, **({} if inner_loop_kwargs is None else inner_loop_kwargs))]
        if sanity_batches:

            def try_out(state: Any) -> None:
                test(state, duration=sanity_batches)

            trial = [try_out]  # in the run, so that Ctrl-C ends both, and a resumed state is the one that is tried
    options = dataclasses.replace(
        common,
        on_start=[*trial, *given[named.on_train_begin]],
        on_end=given[named.on_train_end],
        stop=stop,
        history=history,
        elapsed=elapsed,
        data_state=data_state,
        resume=resume,
        skip=skip,
        epoch_duration=epoch,
        fuse=fuse,
        policy=policy if has_policy(dataset) else None,
        name="train",
    )
    return Run(state, dataset, list(_training_tasks(given, OrFinal(tested), evaluation)), options).run()


def _training_tasks(tasks: NamedTasks, tested: Schedule, evaluation: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """What is done at a step, in order."""
    yield EpochBegins(), [*tasks[named.on_epoch_begin], *tasks[named.on_reset_step]]
    yield always(), tasks[named.on_train_batch_begin]
    yield always(), tasks[named.on_train_step]
    yield tested, evaluation
    yield EpochEnds(), tasks[named.on_epoch_end]
    yield always(), tasks[named.on_train_batch_end]
    yield from tasks.others


def _test(
    state: Any, *, dataset: Any, tasks: NamedTasks, duration: Any, policy: Policy, options: LoopOptions
) -> LoopOutput:
    dataset = as_dataset("train_loop", dataset)
    policy = policy if has_policy(dataset) else None
    return run_test(state, dataset, tasks, dataclasses.replace(options, stop=duration, policy=policy))


def _require_sense(tasks: NamedTasks, test_dataset: Any, test_every: Any, epoch_duration: Any) -> None:
    """Refuse a test that would never run, and a dataset that could be tested on only once."""
    if test_dataset is None:
        if test_every is not None:
            raise ValueError("train_loop got test_every and no test_dataset to test on. Give it test_dataset=...")
        unused = [name for name in named.TEST if name != named.on_reset_step and tasks.is_given(name)]
        if unused:
            raise ValueError(
                f"train_loop got {', '.join(unused)} and no test_dataset to test on. Give it test_dataset=..., or "
                f"leave {'it' if len(unused) == 1 else 'them'} out of tasks."
            )
    elif not tasks[named.on_test_step]:
        raise ValueError(
            "train_loop got a test_dataset and nothing to do with it. Give tasks an on_test_step: "
            "{ms.on_train_step: train_step, ms.on_test_step: test_step}."
        )
    elif isinstance(test_dataset, Iterator):
        raise TypeError(
            f"train_loop needs a test_dataset that can be gone through again: {describe_value(test_dataset)} is used "
            "up after one test. Give a function that returns a new one, a list or a DataLoader."
        )
    if epoch_duration is None:
        waiting = [name for name in (named.on_epoch_begin, named.on_epoch_end) if tasks[name]]
        untold = test_dataset is not None and test_every is None
        if untold or waiting:
            fix = " Or say when to test: test_every=1_000." if untold and not waiting else ""
            raise ValueError(
                f"train_loop needs epoch_duration (such as steps per epoch) for {', '.join(waiting) or 'test_dataset'}"
                f": these data do not say how long an epoch is.{fix}"
            )


def _require_policy(policy: Policy, dataset: Any, test_dataset: Any) -> None:
    """Refuse an environment without a policy, and a policy without an environment, before anything runs."""
    given = test_dataset if has_policy(test_dataset) else dataset
    if has_policy(given) or not callable(test_dataset):  # what a function will return is not known yet
        resolve_policy("train_loop", policy, given)


def _shorter(name: str, duration: Any, batches: int) -> int:
    """A duration, cut to that many batches."""
    if isinstance(duration, EpochLengths):
        return batches
    point = None if duration is None else as_stop("train_loop", duration, name)
    steps = point.units.get("steps") if isinstance(point, Period) else None
    return batches if steps is None else min(int(steps), batches)
