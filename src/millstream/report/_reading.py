"""Finding out what a run was written as."""

import collections
import csv
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from io import BufferedReader
from typing import Any

import numpy as np

from millstream.callbacks.log_file import RECORD, UNITS
from millstream.checkpoints.folders import step_name, steps_in
from millstream.checkpoints.manifest import making_sense_of, read_manifest
from millstream.errors import DamagedCheckpoint
from millstream.files.safe_path import plain_reader
from millstream.loops import History
from millstream.loops.history_parts import decode_history, is_history
from millstream.report._record_lines import parsed
from millstream.report._run_data import RunData, mixture_of, times_of
from millstream.text.errors import describe_value, require_path

_NO_EPOCHS = -1  # as the state of a history has it
_CALLER = "millstream report"
# What the file of a record begins with. Other files of lines have a space after each colon, whatever was logged.
_BEGIN_OF_RECORD = b'{"steps":0,"run":{'
_FILES = "files/"
_AT_ONCE = 1 << 19  # bytes of lines
_UNITS = UNITS[:4]  # of a row of a record, which has no date
_BEGIN_OF_ROW = (*(unit.encode() for unit in _UNITS), b"logged")
_ONLY_NUMBERS = bytes.maketrans(b"\n", b",")
_LOOKS_FOR = f"""\
It looks for:
  a folder of ms.record: {RECORD} in it
  a folder of ms.checkpoint: folders named by steps, such as 0000000100
  a file of ms.callbacks.jsonl_logger: its name ends with .jsonl
  a file of ms.callbacks.csv_logger: its name ends with .csv"""


