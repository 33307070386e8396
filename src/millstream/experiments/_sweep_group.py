"""Runs that are trained at once: their states stacked, and a step for all of them."""

import dataclasses
import functools
import re
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
from millstream.text.errors import describe_leaf, describe_value, raised_in, shortened

_CALLER = "sweep"
_LARGE = ("outputs", "images", "histograms")  # collections whose arrays have an axis that is not that of the runs
_OF_RUNS = "_of_runs"  # after the name of a collection
_STATEFUL = "stateful_metrics"  # which has its name, by which its last value counts in a test
BEST = "best_"  # of all runs; before the name of a loss


class SweptStates(NamedTuple):
    """The states of some runs along a new first axis, and their hyperparameters; of a single run, as they are."""

    states: Any
    hyperparameters: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Some runs that are trained at once.

    Attributes:
        first: The number of the first of them.
        states: Their states; those of one that is alone are not stacked, so its numbers are its own.
        kinds: Shapes and dtypes of the state of each, with what each holds besides arrays. Only the first, if that is
            the same in all.
        count: How many runs.
    """

    first: int
    states: SweptStates
    kinds: list[Any]
    count: int

    def step(self, trial: TrialStep, *, best: bool = False) -> Any:
        """A step as one of all runs: mapped over their states, on the same batch.

        Args:
            trial: The step of a run.
            best: Whether to log the lowest of each loss as well, for bars and whoever else needs a single number.
        """
        several = self.count > 1

        def with_elapsed(swept: SweptStates, batch: Any, elapsed: Any) -> tuple[Logs, SweptStates | None]:
            self._require_one_program(trial, swept, batch, elapsed)

            def one(state: Any, hyperparameters: Any) -> tuple[Logs, Any]:
                return _outputs(trial, state, batch, hyperparameters, elapsed)

            logs, states = (jax.vmap(one) if several else one)(swept.states, swept.hyperparameters)
            logs = _of_runs(logs, best) if several else logs
            return logs, None if states is None else swept._replace(states=states)

        def without(swept: SweptStates, batch: Any) -> tuple[Logs, SweptStates | None]:
            return with_elapsed(swept, batch, None)

        return compiled_step(with_elapsed if trial.takes_elapsed else without, trial.__name__)

    def reset(self) -> Callable[[SweptStates], SweptStates] | None:
        """What a state does at the beginning of an epoch or a test, for all runs; None if it does nothing."""
        reset = getattr(type(self.states.states), "reset_step", None)
        if reset is None:
            return None
        every = jax.vmap(reset) if self.count > 1 else reset
        return lambda swept: swept._replace(states=every(swept.states))

    def _require_one_program(self, trial: TrialStep, swept: SweptStates, batch: Any, elapsed: Any) -> None:
        """Refuse runs whose steps differ by what their states hold besides arrays: that of the first stands for all.

        Such things, functions above all, may be equal without saying so; what they compute says it.
        """
        if len(self.kinds) == 1:
            return
        hyperparameters = {name: _spec(values, 1) for name, values in swept.hyperparameters.items()}
        given = jax.tree.map(_spec, (batch, elapsed))

        def program(kind: Any) -> tuple[str, list[Any]]:
            made = jax.make_jaxpr(functools.partial(_outputs, trial))(kind, given[0], hyperparameters, given[1])
            return re.sub(r" at 0x[0-9a-f]+", "", str(made)), made.consts

        text, constants = program(self.kinds[0])
        for number, kind in enumerate(self.kinds[1:], start=1):
            other, others = program(kind)
            if other != text or not all(map(np.array_equal, constants, others)):
                raise ValueError(
                    f"{_CALLER} needs one {trial.__name__} for all runs. Those of runs {self.first} and "
                    f"{self.first + number} differ, because of what their states hold besides arrays"
                    f"{_differences(self.kinds[0], kind)}. A learning rate: give optimizer=lambda hyperparameters: "
                    "optax.adam(hyperparameters['lr']). Other numbers: write step(state, batch, hyperparameters)."
                )


def make_group(runs: list[Hyperparameters], first: int, init: Callable[[Hyperparameters], Any]) -> Group:
    """Some runs at their beginning.

    Args:
        runs: Their hyperparameters.
        first: The number of the first.
        init: Makes the state of a run.
    """
    with raised_in("sweep: init(hyperparameters)"):
        states = [init(dict(run)) for run in runs]
    hyperparameters = {name: jnp.asarray(np.array([run[name] for run in runs])) for name in runs[0]}
    if len(runs) == 1:
        alone = {name: values[0] for name, values in hyperparameters.items()}
        return Group(first, SweptStates(states[0], alone), [None], 1)
    for number, state in enumerate(states):
        _require_alike(states[0], state, first, first + number)
    structure = jax.tree.structure(states[0])
    columns = zip(*map(jax.tree.leaves, states), strict=True)
    joined = jax.tree.unflatten(structure, [jnp.stack(leaves) for leaves in columns])
    is_one = all(jax.tree.structure(state) == structure for state in states)
    kinds = [None] if is_one else [jax.tree.map(lambda leaf: _spec(jnp.asarray(leaf)), state) for state in states]
    return Group(first, SweptStates(joined, hyperparameters), kinds, len(runs))


def _spec(array: Any, left_out: int = 0) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array without its first axes."""
    return jax.ShapeDtypeStruct(array.shape[left_out:], array.dtype)


