"""The file of a record: what a run is, and behind that rows and times, in the order of their steps."""

import collections
import json
import os
import warnings
from typing import Any

from millstream.callbacks._background import Row, Sink
from millstream.callbacks.log_file import LogFile
from millstream.files.safe_path import NotPlainFile
from millstream.text.errors import require_path

RECORD = "record.jsonl"
_WHO = "record"


class Line(Row):
    """Something else than what was logged: its `values` are the rest of its line.

    One without values is not written. It says that all rows before its step have come.
    """


class RecordFile(Sink):
    """A file with a line for each row, and lines of other kinds where they belong among them.

    Every line has `steps`, and no line has fewer than the one before it, so that a resumed run can cut what it will
    write again.

    Attributes:
        description: What the run is. It is written whenever a run begins or goes on.
        lines: Lines to be written as soon as all rows of their steps are; added by the loop, taken by the thread.
    """

    who = _WHO
    separator = "."

    def __init__(self, directory: Any, overwrite: bool) -> None:
        folder = require_path(_WHO, "the path of a folder", directory).expanduser()
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"{_WHO} needs the path of a folder. {folder} is a file.")
        if (folder / RECORD).is_symlink():
            raise NotPlainFile(
                f"{_WHO}: {folder / RECORD} is a link, and what it leads to is left alone. Delete it, or give a "
                "different folder."
            )
        self._file = LogFile(_WHO, folder / RECORD, True, lambda line: int(json.loads(line)["steps"]))
        self._overwrite = overwrite
        self.description: dict[str, Any] = {}
        self.lines: collections.deque[Line] = collections.deque()
        self._is_whole = True  # not so if a write has failed: there may be half a line, and rows are missing

    def open(self, step: int) -> int:
        if step == 0 and self._file.size() and not self._overwrite:
            self._set_apart()
        newest = self._file.open(step)
        self._is_whole = True
        # It has the step of the row before it: rows that an earlier process did not come to write still follow.
        self._file.write(_encode({"steps": newest, "run": self.description}))
        return newest

    def _set_apart(self) -> None:
        path, number = self._file.path, 1
        while (apart := path.with_name(f"record-{number}.jsonl")).exists():
            number += 1
        os.rename(path, apart)
        warnings.warn(
            f"{_WHO}: {path} was the record of an earlier run, which is now {apart.name}. To go on with a run, give "
            "its loop resume=; to replace it, give record overwrite=True.",
            stacklevel=2,
        )

    def write(self, rows: list[Row]) -> None:
        texts = []
        for row in rows:
            while self.lines and self.lines[0].step < row.step:
                texts.append(_line(self.lines.popleft()))
            if row.values:
                texts.append(_line(row))
        self._is_whole = False
        self._file.write(b"".join(texts))
        self._is_whole = True

    def close(self) -> None:
        try:
            if self._is_whole:
                self._file.write(b"".join(map(_line, self.lines)))
        finally:
            self.lines.clear()
            self._file.close()


def _line(row: Row) -> bytes:
    content = row.values if isinstance(row, Line) else {"logged": row.values}
    units = {"steps": row.step, "samples": row.samples, "epochs": row.epochs, "time": round(row.time, 6)}
    return _encode(units | content)


def _encode(line: dict[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"
