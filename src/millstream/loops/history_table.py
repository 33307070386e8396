"""A history as a table: lists, a DataFrame, CSV, and lines of JSON with the way back."""

import contextlib
import csv
import io
import json
import os
import pathlib
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from millstream.files.atomic import require_place, written
from millstream.files.data_files import local_path, require_file
from millstream.loops.column import Column
from millstream.loops.elapsed import Elapsed
from millstream.loops.log_entries import Logs, Name, find_entry
from millstream.text.errors import describe_value, needs

if TYPE_CHECKING:
    import pandas

    from millstream.loops._history import History

_READER = "History.from_jsonl"
_ROWS_AT_ONCE = 4096
_FIELDS = ("steps", "samples", "samples_before", "epochs", "time", "date_start")


def to_dict(history: "History") -> dict[str, list[Any]]:
    """See `History.to_dict`."""
    table = history.units()
    columns = _single_columns(history)
    for path, column in columns.items():
        values: list[Any] = [None] * len(history)
        for row, value in zip(column.rows, column.since(0), strict=True):
            values[row] = value
        table[_short(path, list(history.columns()), table)] = values
    return table


def to_pandas(history: "History") -> "pandas.DataFrame":
    """See `History.to_pandas`."""
    with needs("History.to_pandas", "pandas", "pandas"):
        import pandas
    return pandas.DataFrame(to_dict(history))


@contextlib.contextmanager
def whole_file(caller: str, path: str | os.PathLike[str]) -> Iterator[tuple[pathlib.Path, IO[bytes]]]:
    """A file to write, which gets its name when it is whole; its folder is made if there is none."""
    final = require_place(caller, path)
    final.parent.mkdir(parents=True, exist_ok=True)
    with written(final, alone=False) as file:
        yield final, file


def to_csv(history: "History", path: str | os.PathLike[str]) -> pathlib.Path:
    """See `History.to_csv`."""
    table = to_dict(history)
    with whole_file("History.to_csv", path) as (final, file):
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
        text.detach()
    return final


def to_jsonl(history: "History", path: str | os.PathLike[str]) -> pathlib.Path:
    """See `History.to_jsonl`."""
    columns = _single_columns(history)
    with whole_file("History.to_jsonl", path) as (final, file):
        for start in range(0, len(history), _ROWS_AT_ONCE):
            for line in _lines(history, columns, start, min(start + _ROWS_AT_ONCE, len(history))):
                file.write(_as_json(line))
    return final


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[tuple[Elapsed, Logs]]:
    """What each line of a file holds; see `History.from_jsonl`."""
    found, samples = require_file(_READER, local_path(_READER, path)), 0
    with found.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
                # Where they stand apart, a collection may be called like one of them.
                units = line.pop("elapsed") if "elapsed" in line else line
                steps = units.pop("steps")
            except (ValueError, KeyError, TypeError, AttributeError):
                if not text.endswith("\n"):
                    return  # its writer was stopped in the middle of it
                raise ValueError(
                    f"{_READER} needs lines of JSON, each an object with steps and what was logged. "
                    f"Line {number} of {path} is {describe_value(text.rstrip())}."
                ) from None
            known = {name: units.pop(name) for name in _FIELDS if name in units}
            date = units.pop("date", None)
            if "date_start" not in known and date is not None:
                known["date_start"] = date - known.get("time", 0.0)
            elapsed = Elapsed(**{"samples_before": samples, **known}, steps=steps)
            samples = elapsed.samples
            yield elapsed, _as_logs(line)


def _as_logs(line: dict[str, Any]) -> Logs:
    logs = Logs()
    for name, value in line.items():
        if isinstance(value, dict):
            logs.add_entries(name, value)
        else:
            # `jsonl_logger` writes these as text, for readers that know only what JSON has.
            logs.add_metric(name, float(value) if value in ("NaN", "Infinity", "-Infinity") else value)
    return logs


def _single_columns(history: "History") -> dict[Name, Column]:
    """Columns that fit into a table."""
    return {path: column for path, column in history.columns().items() if column.single}


def _short(path: Name, paths: list[Name], taken: dict[str, Any]) -> str:
    """The shortest name under which `collect` finds an entry."""
    try:
        found = find_entry(path[1], paths)
    except ValueError:
        found = None
    return path[1] if found == path and path[1] not in taken else ".".join(path)


def _lines(history: "History", columns: dict[Name, Column], start: int, stop: int) -> list[dict[str, Any]]:
    """Some rows, each as what becomes a line."""
    lines: list[dict[str, Any]] = []
    for row in range(start, stop):
        elapsed = history.elapsed(row)
        fields = {name: getattr(elapsed, name) for name in _FIELDS}
        lines.append({"elapsed": {name: value for name, value in fields.items() if value is not None}})
    for (collection, name), column in columns.items():
        first, last = column.position(start), column.position(stop)
        for row, value in zip(column.rows[first:last], column.between(first, last), strict=True):
            lines[row - start].setdefault(collection, {})[name] = value
    return lines


def _as_json(line: dict[str, Any]) -> bytes:
    try:
        return json.dumps(line).encode() + b"\n"
    except TypeError as error:
        step = line["elapsed"]["steps"]
        raise TypeError(
            f"History.to_jsonl writes numbers and text. Step {step} logged something else: {error}."
        ) from None
