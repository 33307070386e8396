"""Rows as lines of JSON."""

import json
import math
import os
from typing import Any

from millstream.callbacks._writer import Row, Sink, Writer
from millstream.callbacks.log_file import UNITS, LogFile
from millstream.loops.signatures import Every

_encode = json.JSONEncoder(allow_nan=False).encode


class _JsonlFile(Sink):
    caller = "jsonl_logger"
    separator = "."
    reserved = frozenset(UNITS)

    def __init__(self, path: Any, overwrite: bool) -> None:
        self.place = path
        self._file = LogFile(self.caller, path, overwrite, lambda line: int(json.loads(line)["steps"]))

    def open(self, step: int) -> int:
        return self._file.open(step)

    def write(self, rows: list[Row]) -> None:
        self._file.write("".join(map(_line, rows)).encode())

    def close(self) -> None:
        self._file.close()


def _line(row: Row) -> str:
    line = {"steps": row.step, "samples": row.samples, "epochs": row.epochs, "time": row.time, "date": row.date}
    try:
        return _encode(line | row.values) + "\n"
    except ValueError:
        return _encode(line | {name: _finite(value) for name, value in row.values.items()}) + "\n"


def _finite(value: float) -> float | str:
    """A number as JSON has it; NaN and infinities, which JSON has not, as text that `float` understands."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def jsonl_logger(path: str | os.PathLike[str], *, every: Every | None = None, overwrite: bool = False) -> Writer:
    """Write what is logged to a file with one JSON object per line, in the background.

    Example:
        >>> import json, pathlib
        >>> def train_step(state, batch):
        ...     return ms.logs().add_metric("loss", 0.5), state + 1
        >>> _ = ms.loop(0, range(3), {ms.every(1): [train_step, ms.callbacks.jsonl_logger("run.jsonl")]})
        >>> rows = [json.loads(line) for line in pathlib.Path("run.jsonl").read_text().splitlines()]
        >>> rows[2]["steps"], rows[2]["loss"]
        (3, 0.5)

    An object has steps, samples, epochs (null if unknown), time and date, and the entries of that row. Numbers
    that JSON does not have are the strings "NaN", "Infinity" and "-Infinity". Files of earlier runs, resuming, errors
    and use by hand are as for `csv_logger`.

    Args:
        path: The file.

    Other Args:
        every: Which rows to write, as for `csv_logger`.
        overwrite: Whether a new run replaces the rows of another.
    """
    return Writer(_JsonlFile(path, overwrite), every)
