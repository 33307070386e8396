"""Arrow tables and files beside pyarrow, shuffled batches of 256 rows.

100,000 rows in chunks of 5,000: eight numbers and a label, and 784 bytes and a label. Files are memory-mapped by both.
"""

import pathlib
import tempfile
from collections.abc import Iterator

import pyarrow as pa
from _arrow import arrays_of, as_table
from _case import Options, main
from _formats import GROUP, Columns, compare, images, measurements
from _result import Table

from millstream.integrations.arrow import ArrowSource


def file_and_table(path: pathlib.Path, name: str, columns: Columns, options: Options) -> Iterator[Table]:
    table = as_table(columns)
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=GROUP)
    with pa.memory_map(str(path)) as file:
        mapped = pa.ipc.open_file(file).read_all()
    rows_of_file = lambda order: arrays_of(mapped.take(order))  # noqa: E731
    rows_of_table = lambda order: arrays_of(table.take(order))  # noqa: E731
    yield compare(f"{name}, a file", ArrowSource(path), "pyarrow", rows_of_file, options, steps=50)
    yield compare(f"{name}, a table in memory", ArrowSource(table), "pyarrow", rows_of_table, options)


def measure(options: Options) -> list[Table]:
    with tempfile.TemporaryDirectory() as folder:
        return [
            table
            for name, columns in (("Measurements", measurements(options)), ("Images", images(options)))
            for table in file_and_table(pathlib.Path(folder, f"{name}.arrow"), name, columns, options)
        ]


if __name__ == "__main__":
    main(measure)