def _differences(state: Any, other: Any) -> str:
    """The fields of managed states that differ, in words."""
    if type(state) is not type(other) or not isinstance(state, ManagedState):
        return ""
    fixed = [field.name for field in dataclasses.fields(state) if field.metadata.get("static", False)]
    found = [name for name in fixed if getattr(state, name) != getattr(other, name)]
    return f" ({', '.join(found)})"


def _require_alike(state: Any, other: Any, number: int, other_number: int) -> None:
    """Refuse states that cannot be stacked."""
    rule = f"{_CALLER} needs init to return states of one structure. Runs {number} and {other_number} differ in"
    for path, leaf in jax.tree.leaves_with_path(other):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float):
            raise TypeError(
                f"{_CALLER} needs states of arrays. state{jax.tree_util.keystr(path)} is {describe_value(leaf)}. Keep "
                "it outside the state; ms.create_equinox_state does so for a module."
            )
    ours, theirs = jax.tree.leaves_with_path(state), jax.tree.leaves_with_path(other)
    if [path for path, _ in ours] != [path for path, _ in theirs]:
        raise ValueError(
            f"{rule} it:\n  {shortened(jax.tree.structure(state))}\n  {shortened(jax.tree.structure(other))}"
        )
    for (path, leaf), (_, their) in zip(ours, theirs, strict=True):
        if np.shape(leaf) != np.shape(their):
            raise ValueError(
                f"{rule} state{jax.tree_util.keystr(path)}: {describe_leaf(leaf)} and {describe_leaf(their)}. Shapes "
                "that differ take a sweep for each."
            )


def _outputs(trial: TrialStep, state: Any, batch: Any, hyperparameters: Any, elapsed: Any) -> tuple[Logs, Any]:
    """What the step of a run logs, and its next state; None if that is the same."""
    logs, new = trial(state, batch, hyperparameters, elapsed)
    # A state that is handed out as it came would be copied, at every batch of a test.
    return _numbers(trial.__name__, with_computed(logs)), None if new is state else new


def _of_runs(logs: Logs, best: bool) -> Logs:
    """Logs with a number per run, in collections of their own: a loop takes a vector of losses for one per row."""
    named = Logs({name if name == _STATEFUL else f"{name}{_OF_RUNS}": entries for name, entries in logs.items()})
    lowest = {f"{BEST}{name}": jnp.nanmin(losses) for name, losses in logs.get("losses", {}).items() if best}
    return named.add_metrics(lowest) if lowest else named


def _numbers(name: str, logs: Logs) -> Logs:
    wrong = [f"{collection}.{entry}" for (collection, entry), _ in logs.entries() if collection in _LARGE]
    if wrong:
        raise ValueError(
            f"{_CALLER} keeps numbers. {name} logs {', '.join(wrong)}. Leave that out, and ask the best state "
            "afterwards: ms.predict_loop(output.best.state, ...)."
        )
    return logs


def split_history(history: History, count: int) -> list[History]:
    """The history of each run, from that of all at once; what was logged once for all is in every one."""
    return [History.from_state(part) for part in split_rows(history, count, 0, len(history))]


def split_rows(history: History, count: int, start: int, stop: int) -> list[Any]:
    """The rows from `start` to before `stop` for each run, as `History.to_state` gives them."""
    whole: Any = history.to_state(start, stop)
    return [whole] if count == 1 else [_of_run(whole, number, count) for number in range(count)]


def _of_run(state: Any, number: int, count: int) -> Any:
    losses = {column["name"] for column in state["columns"] if column["collection"] == f"losses{_OF_RUNS}"}
    lowest = {f"{BEST}{name}" for name in losses}
    columns = []
    for column in state["columns"]:
        collection = column["collection"].removesuffix(_OF_RUNS)
        is_of_runs = collection != column["collection"]
        if collection == "metrics" and not is_of_runs and column["name"] in lowest:
            continue
        values = [
            {**run, "array": run["array"][:, number]} if is_of_runs or _is_vector(collection, run, count) else run
            for run in column["values"]
        ]
        columns.append({**column, "collection": collection, "values": values})
    return {**state, "columns": columns}


def _is_vector(collection: str, run: Any, count: int) -> bool:
    """Whether values of a stateful metric are those of the runs: a callback may have logged one for all of them."""
    return collection == _STATEFUL and "array" in run and run["array"].ndim > 1 and run["array"].shape[1] == count
