"""Data sets by name, all of one shape: `len`, `[i]`, `as_array_dict()` and `make_disk_source()`."""

from millstream._lazy import table_of_contents

__getattr__, __dir__, __all__ = table_of_contents(__name__, __file__)
