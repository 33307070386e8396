"""Many runs at once: the step mapped over their states, on the same batches."""

import hashlib
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from millstream.callbacks import checkpoint
from millstream.experiments._grid import Hyperparameters, run_names, runs_of
from millstream.experiments._run_records import RunRecords
from millstream.experiments._sweep_group import Group, SweptStates, make_group, split_history
from millstream.experiments._sweep_result import Sweep, SweptRun
from millstream.experiments._trial_step import TrialStep
from millstream.loops import LoopOutput, on_reset_step, on_test_step, on_train_step, train_loop
from millstream.loops.log_entries import require_name
from millstream.loops.signatures import Dataset, Point, Stop
from millstream.reading.contracts import PyTree
from millstream.reading.memory import nbytes
from millstream.text.errors import (
    describe_value,
    require_bool,
    require_callable,
    require_choice,
    require_int,
    require_path,
)
from millstream.text.tables import size_text

_CALLER = "sweep"
_STATES = ".states"  # beside the folders of the runs; a `*` in a shell leaves it out


def sweep(
    step: Callable[..., PyTree],
    grid: Mapping[str, Sequence[float]] | Sequence[Mapping[str, float]],
    init: Callable[[Hyperparameters], PyTree],
    dataset: Dataset[PyTree],
    *,
    stop: Stop | None = None,
    optimizer: Callable[[dict[str, jax.Array]], PyTree] | None = None,
    test_step: Callable[..., PyTree] | None = None,
    test_dataset: Dataset[PyTree] | None = None,
    key: jax.Array | np.ndarray | None = None,
    monitor: str | None = None,
    mode: Literal["min", "max"] = "min",
    at_once: int | None = None,
    directory: str | os.PathLike[str] | None = None,
    resume: bool = False,
    callbacks: Sequence[object] | None = None,
    epoch_duration: Point | None = None,
    fuse: int | None = None,
    sharding: jax.sharding.Sharding | None = None,
) -> Sweep:
    """Train many runs at once, each with its own hyperparameters, on the same batches.

    Example:
        >>> import optax
        >>> rows = np.linspace(-1, 1, 64, dtype=np.float32)
        >>> loader = ms.DataLoader([ms.ArraySampleSource({"x": rows, "y": 3 * rows}), ms.BatchTransform(16)])
        >>> def train_step(w, batch, hyperparameters):
        ...     rows, mask = batch
        ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((rows["x"] * w - rows["y"]) ** 2))(w)
        ...     return ms.logs().add_loss("loss", loss), w - hyperparameters["lr"] * grad
        >>> def init(hyperparameters):
        ...     return jax.random.normal(jax.random.key(hyperparameters["seed"]))
        >>> grid = {"lr": [0.01, 0.1, 1.0], "seed": [0, 1]}
        >>> output = ms.sweep(train_step, grid, init, loader, stop=40, key=jax.random.key(0))
        >>> len(output.histories), output.best.hyperparameters["lr"]
        (6, 1.0)

    It is one `train_loop` over the states of all runs, stacked, with your step under `jax.vmap`: one program makes a
    step of all runs, and a batch is read once for all. A run that diverges does not touch the others. The numbers of a
    run are those that it would have alone, up to rounding: XLA multiplies many matrices at once in a different order
    than one, so a loss may differ in its last digits, and more after many steps. With `at_once=1` nothing is stacked,
    and a run has the numbers of its own program, bit for bit.

    How hyperparameters reach a run: `init(hyperparameters)` makes its state, from a dict of Python numbers; a step of
    three arguments is called as `step(state, batch, hyperparameters)`, with a dict of arrays; and with `optimizer=`, a
    managed state is updated by `optimizer(hyperparameters)`.

    Args:
        step: A `managed.train_step`, or a function that returns (logs, state).
        grid: A dict of lists of numbers, of which all combinations are tried; or a list of dicts, one per run.
        init: Makes the state of a run from its hyperparameters. What states hold besides arrays, such as an optimizer
            or a model, has to compute the same in all runs; otherwise it is refused.
        dataset: As in `train_loop`.

    Other Args:
        stop: As in `train_loop`.
        optimizer: Makes the optimizer of a run from its hyperparameters, such as
            `lambda hyperparameters: optax.adam(hyperparameters["lr"])`.
        test_step: As `step`, for the test at the end of every epoch. By default that of the state, if it has one.
        test_dataset: As in `train_loop`.
        key: As in `train_loop`.
        monitor: The entry by which runs are compared; by default "loss_test" with a test, else "loss".
        mode: Whether "min" or "max" is better.
        at_once: At most that many runs are trained together; the groups come one after the other. By default all,
            whose states have to fit into memory together.
        directory: Where a record of every run is written as it runs, in a folder of its own: `millstream report
            sweep/*` compares them.
        resume: Whether to save the states in the directory at the end of every epoch, and to continue with what an
            earlier process has saved there.
        callbacks: As in `train_loop`. What the step logs are arrays there, with a number per run; the lowest of each
            loss is logged for them as well, such as `best_loss`.
        epoch_duration: As in `train_loop`.
        fuse: As in `train_loop`: that many steps of all runs per program.
        sharding: Where the stacked states lie, such as `NamedSharding(mesh, PartitionSpec("data"))`, which divides the
            runs among devices.

    Returns:
        The runs, their histories and states, and the best one.
    """
    runs = runs_of(grid)
    names = run_names(runs)
    require_callable(_CALLER, "init", init, "hyperparameters")
    if optimizer is not None:
        require_callable(_CALLER, "optimizer", optimizer, "hyperparameters")
    if monitor is not None:
        require_name(_CALLER, monitor, "monitor")
    require_choice(_CALLER, "mode", mode, ["min", "max"])
    if at_once is not None:
        require_int(_CALLER, "at_once", at_once, least=1)
    folder = None if directory is None else require_path(_CALLER, "directory to be a path", directory).expanduser()
    require_bool(_CALLER, "resume", resume)
    if resume and folder is None:
        raise ValueError(f"{_CALLER} with resume=True needs directory=, where the states are saved.")
    if folder is not None and not resume:
        _refuse_old_records(folder)
    if not isinstance(sharding, jax.sharding.Sharding | None):
        raise TypeError(f"{_CALLER} needs sharding to be a jax.sharding.Sharding. Got {describe_value(sharding)}.")
    _refuse_savers(callbacks)
    trial = TrialStep(_CALLER, step, "hyperparameters", optimizer)
    test = None if test_step is None else TrialStep(_CALLER, test_step, "hyperparameters")
    size = len(runs) if at_once is None else min(at_once, len(runs))
    found: list[SweptRun] = []
    largest, interrupted = 0, False
    for first in range(0, len(runs), size):
        last = min(first + size, len(runs))
        group = make_group(runs[first:last], first, init)
        states = group.states
        states = states if sharding is None or group.count == 1 else jax.device_put(states, sharding)
        largest = max(largest, nbytes(states))
        own = list(callbacks or ())
        own += (
            [] if folder is None else [RunRecords(folder, dict(zip(names[first:last], runs[first:last], strict=True)))]
        )
        saved = folder / _STATES / _group_name(runs[first:last]) if resume and folder is not None else None
        own += [] if saved is None else [checkpoint(saved, keep=1)]
        options: dict[str, Any] = {"stop": stop, "key": key, "epoch_duration": epoch_duration, "fuse": fuse}
        options |= {"callbacks": own, "test_dataset": test_dataset, "resume": saved is not None}
        output = _train(group, states, trial, test, dataset, options)
        for number, history in enumerate(split_history(output.history, group.count)):
            place = None if group.count == 1 else number
            run = first + number
            found.append(SweptRun(names[run], runs[run], history, output.state.states, place))
        if output.interrupted:
            interrupted = True
            break
    default = "loss" if test_dataset is None else "loss_test"
    return Sweep(tuple(found), default if monitor is None else monitor, mode, largest, interrupted)


