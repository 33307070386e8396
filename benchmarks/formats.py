"""What people have already: shuffled batches of 256 rows beside the best that each format's own library does.

The library reads the same number of random rows and makes the same arrays of them: NumPy's, to compare with the reading
of the source alone, and JAX's, to compare with `iterate`. Run with `make bench`.
"""

import pathlib
import sqlite3
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from _measure import interleaved, print_machine, print_table, ratio, verdict

import millstream as ms
from millstream.integrations.arrow import ArrowSource
from millstream.integrations.pandas import PandasSource
from millstream.integrations.parquet import ParquetSource
from millstream.integrations.polars import PolarsSource
from millstream.integrations.sqlite import SqliteSource

ROWS, GROUP, BATCH, KEY = 100_000, 5_000, 256, jax.random.key(0)
ROUNDS = 7
BAR = 1.3

Columns = dict[str, np.ndarray]
Read = Callable[[np.ndarray], Columns]


def measurements() -> Columns:
    """Eight numbers and a label."""
    random = np.random.default_rng(0)
    columns: Columns = {f"x{number}": random.random(ROWS, np.float32) for number in range(8)}
    return {**columns, "label": random.integers(0, 10, ROWS, dtype=np.int32)}


def images() -> Columns:
    """784 bytes and a label."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (ROWS, 784), dtype=np.uint8)
    return {"image": pixels, "label": random.integers(0, 10, ROWS, dtype=np.int32)}


def as_table(columns: Columns) -> Any:
    def column(array: np.ndarray) -> Any:
        return pa.array(array) if array.ndim == 1 else pa.FixedSizeListArray.from_arrays(array.ravel(), array.shape[1])

    return pa.table({name: column(array) for name, array in columns.items()})


def arrays_of(table: Any) -> Columns:
    """NumPy arrays of what pyarrow took."""

    def array(column: Any) -> np.ndarray:
        one = column.combine_chunks()
        return (
            one.flatten().to_numpy().reshape(len(one), -1) if pa.types.is_fixed_size_list(one.type) else one.to_numpy()
        )

    return {name: array(table.column(name)) for name in table.column_names}


def compare(title: str, source: Any, read: Read, steps: int = 100) -> None:
    """A source beside a library's own reading of rows."""
    loader = ms.DataLoader([source, ms.BatchTransform(BATCH, drop_last=True)])
    state = loader.init_state(KEY)
    random = np.random.default_rng(1)
    orders = [random.permutation(ROWS)[:BATCH] for _ in range(steps)]
    for found, expected in zip(*map(_leaves, (source.read(orders[0]), read(orders[0]))), strict=True):
        np.testing.assert_array_equal(found, expected)

    def iterate() -> None:
        for batch in loader.iterate(state, steps=steps):
            jax.block_until_ready(batch)

    def library_for_jax() -> None:
        for order in orders:
            jax.block_until_ready(jax.device_put(read(order)))

    def reading() -> None:
        for order in orders:
            source.read(order)

    def library() -> None:
        for order in orders:
            read(order)

    cases = {"iterate": iterate, "library, to JAX": library_for_jax, "source.read": reading, "library": library}
    wall, cpu = interleaved(cases, ROUNDS)
    print_table(title, wall, cpu, scale=1e6 / steps, unit="us per batch", base="library")
    verdict("times the library's own reading, as JAX arrays", ratio(wall, "iterate", "library, to JAX"), at_most=BAR)
    verdict("times the library's own reading, as NumPy arrays", ratio(wall, "source.read", "library"), at_most=BAR)


def _leaves(columns: Columns) -> list[np.ndarray]:
    return [columns[name] for name in sorted(columns)]


def parquet(folder: pathlib.Path, name: str, columns: Columns) -> None:
    path = folder / f"{name}.parquet"
    pq.write_table(as_table(columns), path, row_group_size=GROUP)
    whole = pq.read_table(path).combine_chunks()
    compare(f"Parquet, {name}, all of it kept", ParquetSource(path), lambda order: arrays_of(whole.take(order)))
    if name == "measurements":  # lists take pyarrow seconds per batch
        passing = ParquetSource(path, cache_bytes=1 << 20)
        compare(f"Parquet, {name}, a quarter of it kept", passing, groups_of(path), steps=20)


