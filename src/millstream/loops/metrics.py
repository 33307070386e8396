"""Metrics that a state carries from step to step, and metrics that are logged as objects."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from millstream.loops._metric_adapters import Arrays, Kind, as_kind
from millstream.loops.log_entries import Logs
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_leaf, describe_value


class Metrics:
    """Named metrics over many batches: a pytree to carry in a state, in and out of compiled steps and scans.

    Nothing is changed: `update`, `merge` and `reset` return new metrics. Every real row counts once and alike, however
    long the batches are.

    Example:
        >>> def accuracy(preds, target):
        ...     return preds == target
        >>> metrics = ms.loops.Metrics(accuracy=accuracy)
        >>> metrics = metrics.update(preds=jnp.array([1, 2, 3, 4]), target=jnp.array([1, 2, 3, 0]))
        >>> metrics = metrics.update(
        ...     preds=jnp.array([1, 0]), target=jnp.array([1, 0]), mask=jnp.array([True, False])
        ... )
        >>> float(metrics.compute()["accuracy"])
        0.800000011920929

    In a step: `metrics = state.metrics.update(preds=preds, target=target, mask=mask)`, then
    `logs.add_stateful_metrics(metrics.compute())`; at the beginning of an epoch `metrics.reset()`.

    Args:
        metrics: By name, one of:
            - A function. It gets those of the values given to `update` that it has arguments for, and says one value
              per row, or one number, which then counts as often as the batch has real rows.
            - A class of `clu.metrics`: a metric or a collection.
            - An object of `nnx.metrics`, or any that is a pytree and has update, compute and reset, which may return
              a new object or change it.

            Classes and objects that take no `mask` are given padded batches row by row, which is slow. One number for a
            batch is one row to them, so give them one value per row if batches differ in length.
    """

    __slots__ = ("_arrays", "_kinds", "_names")

    def __init__(self, **metrics: object) -> None:
        made = [as_kind(name, metric) for name, metric in metrics.items()]
        self._names = tuple(metrics)
        self._kinds: tuple[Kind, ...] = tuple(kind for kind, _ in made)
        self._arrays: tuple[Arrays, ...] = tuple(arrays for _, arrays in made)

    def update(self, **values: PyTree) -> "Metrics":
        """Take one more batch into account.

        Args:
            values: Whatever the metrics ask for, such as preds, target and loss. `mask` says which rows are real; None
                or left out if all are.
        """
        mask = values.get("mask")
        if mask is not None:
            values["mask"] = mask = jnp.asarray(mask)
            if mask.dtype != bool or mask.ndim == 0:
                raise TypeError(f"Metrics.update needs mask to be a bool for each row. Got {describe_leaf(mask)}.")
        new = []
        for name, kind, arrays in zip(self._names, self._kinds, self._arrays, strict=True):
            try:
                new.append(kind.update(arrays, values))
            except Exception as error:
                error.add_note(f"Raised in the metric {name!r} of Metrics.update({', '.join(values)}).")
                raise
        return self._with(new)

    def merge(self, other: "Metrics") -> "Metrics":
        """The metrics of two parts of the data as those of both.

        Args:
            other: Made alike, and updated with the other part.
        """
        if not isinstance(other, Metrics) or (other._names, other._kinds) != (self._names, self._kinds):
            raise ValueError(
                f"Metrics.merge needs metrics of the same kinds. These are {self}, the others {describe_value(other)}."
            )
        both = zip(self._kinds, self._arrays, other._arrays, strict=True)
        return self._with([kind.merge(ours, theirs) for kind, ours, theirs in both])

    def compute(self) -> dict[str, jax.Array]:
        """The values over all rows so far, NaN if there were none; stays on the device.

        What says several things at once becomes several: `loss` with a mean and a deviation is `loss_mean` and
        `loss_deviation`.
        """
        return _compute(self)

    def reset(self) -> "Metrics":
        """The same metrics before the first batch."""
        return self._with([kind.reset(arrays) for kind, arrays in zip(self._kinds, self._arrays, strict=True)])

    def _with(self, arrays: Any) -> "Metrics":
        return _unflatten((self._names, self._kinds), arrays)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(self._names)})"


def _flatten(metrics: Metrics) -> tuple[tuple[Arrays, ...], Any]:
    return metrics._arrays, (metrics._names, metrics._kinds)


def _flatten_with_keys(metrics: Metrics) -> tuple[list[tuple[Any, Arrays]], Any]:
    keys = map(jax.tree_util.DictKey, metrics._names)
    return list(zip(keys, metrics._arrays, strict=True)), (metrics._names, metrics._kinds)


def _unflatten(static: Any, arrays: Any) -> Metrics:
    metrics = object.__new__(Metrics)
    metrics._names, metrics._kinds = static
    metrics._arrays = tuple(arrays)
    return metrics


jax.tree_util.register_pytree_with_keys(Metrics, _flatten_with_keys, _unflatten, _flatten)


@jax.jit
def _compute(metrics: Metrics) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, kind, arrays in zip(metrics._names, metrics._kinds, metrics._arrays, strict=True):
        values |= _expand(name, kind.compute(arrays))
    return values


_values: set[type] = set()  # types that do not compute themselves: asking a type for what it lacks is slow


def with_computed(logs: Logs) -> Logs:
    """Logs in which metric objects are replaced by their values; the same logs if there are none."""
    for entries in logs.values():
        if not _values.issuperset(map(type, entries.values())):
            return _compute_all(logs)
    return logs


def _compute_all(logs: Logs) -> Logs:
    plain, found = Logs(), False
    for (collection, name), value in logs.entries():
        if hasattr(type(value), "compute"):
            found = True
            plain.add_entries(collection, compute_metric(name, value))
        else:
            _values.add(type(value))
            plain.add_entry(collection, name, value)
    return plain if found else logs


def compute_metric(name: str, metric: Any) -> dict[str, Any]:
    """The value of a metric object under its name; several, if it says several things at once.

    Args:
        name: The name of the entry.
        metric: Anything with `compute`. Pytrees are computed by a compiled program.
    """
    if jax.tree_util.all_leaves([metric]):
        return _expand(name, metric.compute())
    try:
        return _expand(name, _compiled_compute(metric))
    except TypeError:  # it computes on the host, with NumPy or the like, or holds functions or sizes
        return _expand(name, metric.compute())


@jax.jit
def _compiled_compute(metric: Any) -> Any:
    return metric.compute()


def _expand(name: str, value: Any) -> dict[str, Any]:
    """A value under its name; the parts of a dict or dataclass under names of their own."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if not isinstance(value, Mapping):
        return {name: value}
    return {key: part for inner, given in value.items() for key, part in _expand(f"{name}_{inner}", given).items()}