def _train(
    group: Group, states: SweptStates, trial: TrialStep, test: TrialStep | None, dataset: Any, options: dict[str, Any]
) -> LoopOutput[SweptStates]:
    """Train some runs at once."""
    tasks: dict[Any, Any] = {on_train_step: group.step(trial, best=True)}
    if options["test_dataset"] is not None:
        own = getattr(type(states.states), "test_step", None)
        test = TrialStep(_CALLER, own, "hyperparameters") if test is None and own is not None else test
        tasks |= {} if test is None else {on_test_step: group.step(test)}
    reset = group.reset()
    tasks |= {} if reset is None else {on_reset_step: reset}
    try:
        return train_loop(states, dataset, tasks, **options)
    except Exception as error:
        error.add_note(
            f"Raised in sweep with {group.count} runs at once. Their states take {size_text(nbytes(states))}, and a "
            "step needs more; at_once= trains fewer together."
        )
        raise


def _group_name(runs: list[Hyperparameters]) -> str:
    """A name by which the states of the same runs are found again, and no others."""
    return hashlib.sha256(repr(runs).encode()).hexdigest()[:16]


def _refuse_old_records(folder: pathlib.Path) -> None:
    old = next(folder.glob("*/record.jsonl"), None)
    if old is not None:
        raise FileExistsError(
            f"{_CALLER}: {folder} has the records of another sweep, such as {old.parent.name}. Give a different "
            "directory, delete it, or continue that sweep with resume=True."
        )


def _refuse_savers(callbacks: Any) -> None:
    if callbacks is not None and not isinstance(callbacks, list | tuple):
        raise TypeError(f"{_CALLER} needs callbacks as a list. Got {describe_value(callbacks)}. Write callbacks=[...].")
    if any(getattr(callback, "saves", False) for callback in callbacks or ()):
        raise ValueError(
            f"{_CALLER} saves its states itself: give directory= and resume=True instead of ms.checkpoint."
        )
