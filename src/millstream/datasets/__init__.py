"""Data sets by name, all of one shape: `len`, `[i]` and `as_array_dict()`."""

from millstream.datasets._digits import DigitsDataset as DigitsDataset
