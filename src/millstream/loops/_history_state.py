"""Columns of a history as plain values and arrays, for checkpoints."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from millstream.loops._column_values import Run
from millstream.loops.column import Column
from millstream.loops.logs import Name
from millstream.text.errors import describe_value

_WORDS = {1: np.uint8, 2: np.uint16}


def column_state(path: Name, column: Column, start: int) -> dict[str, Any]:
    """What a column has from a row on."""
    first = column.position(start)
    runs = [_run_state(path, run) for run in column.runs(first)]
    return {"collection": path[0], "name": path[1], "rows": column.row_numbers(first), "values": runs}


def columns_before(states: list[dict[str, Any]], stop: int) -> Iterator[tuple[Name, np.ndarray, list[Run]]]:
    """The path, rows and values of columns, without the rows from `stop` on."""
    for state in states:
        rows = state["rows"]
        count = int(np.searchsorted(rows, stop))
        runs, left = [], count
        for run in map(_run_of, state["values"]):
            runs.append(run[:left])
            left -= len(runs[-1])
        if left:
            raise ValueError(f"History.from_state: {state['name']} has {left} values fewer than rows.")
        if count:
            yield (state["collection"], state["name"]), rows[:count], [run for run in runs if len(run)]


def _run_state(path: Name, run: Run) -> dict[str, Any]:
    if isinstance(run, list):
        for value in run:
            if not isinstance(value, bool | int | float | complex | str | bytes | None):
                raise TypeError(
                    f"History.to_state keeps numbers, text and arrays of numbers. {'.'.join(path)} was logged as "
                    f"{describe_value(value)}. Log what of it is a number, or text."
                )
        return {"objects": list(run)}
    # Files know nothing of bfloat16 and its kin, so their bits travel as whole numbers.
    if run.dtype.isbuiltin == 2:
        return {"dtype": run.dtype.name, "array": run.view(_WORDS[run.dtype.itemsize])}
    return {"dtype": run.dtype.str, "array": run}


def _run_of(state: dict[str, Any]) -> Run:
    if "objects" in state:
        return list(state["objects"])
    array, dtype = np.asarray(state["array"]), np.dtype(state["dtype"])
    return array if array.dtype == dtype else array.view(dtype)
