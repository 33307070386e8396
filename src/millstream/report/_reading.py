"""Finding out what a run was written as."""

import collections
import csv
import hashlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millstream.callbacks.log_file import RECORD, UNITS
from millstream.checkpoints.folders import step_name, steps_in
from millstream.checkpoints.manifest import making_sense_of, read_manifest
from millstream.errors import DamagedCheckpoint
from millstream.files.safe_path import plain_reader
from millstream.loops import History
from millstream.loops.history_parts import decode_history, is_history
from millstream.report._record_lines import whole_lines
from millstream.report._run_data import RunData, mixture_of, times_of
from millstream.text.errors import describe_value, require_path

_NO_EPOCHS = -1  # as the state of a history has it
_CALLER = "millstream report"
# What the file of a record begins with. Other files of lines have a space after each colon, whatever was logged.
_BEGIN_OF_RECORD = b'{"steps":0,"run":{'
_FILES = "files/"
_LOOKS_FOR = f"""\
It looks for:
  a folder of ms.record: {RECORD} in it
  a folder of ms.checkpoint: folders named by steps, such as 0000000100
  a file of ms.callbacks.jsonl_logger: its name ends with .jsonl
  a file of ms.callbacks.csv_logger: its name ends with .csv"""


class Rows:
    """Rows of numbers, in order."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._samples: list[int] = []
        self._epochs: list[int] = []
        self._times: list[float] = []
        self._columns: dict[str, tuple[list[int], list[float]]] = {}

    def add(self, steps: int, samples: int, epochs: int | None, time: float, values: Mapping[str, float]) -> None:
        """One more row."""
        row = len(self._steps)
        self._steps.append(steps)
        self._samples.append(samples)
        self._epochs.append(_NO_EPOCHS if epochs is None else epochs)
        self._times.append(time)
        for name, value in values.items():
            rows, known = self._columns.setdefault(name, ([], []))
            rows.append(row)
            known.append(value)

    def history(self) -> History:
        """All of them."""
        samples = np.array(self._samples, np.int64)
        moments = {
            "steps": np.array(self._steps, np.int64),
            "samples": samples,
            "weights": np.diff(samples, prepend=0),
            "epochs": np.array(self._epochs, np.int64),
            "times": np.array(self._times, np.float64),
            "starts": [[0, 0.0]],
        }
        columns = [
            {
                "collection": "metrics",
                "name": name,
                "rows": np.array(rows, np.int64),
                "values": [{"dtype": "float64", "array": np.array(values, np.float64)}],
            }
            for name, (rows, values) in self._columns.items()
        ]
        return History.from_state({"start": 0, "moments": moments, "columns": columns})


def read_record(path: pathlib.Path, name: str) -> RunData:
    """The run that `ms.record` has written to a file."""
    rows, ended, ended_at, is_first = Rows(), None, None, True
    beginnings: list[dict[str, Any]] = []
    windows: list[dict[str, Any]] = []
    for line in whole_lines(path):
        if "logged" in line:
            rows.add(line["steps"], line["samples"], line["epochs"], line["time"], line["logged"])
        elif "spent" in line:
            windows.append({**line, "first": is_first})
            is_first = False
        elif "run" in line:
            beginnings.append(line["run"])
            is_first = True
        elif "code" in line and beginnings:
            beginnings[-1]["code"] = line["code"]
        ended, ended_at = line.get("ended"), line.get("date")
    mixture, media = mixture_of(windows, beginnings), _media_beside(path)
    times, kind = times_of(windows), "a record of ms.record"
    return RunData(name, kind, rows.history(), times, beginnings, ended, mixture, ended_at, media)


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
    made = Rows()
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
                _add_row(made, header, row)
            except ValueError:
                raise ValueError(
                    f"{_CALLER} reads tables as ms.callbacks.csv_logger writes them. Line {rows.line_num} of {path} "
                    f"is not a row of one: {describe_value(','.join(row))}."
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
    places = [pathlib.Path(path).expanduser().resolve().parts for path in paths]
    for length in range(2, max(map(len, places)) + 1):
        names = collections.Counter(run.name for run in runs)
        for run, parts in zip(runs, places, strict=True):
            if names[run.name] > 1:
                run.name = pathlib.PurePath(*parts[-length:]).as_posix()
    return runs


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
