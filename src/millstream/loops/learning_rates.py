"""The learning rate of an optimizer: in its state, where `inject_hyperparams` keeps it, or in a schedule of optax."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from millstream.reading.contracts import PyTree

Path = tuple[Any, ...]
_BY_RATE = "scale_by_learning_rate.<locals>.<lambda>"
_BY_SCHEDULE = "scale_by_schedule.<locals>.update_fn"
_BY_NUMBER = "scale.<locals>.update_fn"
_ADVICE = (
    "Build the optimizer with optax.inject_hyperparams(optax.adam)(learning_rate=...), which keeps the rate in its "
    "state"
)


def injected(state: PyTree) -> list[Path]:
    """Where in a state `optax.inject_hyperparams` keeps learning rates."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_has_rate)
    return [path for path, node in nodes if _has_rate(node)]


def is_scheduled(state: PyTree, path: Path) -> bool:
    """Whether a schedule sets the injected rate at a path, whatever the state says."""
    return "learning_rate" in getattr(_node(state, path), "hyperparams_states", ())


def read_rate(state: PyTree, path: Path) -> Any:
    """The injected rate at a path."""
    (rate,) = jax.tree.leaves(_node(state, path).hyperparams["learning_rate"])
    return rate


def with_rate(state: PyTree, path: Path, rate: jax.Array) -> Any:
    """The state with a different injected rate at a path."""

    def replaced(where: Path, node: Any) -> Any:
        if where != path:
            return node
        old = node.hyperparams["learning_rate"]
        return node._replace(
            hyperparams={**node.hyperparams, "learning_rate": jnp.asarray(rate, jnp.asarray(old).dtype)}
        )

    return jax.tree_util.tree_map_with_path(replaced, state, is_leaf=_has_rate)


@dataclasses.dataclass(frozen=True, eq=False)
class UsedRate:
    """The rate that updates of an optimizer are made with.

    Attributes:
        schedule: A function of the count; None if the rate is in the state.
        path: Where in the optimizer's state the count is, or the node with the rate; None for a constant rate.
    """

    schedule: Callable[[Any], Any] | None
    path: Path | None

    def of_update(self, before: PyTree, after: PyTree) -> jax.Array:
        """The rate of one update, given the optimizer's state before and after it."""
        if self.schedule is None:
            assert self.path is not None
            return read_rate(after, self.path)
        return jnp.asarray(self.schedule(0 if self.path is None else _node(before, self.path).count))

    def of_last(self, state: PyTree) -> jax.Array:
        """The rate of the last update that led to a state of the optimizer; of the first, if there was none yet."""
        if self.schedule is None:
            assert self.path is not None
            return read_rate(state, self.path)
        count = 0 if self.path is None else jnp.maximum(_node(state, self.path).count - 1, 0)
        return jnp.asarray(self.schedule(count))


def used_rate(caller: str, tx: Any, opt_state: PyTree) -> UsedRate:
    """The rate that an optimizer uses, or an error that says why it cannot be known.

    Optax keeps a schedule in the closure of a function, and its count in the state, so both are looked for by name.
    """
    paths = injected(opt_state)
    if len(paths) == 1:
        return UsedRate(None, paths[0])
    if paths:
        places = "".join(f"\n  opt_state{jax.tree_util.keystr(path)}" for path in paths)
        raise ValueError(
            f"{caller} finds several learning rates in the optimizer's state. There are:{places}\n{_LATER}"
        )
    found = list(_scalings(tx))
    schedules = list({id(fn): fn for kind, fn in found if kind == "schedule"}.values())
    if len(schedules) == 1 and not any(kind == "other" for kind, _ in found):
        nodes, _ = jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=_has_schedule)
        counts = [path for path, node in nodes if _has_schedule(node)]
        if counts:  # one for each group of parameters, if they share the schedule; all groups count alike
            return UsedRate(schedules[0], counts[0])
    constants = [number for kind, number in found if kind == "number" and _is_rate(number)]
    if not schedules and len(constants) == 1 and not any(kind == "other" for kind, _ in found):
        return UsedRate(lambda _: -constants[0], None)
    what = f"{len(schedules)} schedules" if len(schedules) > 1 else "no learning rate of optax"
    raise ValueError(
        f"{caller} cannot know the learning rate of this optimizer: it finds {what} in it. It can read one that is "
        f"given as learning_rate to an optimizer of optax, as a number or a schedule. {_ADVICE}. {_LATER}"
    )


_LATER = "Or log it in the step: logs.add_stateful_metric('learning_rate', ...)."


def _is_rate(number: Any) -> bool:
    """Whether a constant factor of updates can be a rate, which optax makes negative; a traced one may be anything."""
    return number < 0 if isinstance(number, int | float) else isinstance(number, jax.Array)


def _has_rate(node: Any) -> bool:
    hyperparams = getattr(node, "hyperparams", None)
    return isinstance(hyperparams, Mapping) and "learning_rate" in hyperparams


def _has_schedule(node: Any) -> bool:
    return type(node).__name__ == "ScaleByScheduleState"


def _node(state: Any, path: Path) -> Any:
    """What is at a path."""
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            state = getattr(state, key.name)
        elif isinstance(key, jax.tree_util.FlattenedIndexKey):
            state = list(jax.tree_util.default_registry.flatten_one_level(state)[0])[key.key]
        else:
            state = state[key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key]
    return state


def _scalings(tx: Any) -> Iterator[tuple[str, Any]]:
    """What an optimizer multiplies updates with: schedules of the rate, numbers, and others that are not known."""
    waiting, seen = [tx.update], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        name, held = getattr(value, "__qualname__", ""), _held(value)
        if name == _BY_RATE and {"learning_rate", "m"} <= held.keys():
            yield "schedule" if held["m"] == -1 else "other", held["learning_rate"]
        elif name == _BY_SCHEDULE and getattr(held.get("step_size_fn"), "__qualname__", "") != _BY_RATE:
            yield "other", held.get("step_size_fn")
        elif name == _BY_NUMBER:
            yield "number", held.get("step_size")
        else:
            waiting.extend(held.values())


def _held(value: Any) -> dict[Any, Any]:
    """What a function or a container of optax holds, by name."""
    if isinstance(value, functools.partial):
        return {"func": value.func, **dict(enumerate(value.args)), **value.keywords}
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value)
    if getattr(value, "__closure__", None):
        filled = [(name, cell) for name, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True)]
        return {name: cell.cell_contents for name, cell in filled if _is_filled(cell)}
    if hasattr(value, "__self__") and hasattr(value, "__func__"):
        return {"self": value.__self__, "func": value.__func__}
    return dict(getattr(value, "__dict__", {})) if type(value).__module__.startswith("optax") else {}


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