def groups_of(path: pathlib.Path) -> Read:
    """The row groups that a batch needs, read by one call, and its rows taken from them."""
    file = pq.ParquetFile(path)

    def read(order: np.ndarray) -> Columns:
        groups, place = np.unique(order // GROUP, return_inverse=True)
        return arrays_of(file.read_row_groups(groups.tolist()).take(place * GROUP + order % GROUP))

    return read


def arrow(folder: pathlib.Path, name: str, columns: Columns) -> None:
    path, table = folder / f"{name}.arrow", as_table(columns)
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=GROUP)
    with pa.memory_map(str(path)) as file:
        mapped = pa.ipc.open_file(file).read_all()
    compare(f"Arrow file, {name}", ArrowSource(path), lambda order: arrays_of(mapped.take(order)), steps=50)
    compare(f"Arrow table, {name}", ArrowSource(table), lambda order: arrays_of(table.take(order)))


def frames(folder: pathlib.Path, name: str, columns: Columns) -> None:
    frame = pl.DataFrame(columns)
    read: Read = lambda order: {column.name: column.to_numpy() for column in frame[order]}  # noqa: E731
    compare(f"Polars, {name}", PolarsSource(frame), read, steps=50)
    if name == "measurements":
        rows = pd.DataFrame(columns)
        taken: Read = lambda order: {str(column): part.to_numpy() for column, part in rows.take(order).items()}  # noqa: E731
        compare(f"pandas, {name}", PandasSource(rows), taken)


def sqlite(folder: pathlib.Path, name: str, columns: Columns) -> None:
    path = folder / f"{name}.db"
    with sqlite3.connect(path) as database:
        database.execute(f"CREATE TABLE rows (id INTEGER PRIMARY KEY, {', '.join(columns)})")
        cells = [array.tolist() if array.ndim == 1 else map(np.ndarray.tobytes, array) for array in columns.values()]
        marks = ", ".join("?" * (1 + len(columns)))
        database.executemany(f"INSERT INTO rows VALUES ({marks})", zip(range(ROWS), *cells, strict=True))
    blobs = {name: (array.shape[1:], array.dtype) for name, array in columns.items()}
    source = SqliteSource(path, table="rows", key="id", columns=list(columns), arrays=blobs)
    statement = f"SELECT {', '.join(columns)} FROM rows WHERE id IN ({', '.join('?' * BATCH)})"

    def read(order: np.ndarray) -> Columns:
        cells = list(zip(*database.execute(statement, order.tolist()), strict=True))
        back = np.argsort(np.argsort(order))  # SQLite gives them in the order of their keys
        found = {}
        for (column, array), values in zip(columns.items(), cells, strict=True):
            made = np.array(values, array.dtype) if array.ndim == 1 else np.frombuffer(b"".join(values), array.dtype)
            found[column] = made.reshape(BATCH, *array.shape[1:])[back]
        return found

    compare(f"SQLite, {name}", source, read, steps=50)
    database.close()


def npy(folder: pathlib.Path, name: str, columns: Columns) -> None:
    paths = {column: folder / f"{name}-{column}.npy" for column in columns}
    for column, array in columns.items():
        np.save(paths[column], array)
    mapped = {column: np.load(path, mmap_mode="r") for column, path in paths.items()}
    read: Read = lambda order: {column: np.take(array, order, axis=0) for column, array in mapped.items()}  # noqa: E731
    compare(f".npy, {name}", ms.NpySource(paths), read)


def main() -> None:
    print_machine(["jax", "numpy", "millstream", "pyarrow", "polars", "pandas"])
    with tempfile.TemporaryDirectory() as folder:
        for name, columns in {"measurements": measurements(), "images": images()}.items():
            for case in (parquet, arrow, frames, sqlite, npy):
                case(pathlib.Path(folder), name, columns)


if __name__ == "__main__":
    main()
