"""Rows as comma-separated values."""

import csv
import io
import os
from typing import Any

from millstream.callbacks._writer import Row, Sink, Writer
from millstream.callbacks.log_file import UNITS, LogFile
from millstream.files.atomic import written
from millstream.loops.signatures import Every


class _CsvFile(Sink):
    caller = "csv_logger"
    separator = "."
    reserved = frozenset(UNITS)

    def __init__(self, path: Any, overwrite: bool) -> None:
        self.place = path
        self._file = LogFile(self.caller, path, overwrite, lambda line: int(line.split(b",", 1)[0]))
        self._names: dict[str, None] = {}

    def open(self, step: int) -> int:
        self._names = self._read_header() if step else {}
        return self._file.open(step, header=True)

    def _read_header(self) -> dict[str, None]:
        if not self._file.size():
            return {}
        with self._file.path.open("rb") as file:
            line = file.readline().decode(errors="replace")
        if not line.endswith("\n"):
            return {}  # its writer was killed in the middle of it
        fields = next(csv.reader([line]))
        if tuple(fields[: len(UNITS)]) != UNITS:
            raise ValueError(
                f"{self.caller} can only continue a file that it has written, whose header begins with "
                f"{','.join(UNITS)}. {self._file.path} begins with {line.rstrip()!r}. Choose another path."
            )
        return dict.fromkeys(fields[len(UNITS) :])

    def write(self, rows: list[Row]) -> None:
        new = dict.fromkeys(name for row in rows for name in map(_in_one_line, row.values) if name not in self._names)
        if new:
            self._add_columns(new)
        self._file.write("".join(map(self._line, rows)).encode())

    def _line(self, row: Row) -> str:
        epochs = "" if row.epochs is None else row.epochs
        values = {_in_one_line(name): value for name, value in row.values.items()}
        fields = [repr(values[name]) if name in values else "" for name in self._names]
        return ",".join([f"{row.step},{row.samples},{epochs},{row.time!r},{row.date!r}", *fields]) + "\n"

    def _add_columns(self, new: dict[str, None]) -> None:
        """Write the file again, with longer lines: readers see the one file or the other."""
        names, empty = self._names | new, b"," * len(new) + b"\n"
        with written(self._file.path, alone=True) as file, self._file.path.open("rb") as lines:
            file.write(_header(names))
            lines.readline()
            file.writelines(line[:-1] + empty for line in lines)
        self._names = names
        self._file.reopen()

    def close(self) -> None:
        self._file.close()


def _header(names: dict[str, None]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([*UNITS, *names])
    return text.getvalue().encode()


def _in_one_line(name: str) -> str:
    """A name as it is in the header: readers of tables differ in what they take for the end of a line."""
    return name if name.isprintable() else " ".join(name.splitlines())


def csv_logger(path: str | os.PathLike[str], *, every: Every | None = None, overwrite: bool = False) -> Writer:
    """Write what is logged to a file of comma-separated values, in the background.

    The columns are those of `History.to_csv`: steps, samples, epochs, time, date, and the entries. Where a row has no
    value the field is empty. When an entry comes up for the first time, the file is written again with one more column.

    Example:
        >>> import pathlib
        >>> def train_step(state, batch):
        ...     return ms.logs().add_metric("loss", 0.5), state + 1
        >>> _ = ms.loop(0, range(3), {ms.every(1): [train_step, ms.callbacks.csv_logger("run.csv")]})
        >>> lines = pathlib.Path("run.csv").read_text().splitlines()
        >>> len(lines), lines[0]
        (4, 'steps,samples,epochs,time,date,loss')

    A new run refuses a file that has rows already. A resumed one (`elapsed=`) continues with it: rows of later steps
    than it begins with are cut, because they will be written again; so is a last line that a killed process has not
    completed. If the file cannot be written, the run ends with that error, and the rows until then are there. By hand,
    call it with `(elapsed, logs)`, and close it or use it in a `with` block.

    Args:
        path: The file.

    Other Args:
        every: Which rows to write: a number of steps, or a schedule; None: all it is called for. The row at the end of
            an epoch may hold results of a test: `ms.every(100) | ms.every(epochs=1)`.
        overwrite: Whether a new run replaces the rows of another.
    """
    return Writer(_CsvFile(path, overwrite), every)
