"""Many rows of a history as one: what becomes of an entry that each of some steps has logged."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from millstream.loops._history import History
from millstream.loops.log_entries import Logs, Name
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value, function_name

Aggregator = Callable[[list[Any], list[int]], Any]  # of the values of some rows, and the samples their steps had

# Outputs hold a row per sample: joined again at every test, they would fill the history of a training run.
_DEFAULTS = {"stateful_metrics": "last", "outputs": "drop"}


Word = Literal["mean", "last", "first", "sum", "min", "max", "concatenate", "drop"]
Aggregations = Word | Callable[..., PyTree] | Mapping[str, str | Callable[..., PyTree]]


class Aggregation:
    """How each entry is made one value.

    Args:
        caller: The caller's name, for errors.
        given: A word or a function for all entries, or a dict of them by collection, "collection.name" or "name";
            None for the defaults.
    """

    def __init__(self, caller: str, given: Any) -> None:
        self._caller = caller
        self._all = None if given is None or isinstance(given, Mapping) else _as_aggregator(caller, given)
        chosen = given if isinstance(given, Mapping) else {}
        self._chosen = {_as_key(caller, key): _as_aggregator(caller, value) for key, value in chosen.items()}
        self._unseen = set(chosen) - {"metrics", "losses", "stateful_metrics", "outputs"}

    def __call__(self, history: History, start: int) -> Logs:
        """The rows of a history from `start` on, as one."""
        logs, weights = Logs(), history.weights()
        columns = {path: column for path, column in history.columns().items() if column.position(start) < len(column)}
        self._require_known(list(columns))
        for (collection, name), column in columns.items():
            aggregator = self._of((collection, name))
            if aggregator is None:
                continue
            first = column.position(start)
            values = column.since(first)
            try:
                value = aggregator(values, [weights[row] for row in column.rows[first:]])
            except Exception as error:
                error.add_note(
                    f"Raised by the aggregation of {collection}.{name} in {self._caller}; its last value is "
                    f"{describe_value(values[-1])}. Choose another: aggregation={{'{collection}.{name}': 'last'}}."
                )
                raise
            logs.add_entry(collection, name, value)
        return logs

    def _of(self, path: Name) -> Aggregator | None:
        """How to aggregate an entry; None if it is dropped."""
        collection, name = path
        for key in (f"{collection}.{name}", name, collection):
            if key in self._chosen:
                return self._chosen[key]
        return _WORDS[_DEFAULTS.get(collection, "mean")] if self._all is None else self._all

    def _require_known(self, paths: list[Name]) -> None:
        """Refuse keys that no entry goes by. Only the first time: later an entry may be missing for good reasons."""
        if not self._unseen or not paths:
            return
        known = {key for path in paths for key in (path[0], path[1], ".".join(path))}
        unknown, self._unseen = self._unseen - known, set()
        if unknown:
            raise ValueError(
                f"{self._caller} got an aggregation for {', '.join(map(repr, sorted(unknown)))}, which is neither a "
                f"collection nor an entry of the loop. It logs: {', '.join(map('.'.join, paths))}."
            )


def mean(values: list[Any], weights: list[int]) -> Any:
    """The mean, weighted by samples; rows without any count only if there are no others."""
    if not any(weights):
        weights = [1] * len(values)
    counted = [(np.asarray(value, np.float64), weight) for value, weight in zip(values, weights, strict=True) if weight]
    array = np.stack([value for value, _ in counted])
    factors = np.asarray([weight for _, weight in counted], np.float64)
    return _plain(np.tensordot(factors, array, axes=1) / factors.sum())


def concatenate(values: list[Any], weights: list[int]) -> np.ndarray:
    """Arrays joined along their first axis, without padding; single numbers side by side.

    Loaders pad at the end of a batch, so an array with a row per sample ends with what is not real. An array has a row
    per sample if that is so in a step without padding; of a single step it is taken for granted.
    """
    if all(np.ndim(value) == 0 for value in values):
        return np.asarray(values)
    pairs = list(zip(values, weights, strict=True))
    if any(len(value) == weight for value, weight in pairs) or (len(pairs) == 1 and weights[0]):
        values = [value[:weight] for value, weight in pairs]
    return np.concatenate(values)


def _reducer(function: Callable[..., Any]) -> Aggregator:
    return lambda values, _: _plain(function(np.stack(values), axis=0))


def _plain(value: Any) -> Any:
    """A number as Python's own; arrays as they are."""
    return value.item() if np.ndim(value) == 0 else value


_WORDS: dict[str, Aggregator | None] = {
    "mean": mean,
    "last": lambda values, _: values[-1],
    "first": lambda values, _: values[0],
    "sum": _reducer(np.sum),
    "min": _reducer(np.min),
    "max": _reducer(np.max),
    "concatenate": concatenate,
    "drop": None,
}


def _as_key(caller: str, key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{caller} needs aggregation by names of collections and entries. Got {describe_value(key)}.")
    return key


def _as_aggregator(caller: str, given: Any) -> Aggregator | None:
    if isinstance(given, str) and given in _WORDS:
        return _WORDS[given]
    if not callable(given):
        raise ValueError(
            f"{caller} needs aggregation as {', '.join(_WORDS)}, a function of (values) or (values, weights), or a "
            f"dict of these by collection or entry. Got {describe_value(given)}."
        )
    required = _count_required(given)
    if required > 2:
        raise TypeError(
            f"{caller} calls an aggregation with (values) or (values, weights). {function_name(given)} needs "
            f"{required} arguments."
        )
    return given if required == 2 else lambda values, _: given(values)


def _count_required(fn: Callable[..., Any]) -> int:
    """How many arguments a function insists on; 1 for those that do not tell, such as `max`."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in positional and parameter.default is parameter.empty for parameter in parameters)
