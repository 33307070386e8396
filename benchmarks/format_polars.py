"""Polars frames beside Polars itself, shuffled batches of 256 rows.

100,000 rows: eight numbers and a label, and 784 bytes and a label.
"""

import polars as pl
from _case import Options, main
from _formats import Columns, Read, compare, images, measurements
from _result import Table

from millstream.integrations.polars import PolarsSource


def rows_of(name: str, columns: Columns, options: Options) -> Table:
    frame = pl.DataFrame(columns)
    read: Read = lambda order: {column.name: column.to_numpy() for column in frame[order]}  # noqa: E731
    return compare(name, PolarsSource(frame), "polars", read, options, steps=50)


def measure(options: Options) -> list[Table]:
    return [rows_of("Measurements", measurements(options), options), rows_of("Images", images(options), options)]


if __name__ == "__main__":
    main(measure)
