"""A text file of rows, one line each, that grows at its end and can be cut after a step."""

import io
import json
import os
from collections.abc import Callable
from typing import Any

from millstream.files.atomic import require_place
from millstream.files.safe_path import open_plain, plain_reader
from millstream.text.errors import describe_value

RECORD = "record.jsonl"  # in the folder of a run
MEDIA_FILE = "media.jsonl"  # its images and histograms
SAMPLES_OF = "samples of "  # before the name of a source, in a record
UNITS = ("steps", "samples", "epochs", "time", "date")  # what every line begins with


class LogFile:
    """Lines in a file, written without buffers: what `write` has returned from survives the process.

    Args:
        caller: The caller's name, for errors.
        path: Of the file; its folder is made if there is none.
        overwrite: Whether a new run may replace the rows of another.
        step_of: The step of a line; a ValueError, KeyError or TypeError if it is none of its lines.
    """

    def __init__(self, caller: str, path: Any, overwrite: bool, step_of: Callable[[bytes], int]) -> None:
        self.path = require_place(caller, path).resolve()
        self._caller = caller
        self._overwrite = overwrite
        self._step_of = step_of
        self._file: Any = None

    def open(self, step: int, *, header: bool = False) -> int:
        """Open it to continue after a step; returns the step of its last row, or 0.

        Args:
            step: Rows up to this one stay, later ones are cut. 0: a new run, and none may be there.
            header: Whether the first line is not a row.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if step == 0 and self.size() and not self._overwrite:
            raise FileExistsError(
                f"{self._caller} begins a new run, and {self.path} has rows of another. Choose another path, or "
                "continue with that run (elapsed=), or give overwrite=True."
            )
        newest, kept = self._rows_up_to(step, header) if step and self.size() else (0, 0)
        self.reopen()
        self._file.truncate(kept)
        return newest

    def size(self) -> int:
        """Its length in bytes; 0 if there is no file."""
        return self.path.stat().st_size if self.path.exists() else 0

    def reopen(self) -> None:
        """Open it, or the file that has taken its place."""
        self.close()
        handle = open_plain(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._file = open(handle, "ab", buffering=0)

    def _rows_up_to(self, step: int, header: bool) -> tuple[int, int]:
        """The newest step of those rows that stay, and how many bytes they have."""
        newest = kept = 0
        with plain_reader(self.path) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break  # its writer was killed in the middle of it
                if not (header and number == 1):
                    row = self._read_step(number, line)
                    if row > step:
                        break
                    newest = row
                kept += len(line)
        return newest, kept

    def _read_step(self, number: int, line: bytes) -> int:
        try:
            return self._step_of(line)
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{self._caller} can only continue a file that it has written. Line {number} of {self.path} is not a "
                f"row of it: {describe_value(line)}. Choose another path."
            ) from None

    def write(self, data: bytes) -> None:
        """Add whole lines."""
        write_whole(self._file, data)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def write_whole(file: io.FileIO, data: bytes) -> None:
    """Write to a file without a buffer, which may take less than it is given at a time."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def encode_line(line: dict[str, Any]) -> bytes:
    """A line of JSON."""
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"
