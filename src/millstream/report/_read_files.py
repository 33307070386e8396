"""Runs as files of lines have them: records and logs."""

import csv
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from millstream.callbacks.log_file import UNITS
from millstream.files.safe_path import plain_reader
from millstream.loops.history import History
from millstream.report._rows import Rows
from millstream.report._run_data import RunData, times_of
from millstream.text.errors import describe_value

_WHO = "millstream report"
# What the file of a record begins with. Other files of lines have a space behind each colon, whatever was logged.
_BEGIN_OF_RECORD = b'{"steps":0,"run":{'


def read_record(path: pathlib.Path, name: str) -> RunData:
    """The run that `ms.record` has written to a file."""
    rows, ended, is_first = Rows(), None, True
    beginnings: list[dict[str, Any]] = []
    windows: list[dict[str, Any]] = []
    for line in _whole_lines(path):
        if "logged" in line:
            rows.add(line["steps"], line["samples"], line["epochs"], line["time"], line["logged"])
        elif "spent" in line:
            windows.append({**line, "first": is_first})
            is_first = False
        elif "run" in line:
            beginnings.append(line["run"])
            is_first = True
        ended = line.get("ended")
    return RunData(name, "a record of ms.record", rows.history(), times_of(windows), beginnings, ended)


def _whole_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    with plain_reader(path, follow=True) as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
                line["steps"]
            except (ValueError, KeyError, TypeError):
                if not text.endswith(b"\n"):
                    return  # whoever wrote it was killed in the middle of it
                raise ValueError(
                    f"{_WHO} reads records as ms.record writes them. Line {number} of {path} is "
                    f"{describe_value(text[:60])}."
                ) from None
            yield line


def read_jsonl(path: pathlib.Path) -> RunData:
    """The run that `ms.jsonl_logger` or `History.to_jsonl` has written to a file, or `ms.record`."""
    with plain_reader(path, follow=True) as file:
        first = file.readline()
    if first.startswith(_BEGIN_OF_RECORD):
        return read_record(path, path.stem)
    return RunData(path.stem, "lines of JSON", History.from_jsonl(path))


def read_csv(path: pathlib.Path) -> RunData:
    """The run that `ms.csv_logger` or `History.to_csv` has written to a file."""
    made = Rows()
    with plain_reader(path, follow=True) as file:  # text would be split at "\r", too, which may be in a name
        # A line without an end is that of somebody who was killed in the middle of it. Half a number is a number, too.
        rows = csv.reader(line.decode(errors="replace") for line in file if line.endswith(b"\n"))
        header = next(rows, [])
        if tuple(header[: len(UNITS)]) != UNITS:
            raise ValueError(
                f"{_WHO} reads tables as ms.csv_logger writes them, whose header begins with {','.join(UNITS)}. "
                f"{path} begins with {describe_value(','.join(header))}."
            )
        for row in rows:
            try:
                _add_row(made, header, row)
            except ValueError:
                raise ValueError(
                    f"{_WHO} reads tables as ms.csv_logger writes them. Line {rows.line_num} of {path} is no row of "
                    f"one: {describe_value(','.join(row))}."
                ) from None
    return RunData(path.stem, "a table", made.history())


def _add_row(made: Rows, header: list[str], row: list[str]) -> None:
    steps, samples, epochs, time, _ = row[: len(UNITS)]
    entries = zip(header[len(UNITS) :], row[len(UNITS) :], strict=True)
    values = {name: value for name, text in entries if (value := _number(text)) is not None}
    made.add(int(steps), int(samples), int(epochs) if epochs else None, float(time), values)


def _number(text: str) -> float | None:
    """A value of a table; None for nothing, and for the words that `History.to_csv` writes if they were logged."""
    if text in ("True", "False"):
        return float(text == "True")
    try:
        return float(text)
    except ValueError:
        return None
