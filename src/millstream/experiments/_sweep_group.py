"""Runs that are trained at once: their states stacked, and a step for all of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millstream.experiments._grid import Hyperparameters
from millstream.experiments._trial_step import TrialStep, compiled_step
from millstream.loops import History, Logs
from millstream.loops.metrics import with_computed
from millstream.managed import ManagedState
from millstream.text.errors import describe_leaf, describe_value, shortened

_CALLER = "sweep"


class SweptStates(NamedTuple):
    """The states of some runs along a new first axis, and their hyperparameters; of a single run, as they are."""

    states: Any
    hyperparameters: dict[str, jax.Array]


def stacked(
    runs: list[Hyperparameters], first: int, init: Callable[[Hyperparameters], Any], one_optimizer: bool
) -> SweptStates:
    """The states of some runs, made by `init`.

    Args:
        runs: Their hyperparameters.
        first: The number of the first, for errors.
        init: Makes the state of a run.
        one_optimizer: Whether the optimizer of the first state stands for all, because steps make their own.
    """
    states = [init(dict(run)) for run in runs]
    if one_optimizer:
        states = [_with_optimizer(state, states[0]) for state in states]
    hyperparameters = {name: jnp.asarray(np.array([run[name] for run in runs])) for name in runs[0]}
    if len(runs) == 1:
        return SweptStates(states[0], {name: values[0] for name, values in hyperparameters.items()})
    for number, state in enumerate(states):
        _require_alike(states[0], state, first, first + number)
    return SweptStates(jax.tree.map(lambda *leaves: jnp.stack(leaves), *states), hyperparameters)


def _with_optimizer(state: Any, other: Any) -> Any:
    if not isinstance(state, ManagedState):
        raise TypeError(
            f"{_CALLER} can use optimizer= only with managed states, whose steps update by it. init returned "
            f"{describe_value(state)}. Make the optimizer in the step: step(state, batch, hyperparameters)."
        )
    return state.replace(tx=other.tx)


def _require_alike(state: Any, other: Any, number: int, other_number: int) -> None:
    """Refuse states that cannot be stacked."""
    rule = f"{_CALLER} needs init to return states of one structure. Runs {number} and {other_number} differ in"
    for path, leaf in jax.tree.leaves_with_path(other):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
            raise TypeError(
                f"{_CALLER} needs states of arrays. state{jax.tree_util.keystr(path)} is {describe_value(leaf)}. Keep "
                "it outside the state; ms.create_equinox_state does so for a module."
            )
    if jax.tree.structure(state) != jax.tree.structure(other):
        if isinstance(state, ManagedState) and isinstance(other, ManagedState) and state.tx != other.tx:
            raise ValueError(
                f"{rule} their optimizers: each has its own. Give optimizer=lambda hyperparameters: "
                "optax.adam(hyperparameters['lr']), or make one optimizer outside init for all of them."
            )
        raise ValueError(
            f"{rule} it:\n  {shortened(jax.tree.structure(state))}\n  {shortened(jax.tree.structure(other))}"
        )
    for (path, leaf), theirs in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(other), strict=True):
        if np.shape(leaf) != np.shape(theirs):
            raise ValueError(
                f"{rule} state{jax.tree_util.keystr(path)}: {describe_leaf(leaf)} and {describe_leaf(theirs)}. Shapes "
                "that differ take a sweep for each."
            )


def step_of_all(trial: TrialStep, at_once: bool) -> Any:
    """A step as one of all runs: mapped over their states, on the same batch.

    Args:
        trial: The step of a run.
        at_once: Whether there are several runs; the state of a single one is not stacked, so its numbers are its own.
    """

    def with_elapsed(swept: SweptStates, batch: Any, elapsed: Any) -> tuple[Logs, SweptStates | None]:
        def one(state: Any, hyperparameters: Any) -> tuple[Logs, Any]:
            logs, new = trial(state, batch, hyperparameters, elapsed)
            # A state that is handed out as it came would be copied, at every batch of a test.
            return _numbers(trial.__name__, with_computed(logs)), None if new is state else new

        logs, states = (jax.vmap(one) if at_once else one)(swept.states, swept.hyperparameters)
        return logs, None if states is None else swept._replace(states=states)

    def without(swept: SweptStates, batch: Any) -> tuple[Logs, SweptStates | None]:
        return with_elapsed(swept, batch, None)

    return compiled_step(with_elapsed if trial.takes_elapsed else without, trial.__name__)


def reset_of_all(state: Any, at_once: bool) -> Callable[[SweptStates], SweptStates] | None:
    """What a state does at the beginning of an epoch or a test, for all runs; None if it does nothing."""
    reset = getattr(type(state), "reset_step", None)
    if reset is None:
        return None
    every = jax.vmap(reset) if at_once else reset
    return lambda swept: swept._replace(states=every(swept.states))


def _numbers(name: str, logs: Logs) -> Logs:
    if "outputs" in logs:
        raise ValueError(
            f"{_CALLER} keeps numbers. {name} logs outputs: {', '.join(logs['outputs'])}. Leave them out, and predict "
            "with the best state afterwards: ms.predict_loop(output.best.state, ...)."
        )
    return logs


def split_history(history: History, count: int) -> list[History]:
    """The history of each run, from that of all at once; what was logged once for all is in every one."""
    if count == 1:
        return [history]
    whole = history.to_state()
    return [History.from_state(_of_run(whole, number, count)) for number in range(count)]


def _of_run(state: Any, number: int, count: int) -> Any:
    columns = []
    for column in state["columns"]:
        values = [
            {**run, "array": run["array"][:, number]} if _is_of_runs(run, count) else run for run in column["values"]
        ]
        columns.append({**column, "values": values})
    return {**state, "columns": columns}


def _is_of_runs(run: Any, count: int) -> bool:
    return "array" in run and run["array"].ndim > 1 and run["array"].shape[1] == count
