"""pandas frames beside pandas itself, shuffled batches of 256 rows.

100,000 rows of eight numbers and a label.
"""

import pandas as pd
from _case import Options, main
from _formats import Read, compare, measurements
from _result import Table

from millstream.integrations.pandas import PandasSource


def measure(options: Options) -> list[Table]:
    rows = pd.DataFrame(measurements(options))
    read: Read = lambda order: {str(name): part.to_numpy() for name, part in rows.take(order).items()}  # noqa: E731
    return [compare("Measurements", PandasSource(rows), "pandas", read, options)]


if __name__ == "__main__":
    main(measure)
