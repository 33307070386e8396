"""Columns of a history as plain values and arrays, for checkpoints."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from millstream.loops._column_values import Run
from millstream.loops.column import Column
from millstream.loops.logs import Name
from millstream.text.errors import describe_value

_WORDS = {1: np.uint8, 2: np.uint16}


def column_state(path: Name, column: Column, start: int, stop: int, *, arrays: bool) -> dict[str, Any] | None:
    """What a column has from row `start` to before `stop`; None if that is nothing.

    Args:
        path: Its collection and name.
        column: The column.
        start: The first row.
        stop: The row after the last.
        arrays: Whether to keep values that are arrays with axes.
    """
    first, last = column.position(start), column.position(stop)
    if first == last:
        return None
    rows, kept, place = column.row_numbers(first, last), [], 0
    for run in column.runs(first, last):
        if arrays or isinstance(run, list) or run.ndim == 1:
            kept.append((rows[place : place + len(run)], run))
        place += len(run)
    if not kept:
        return None
    numbers = np.concatenate([numbers for numbers, _ in kept])
    runs = [_run_state(path, run) for _, run in kept]
    return {"collection": path[0], "name": path[1], "rows": packed(numbers), "values": runs}


def columns_of(states: list[dict[str, Any]], start: int, stop: int) -> Iterator[tuple[Name, np.ndarray, list[Run]]]:
    """The path, rows and values of columns, which must lie between the two rows."""
    for state in states:
        runs = [_run_of(run) for run in state["values"]]
        rows = unpacked(state["rows"], sum(map(len, runs)), f"rows of {state['name']}")
        if not len(rows) or rows[0] < start or rows[-1] >= stop or np.any(np.diff(rows) <= 0):
            raise ValueError(
                f"History.from_state: {state['name']} has values of other rows than {start} to {stop - 1}."
            )
        yield (state["collection"], state["name"]), rows, runs


def packed(numbers: np.ndarray) -> Any:
    """Whole numbers as the first and the one after the last, if none is left out; else as they are."""
    if len(numbers) and np.all(np.diff(numbers) == 1):
        return int(numbers[0]), int(numbers[-1]) + 1
    return numbers


def unpacked(numbers: Any, count: int, what: str) -> np.ndarray:
    """The numbers that `packed` was given, if there are `count` of them."""
    found = numbers[1] - numbers[0] if isinstance(numbers, tuple) else len(numbers)
    if found != count:
        raise ValueError(f"History.from_state needs {count} {what}. Got {found}.")
    return np.arange(*numbers) if isinstance(numbers, tuple) else np.asarray(numbers)


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