class Rows:
    """Rows of numbers, in order."""

    def __init__(self) -> None:
        self._count = 0
        self._moments: dict[str, list[np.ndarray]] = {unit: [] for unit in _UNITS}
        self._columns: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}

    def extend(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """More rows: each has its `steps`, `samples`, `epochs` and `time`, and values by name in `logged`."""
        for names, alike in itertools.groupby(lines, lambda line: tuple(line["logged"])):
            rows = [[*(line[unit] for unit in _UNITS), *line["logged"].values()] for line in alike]
            self.add_table(names, np.array(rows, np.float64))

    def add_table(self, names: Sequence[str], table: np.ndarray) -> None:
        """More rows: their steps, samples, epochs (NaN for none) and times, and a column for each name."""
        rows = np.arange(self._count, self._count + len(table))
        self._count += len(table)
        columns = np.ascontiguousarray(table.T)
        columns[2] = np.where(np.isnan(columns[2]), _NO_EPOCHS, columns[2])
        for unit, values in zip(_UNITS, columns, strict=False):
            self._moments[unit].append(values if unit == "time" else values.astype(np.int64))
        for name, values in zip(names, columns[len(_UNITS) :], strict=True):
            at, known = self._columns.setdefault(name, ([], []))
            at.append(rows)
            known.append(values)

    def history(self) -> History:
        """All of them."""
        units = {unit: _joined(parts, np.int64) for unit, parts in self._moments.items()}
        moments = {
            "steps": units["steps"],
            "samples": units["samples"],
            "weights": np.diff(units["samples"], prepend=0),
            "epochs": units["epochs"],
            "times": units["time"].astype(np.float64),
            "starts": [[0, 0.0]],
        }
        columns = [
            {
                "collection": "metrics",
                "name": name,
                "rows": _joined(rows, np.int64),
                "values": [{"dtype": "float64", "array": _joined(values, np.float64)}],
            }
            for name, (rows, values) in self._columns.items()
        ]
        return History.from_state({"start": 0, "moments": moments, "columns": columns})


def _joined(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
    """One array; what comes later is added to that, not to its parts."""
    parts[:] = [np.concatenate(parts) if parts else np.empty(0, dtype)]
    return parts[0]


class RecordReader:
    """The record of a run, which may grow while it is read.

    Args:
        path: Of its file.
        name: What the run is called.
    """

    def __init__(self, path: pathlib.Path, name: str) -> None:
        self._path = path
        self._name = name
        self._identity: tuple[int, int] | None = None
        self._forget()

    def _forget(self) -> None:
        self._offset, self._number, self._newest = 0, 0, b""
        self._rows, self._ended, self._ended_at, self._is_first = Rows(), None, None, True
        self._beginnings: list[dict[str, Any]] = []
        self._windows: list[dict[str, Any]] = []

    def read(self) -> bool:
        """Read the lines that are new; returns whether any are.

        A file that was cut or replaced, as when a run is resumed or begins again, is read from its beginning.
        """
        with plain_reader(self._path, follow=True) as file:
            status = os.fstat(file.fileno())
            is_other = (status.st_dev, status.st_ino) != self._identity or not self._continues(file)
            if is_other:
                self._forget()
                self._identity = status.st_dev, status.st_ino
            begin = self._offset
            file.seek(begin)
            rest = b""  # of a line that is being written, or whose writer was killed in the middle of it
            while data := file.read(_AT_ONCE):
                data = rest + data
                end = data.rfind(b"\n") + 1
                self._take(data[:end])
                rest = data[end:]
        return is_other or self._offset > begin

    def _continues(self, file: BufferedReader) -> bool:
        """Whether the newest line that was read is where it was: lines have times in them, so none is like another."""
        file.seek(self._offset - len(self._newest))
        return file.read(len(self._newest)) == self._newest

    def _take(self, data: bytes) -> None:
        """Take in whole lines."""
        count, quotes = data.count(b"\n"), data[: data.find(b"\n")].count(b'"')
        if data.count(b'"') != count * quotes:  # not all of them are alike
            lines = data.splitlines(keepends=True)
            for _, alike in itertools.groupby(lines, lambda line: line.count(b'"')):
                self._take_alike(b"".join(alike))
        elif data:
            self._take_alike(data)

    def _take_alike(self, data: bytes) -> None:
        table = _as_table(data)
        if table is None:
            self._take_parsed(data.splitlines(keepends=True))
        else:
            self._rows.add_table(*table)
            self._ended = self._ended_at = None
        self._offset += len(data)
        self._number += data.count(b"\n")
        self._newest = data[data.rfind(b"\n", 0, -1) + 1 :]

    def _take_parsed(self, lines: list[bytes]) -> None:
        for number, text in enumerate(lines, start=self._number + 1):
            line = parsed(self._path, number, text)
            if "logged" in line:
                self._rows.extend([line])
            elif "spent" in line:
                self._windows.append({**line, "first": self._is_first})
                self._is_first = False
            elif "run" in line:
                self._beginnings.append(line["run"])
                self._is_first = True
            elif "code" in line and self._beginnings:
                self._beginnings[-1]["code"] = line["code"]
            self._ended, self._ended_at = line.get("ended"), line.get("date")

    def run(self) -> RunData:
        """What has been read."""
        history, times = self._rows.history(), times_of(self._windows)
        mixture = mixture_of(self._windows, self._beginnings)
        kind, beginnings, media = "a record of ms.record", [*self._beginnings], _media_beside(self._path)
        return RunData(self._name, kind, history, times, beginnings, self._ended, mixture, self._ended_at, media)


def _as_table(data: bytes) -> tuple[list[str], np.ndarray] | None:
    """Lines of rows that logged the same entries, as `Rows.add_table` takes them; None if they are not that.

    A record of 10^6 rows is 10^6 lines. What is common to them is cut out, and the numbers are read all at once, which
    takes half the time of reading each line as JSON.
    """
    first, count = data[: data.find(b"\n")].split(b'"')[1::2], data.count(b"\n")
    if tuple(first[: len(_BEGIN_OF_ROW)]) != _BEGIN_OF_ROW or any(name.endswith(b"\\") for name in first):
        return None
    parts = data.split(b'"')
    if parts[1::2] != first * count:
        return None
    try:
        numbers = json.loads(b"[%b]" % b"".join(parts[2::2]).translate(_ONLY_NUMBERS, b":{}").removesuffix(b","))
        table = np.array(numbers, np.float64).reshape(count, len(first) - 1)
        return [json.loads(b'"%b"' % name) for name in first[len(_BEGIN_OF_ROW) :]], table
    except (ValueError, TypeError):
        return None


def read_record(path: pathlib.Path, name: str) -> RunData:
    """The run that `ms.record` has written to a file."""
    reader = RecordReader(path, name)
    reader.read()
    return reader.run()


def _media_beside(path: pathlib.Path) -> pathlib.Path | None:
    """The file with the images and histograms of a record, by what the record is called; None if there is none."""
    found = path.with_name(path.name.replace("record", "media", 1))
    return found if path.name.startswith("record") and found.is_file() else None


def read_jsonl(path: pathlib.Path) -> RunData:
    """The run that `ms.callbacks.jsonl_logger` or `History.to_jsonl` has written to a file, or `ms.record`."""
    with plain_reader(path, follow=True) as file:
        first = file.readline()
    if first.startswith(_BEGIN_OF_RECORD):
        return read_record(path, path.stem)
    return RunData(path.stem, "lines of JSON", History.from_jsonl(path))


def read_csv(path: pathlib.Path) -> RunData:
    """The run that `ms.callbacks.csv_logger` or `History.to_csv` has written to a file."""
    lines = []
    with plain_reader(path, follow=True) as file:  # text would be split at "\r", too, which may be in a name
        # A line without an end is that of somebody who was killed in the middle of it. Half a number is a number, too.
        rows = csv.reader(line.decode(errors="replace") for line in file if line.endswith(b"\n"))
        header = next(rows, [])
        if tuple(header[: len(UNITS)]) != UNITS:
            raise ValueError(
                f"{_CALLER} reads tables as ms.callbacks.csv_logger writes them, whose header begins with "
                f"{','.join(UNITS)}. {path} begins with {describe_value(','.join(header))}."
            )
        for row in rows:
            try:
                lines.append(_line(header, row))
            except ValueError:
                raise ValueError(
                    f"{_CALLER} reads tables as ms.callbacks.csv_logger writes them. Line {rows.line_num} of {path} "
                    f"is not a row of one: {describe_value(','.join(row))}."
                ) from None
    made = Rows()
    made.extend(lines)
    return RunData(path.stem, "a table", made.history())


def _line(header: list[str], row: list[str]) -> dict[str, Any]:
    steps, samples, epochs, time, _ = row[: len(UNITS)]
    entries = zip(header[len(UNITS) :], row[len(UNITS) :], strict=True)
    values = {name: value for name, text in entries if (value := _number(text)) is not None}
    units = {"steps": int(steps), "samples": int(samples), "epochs": int(epochs) if epochs else None}
    return {**units, "time": float(time), "logged": values}


def _number(text: str) -> float | None:
    """A value of a table; None for nothing, and for the words that `History.to_csv` writes if they were logged."""
    if text in ("True", "False"):
        return float(text == "True")
    try:
        return float(text)
    except ValueError:
        return None


def read_checkpoint(folder: pathlib.Path) -> RunData:
    """The run whose checkpoints are in a folder of `ms.checkpoint`, as far as the newest one has it."""
    wrong = []
    for step in reversed(steps_in(folder)):
        try:
            with making_sense_of("its history"):
                history = decode_history(_history(folder / step_name(step)))
        except DamagedCheckpoint as error:
            wrong.append(f"\n  {step_name(step)}: {error}")
            continue
        return RunData(folder.name, f"the checkpoint of step {step:,}", history)
    raise DamagedCheckpoint(
        f"millstream report found no checkpoint in {folder} whose history is whole:{''.join(wrong)}"
    )


def _history(checkpoint: pathlib.Path) -> dict[str, bytes]:
    """The files with the history, compared with their hashes."""
    found = {}
    for path, (_, digest) in read_manifest(checkpoint).files.items():
        name = path.removeprefix(_FILES)
        if path.startswith(_FILES) and is_history(name):
            with plain_reader(checkpoint / path) as file:
                found[name] = file.read()
            if hashlib.sha256(found[name]).hexdigest() != digest:
                raise DamagedCheckpoint(f"{path} differs from its SHA-256 in the manifest")
    if not found:
        raise DamagedCheckpoint("it has no history, so ms.checkpoint has not written it")
    return found


def read_runs(paths: Sequence[str | os.PathLike[str]]) -> list[RunData]:
    """Several runs. Those of one name are called by as much of their paths as tells them apart."""
    runs = [read_run(path) for path in paths]
    tell_apart(runs, paths)
    return runs


def tell_apart(runs: Sequence[RunData], paths: Sequence[str | os.PathLike[str]]) -> None:
    """Name runs that have one name by as much of their paths as differs."""
    places = [pathlib.Path(path).expanduser().resolve().parts for path in paths]
    for length in range(2, max(map(len, places)) + 1):
        names = collections.Counter(run.name for run in runs)
        for run, parts in zip(runs, places, strict=True):
            if names[run.name] > 1:
                run.name = pathlib.PurePath(*parts[-length:]).as_posix()


def read_run(path: str | os.PathLike[str]) -> RunData:
    """The run that was written to a folder or a file."""
    found = require_path(_CALLER, "the path of a run", path).expanduser().resolve()
    if not found.exists():
        raise FileNotFoundError(f"{_CALLER} found nothing at {found}.\n{_LOOKS_FOR}")
    if found.is_file():
        readers = {".jsonl": read_jsonl, ".csv": read_csv}
        if found.suffix not in readers:
            raise ValueError(f"{_CALLER} cannot tell what {found} is.\n{_LOOKS_FOR}")
        return readers[found.suffix](found)
    if (found / RECORD).exists():
        return read_record(found / RECORD, found.name)
    if steps_in(found):
        return read_checkpoint(found)
    names = sorted(path.name for path in found.iterdir())
    listed = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    raise FileNotFoundError(f"{_CALLER} found no run in {found}, which has: {listed or 'nothing'}.\n{_LOOKS_FOR}")
