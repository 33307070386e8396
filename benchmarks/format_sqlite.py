"""SQLite tables beside Python's own sqlite3, shuffled batches of 256 rows.

100,000 rows: eight numbers and a label, and 784 bytes and a label. sqlite3 asks for a batch with one statement.
"""

import contextlib
import pathlib
import sqlite3
import tempfile

import numpy as np
from _case import Options, main
from _formats import BATCH, Columns, compare, images, measurements
from _result import Table

from millstream.integrations.sqlite import SqliteSource


def write(database: sqlite3.Connection, columns: Columns) -> None:
    database.execute(f"CREATE TABLE rows (id INTEGER PRIMARY KEY, {', '.join(columns)})")
    cells = [array.tolist() if array.ndim == 1 else map(np.ndarray.tobytes, array) for array in columns.values()]
    marks = ", ".join("?" * (1 + len(columns)))
    rows = len(next(iter(columns.values())))
    database.executemany(f"INSERT INTO rows VALUES ({marks})", zip(range(rows), *cells, strict=True))
    database.commit()


def rows_of(path: pathlib.Path, name: str, columns: Columns, options: Options) -> Table:
    with contextlib.closing(sqlite3.connect(path)) as database:
        write(database, columns)
        arrays = {name: (array.shape[1:], array.dtype) for name, array in columns.items()}
        source = SqliteSource(path, table="rows", key="id", columns=list(columns), arrays=arrays)
        statement = f"SELECT {', '.join(columns)} FROM rows WHERE id IN ({', '.join('?' * BATCH)})"

        def read(order: np.ndarray) -> Columns:
            cells = list(zip(*database.execute(statement, order.tolist()), strict=True))
            back = np.argsort(np.argsort(order))  # SQLite gives them in the order of their keys
            found = {}
            for (column, array), values in zip(columns.items(), cells, strict=True):
                flat = (
                    np.array(values, array.dtype) if array.ndim == 1 else np.frombuffer(b"".join(values), array.dtype)
                )
                found[column] = flat.reshape(BATCH, *array.shape[1:])[back]
            return found

        return compare(name, source, "sqlite3", read, options, steps=50, version=lambda: sqlite3.sqlite_version)


def measure(options: Options) -> list[Table]:
    with tempfile.TemporaryDirectory() as folder:
        return [
            rows_of(pathlib.Path(folder, f"{name}.db"), name, columns, options)
            for name, columns in (("Measurements", measurements(options)), ("Images", images(options)))
        ]


if __name__ == "__main__":
    main(measure)
