"""Memory-mapped `.npy` files beside NumPy itself, shuffled batches of 256 rows.

100,000 rows: eight numbers and a label, and 784 bytes and a label, one file per column.
"""

import pathlib
import tempfile

import numpy as np
from _case import Options, main
from _formats import Columns, Read, compare, images, measurements
from _result import Table

import millstream as ms


def rows_of(folder: pathlib.Path, name: str, columns: Columns, options: Options) -> Table:
    paths = {column: folder / f"{name}-{column}.npy" for column in columns}
    for column, array in columns.items():
        np.save(paths[column], array)
    mapped = {column: np.load(path, mmap_mode="r") for column, path in paths.items()}
    read: Read = lambda order: {column: np.take(array, order, axis=0) for column, array in mapped.items()}  # noqa: E731
    return compare(name, ms.NpySource(paths), "numpy", read, options)


def measure(options: Options) -> list[Table]:
    with tempfile.TemporaryDirectory() as folder:
        return [
            rows_of(pathlib.Path(folder), name, columns, options)
            for name, columns in (("Measurements", measurements(options)), ("Images", images(options)))
        ]


if __name__ == "__main__":
    main(measure)
