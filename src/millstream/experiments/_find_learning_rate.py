"""A ramp of learning rates, one per step, in one compiled program."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millstream.experiments._learning_rate_curve import FEWEST, LearningRateCurve
from millstream.experiments._trial_step import TrialStep, compiled_step
from millstream.loops import History, Logs, loop
from millstream.loops.learning_rates import Path, injected, is_scheduled, with_rate
from millstream.loops.log_entries import describe_logged
from millstream.loops.schedules import always
from millstream.loops.signatures import Dataset
from millstream.managed import ManagedState
from millstream.pipeline.iterable import IterablePipeline
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_leaf, require_callable, require_int, require_positive, require_text

_CALLER = "find_learning_rate"
_MOST = 1_000_000  # rates


class _Carry(NamedTuple):
    state: Any
    rates: jax.Array
    number: jax.Array  # of the step


def _ramp(step: TrialStep, path: Path | None) -> Callable[..., tuple[Logs, _Carry]]:
    """The step as one of a loop, which takes the next of some rates."""

    def with_elapsed(carry: _Carry, batch: Any, elapsed: Any) -> tuple[Logs, _Carry]:
        rate = carry.rates[carry.number]
        state = carry.state if path is None else with_rate(carry.state, path, rate)
        logs, new = step(state, batch, rate, elapsed)
        return logs, carry._replace(state=new, number=carry.number + 1)

    def without(carry: _Carry, batch: Any) -> tuple[Logs, _Carry]:
        return with_elapsed(carry, batch, None)

    return compiled_step(with_elapsed if step.takes_elapsed else without, step.__name__)


def find_learning_rate(
    step: Callable[..., PyTree],
    state: PyTree,
    dataset: Dataset[PyTree],
    *,
    low: float = 1e-6,
    high: float = 1.0,
    steps: int = 200,
    optimizer: Callable[[jax.Array], PyTree] | None = None,
    key: jax.Array | np.ndarray | None = None,
    monitor: str = "loss",
) -> LearningRateCurve:
    """Train with a learning rate that grows from step to step, and see where the loss falls and where it diverges.

    Example:
        >>> import optax
        >>> rows = np.linspace(-1, 1, 64, dtype=np.float32)
        >>> loader = ms.DataLoader([ms.ArraySampleSource({"x": rows, "y": 3 * rows}), ms.BatchTransform(16)])
        >>> @ms.managed.train_step
        ... def train_step(state, batch):
        ...     rows, mask = batch
        ...     loss = jnp.mean((rows["x"] * state.params["w"] - rows["y"]) ** 2)
        ...     return ms.logs().add_loss("loss", loss)
        >>> state = ms.managed.ManagedState.create({"w": jnp.zeros(())}, optax.sgd(0.1))
        >>> found = ms.find_learning_rate(train_step, state, loader, high=100.0, optimizer=optax.sgd)
        >>> 0.01 < found.suggestion < 1.0
        True

    The rates are spaced evenly on a logarithmic axis, one per batch. Over a `DataLoader` all steps are one compiled
    program; other data are drawn batch by batch. The losses are those that a loop by hand with these rates would have.
    The given state is left as it is. How the rate reaches the step:

    - a step of three arguments is called as `step(state, batch, learning_rate)`;
    - with `optimizer=`, a managed state is updated by `optimizer(learning_rate)`, from its beginning;
    - otherwise the rate is set where `optax.inject_hyperparams` keeps it in the state.

    Args:
        step: A `managed.train_step`, or a function that returns (logs, state).
        state: What the training would begin with.
        dataset: As in `train_loop`.

    Other Args:
        low: The first rate.
        high: The last one.
        steps: How many rates.
        optimizer: A function of a learning rate that makes the optimizer, such as `optax.adam`.
        key: The key of the loader's run; by default `jax.random.key(0)`.
        monitor: The entry of the logs that is the loss, "name" or "collection.name".

    Returns:
        The curve, with a suggestion; in a notebook, its picture.
    """
    require_positive(_CALLER, "low", low, "a finite number")
    require_positive(_CALLER, "high", high, "a finite number")
    if high <= low:
        raise ValueError(f"{_CALLER} needs low below high. Got low={low:g} and high={high:g}.")
    require_int(_CALLER, "steps", steps, least=FEWEST, most=_MOST)
    require_text(_CALLER, "monitor", monitor)
    if optimizer is not None:
        require_callable(_CALLER, "optimizer", optimizer, "learning_rate")
    trial = TrialStep(_CALLER, step, "learning_rate", optimizer)
    path = None
    if optimizer is not None and isinstance(state, ManagedState):
        state = state.replace(opt_state=optimizer(jnp.float32(low)).init(state.params))
    elif optimizer is None and not trial.takes_third:
        path = _injected_path(state)
    rates = np.geomspace(low, high, steps).astype(np.float32)
    carry = _Carry(state, jnp.asarray(rates), jnp.int32(0))
    _, history, elapsed = loop(
        carry,
        dataset,
        {always(): _ramp(trial, path)},
        stop=steps,
        key=jax.random.key(0) if key is None else key,
        fuse=steps if _is_one_program(dataset) else None,
        name=_CALLER,
    )
    if elapsed.steps < FEWEST:
        raise ValueError(f"{_CALLER} needs a dataset of at least {FEWEST} batches. It ended after {elapsed.steps}.")
    losses = _numbers(history, monitor)
    return LearningRateCurve.of(rates[: len(losses)].astype(np.float64), losses)


def _numbers(history: History, monitor: str) -> np.ndarray:
    """The losses of all steps."""
    if history.column(monitor) is None:
        raise ValueError(
            f"{_CALLER}: the monitor {monitor!r} was never logged. {describe_logged(monitor, history.columns())}"
        )
    values = np.asarray(history.collect(monitor))
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        raise ValueError(
            f"{_CALLER} needs {monitor!r} to be a single number per step. The step logs {describe_leaf(values[-1])}."
        )
    return values.astype(np.float64)


def _injected_path(state: Any) -> Path:
    """Where the rate of a state can be set."""
    paths = injected(state)
    advice = (
        "Give optimizer=optax.adam, a function of the rate, for a managed state; or build the optimizer with "
        "optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), which keeps the rate in the state; or give a step "
        "of (state, batch, learning_rate)."
    )
    if len(paths) != 1:
        found = "none" if not paths else ", ".join(map(jax.tree_util.keystr, paths))
        raise ValueError(f"{_CALLER} needs one learning rate in the state, to set it. It finds {found}. {advice}")
    if is_scheduled(state, paths[0]):
        raise ValueError(
            f"{_CALLER} cannot set the learning rate at {jax.tree_util.keystr(paths[0])}: a schedule sets it at every "
            f"step. {advice}"
        )
    return paths[0]


def _is_one_program(dataset: Any) -> bool:
    """Whether a program can draw the batches itself: those of a loader, all of one shape."""
    if not hasattr(dataset, "run_steps") or isinstance(getattr(dataset, "pipeline", None), IterablePipeline):
        return False
    return len(dataset.element_specs()) == 1
