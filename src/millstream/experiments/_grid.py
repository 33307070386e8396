"""The hyperparameters of a sweep: which runs there are, and what each is called."""

import itertools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value, listed

_CALLER = "sweep"
Hyperparameters = dict[str, PyTree]  # numbers: a seed has to pass for an int, a rate for a float


def runs_of(grid: Any) -> list[Hyperparameters]:
    """The hyperparameters of each run: all combinations of a dict of lists, or a list of dicts as it is."""
    if isinstance(grid, Mapping):
        columns = {_name(name): _values(name, values) for name, values in grid.items()}
        runs = [dict(zip(columns, values, strict=True)) for values in itertools.product(*columns.values())]
        if not columns:
            raise ValueError(f"{_CALLER} needs at least one hyperparameter. Got {{}}.")
        return runs
    rows = listed(grid)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise TypeError(
            f"{_CALLER} needs a dict of lists, such as {{'lr': [0.1, 0.01], 'seed': [0, 1]}}, of which it tries all "
            f"combinations, or a list of dicts, one per run. Got {describe_value(grid)}."
        )
    names = set(rows[0])
    for number, row in enumerate(rows):
        if set(row) != names or not names:
            ours, theirs = (", ".join(map(str, found)) or "none" for found in (rows[0], row))
            raise ValueError(
                f"{_CALLER} needs the same hyperparameters for every run. Run 0 has {ours}; run {number} has {theirs}."
            )
    return [{_name(name): _number(name, row[name]) for name in rows[0]} for row in rows]


def run_names(runs: list[Hyperparameters]) -> list[str]:
    """A name for each run that can be that of a folder."""
    width = len(str(len(runs) - 1))
    texts = ["-".join(f"{name}={value_text(value)}" for name, value in run.items()) for run in runs]
    return [re.sub(r"[^\w.=+-]", "_", f"{number:0{width}}-{text}") for number, text in enumerate(texts)]


def value_text(value: Any) -> str:
    """A hyperparameter as text."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"{_CALLER} needs names of hyperparameters that are text. Got {describe_value(name)}.")
    return name


def _values(name: str, values: Any) -> list[Any]:
    found = listed(values)
    if not found:
        raise ValueError(
            f"{_CALLER} needs a list of values for {name!r}, such as [0.1, 0.01]. Got {describe_value(values)}."
        )
    return [_number(name, value) for value in found]


def _number(name: str, value: Any) -> Any:
    plain = value.item() if isinstance(value, np.generic) or getattr(value, "shape", None) == () else value
    if not isinstance(plain, bool | int | float):
        raise TypeError(
            f"{_CALLER} needs numbers: the values of a hyperparameter are arrays of one program. {name!r} has "
            f"{describe_value(value)}. What is not a number, such as a kind of model, takes a sweep for each."
        )
    return plain
