"""Where samples are read: executors and what they are made of, and caches on disk. Imports no JAX."""

from millstream._lazy import table_of_contents

__getattr__, __dir__, __all__ = table_of_contents(__name__, __file__)
