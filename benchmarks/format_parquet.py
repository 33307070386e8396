"""Parquet files beside pyarrow, shuffled batches of 256 rows.

100,000 rows in groups of 5,000: eight numbers and a label, and 784 bytes and a label. Where only a quarter of the file
may be kept, pyarrow reads the groups that a batch needs with one call.
"""

import pathlib
import tempfile

import numpy as np
import pyarrow.parquet as pq
from _arrow import arrays_of, as_table
from _case import Options, main
from _formats import GROUP, Columns, Read, compare, images, measurements
from _result import Table

from millstream.integrations.parquet import ParquetSource


def kept(path: pathlib.Path, name: str, columns: Columns, options: Options) -> Table:
    pq.write_table(as_table(columns), path, row_group_size=GROUP)
    whole = pq.read_table(path).combine_chunks()
    read: Read = lambda order: arrays_of(whole.take(order))  # noqa: E731
    return compare(f"{name}, all of the file kept", ParquetSource(path), "pyarrow", read, options)


def groups_of(path: pathlib.Path) -> Read:
    """The row groups that a batch needs, read by one call, and its rows taken from them."""
    file = pq.ParquetFile(path)

    def read(order: np.ndarray) -> Columns:
        groups, place = np.unique(order // GROUP, return_inverse=True)
        return arrays_of(file.read_row_groups(groups.tolist()).take(place * GROUP + order % GROUP))

    return read


def measure(options: Options) -> list[Table]:
    with tempfile.TemporaryDirectory() as folder:
        numbers, pictures = pathlib.Path(folder, "numbers.parquet"), pathlib.Path(folder, "images.parquet")
        tables = [
            kept(numbers, "Measurements", measurements(options), options),
            kept(pictures, "Images", images(options), options),
        ]
        passing = ParquetSource(numbers, cache_bytes=1 << 20)
        title = "Measurements, a quarter of the file kept"
        return [*tables, compare(title, passing, "pyarrow", groups_of(numbers), options, steps=20)]


if __name__ == "__main__":
    main(measure)
