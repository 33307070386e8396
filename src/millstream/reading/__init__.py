"""Where samples are read: executors and what they speak of, caches on disk. Importing this room does not load JAX."""

from millstream._lazy import table_of_contents

__getattr__, __dir__, __all__ = table_of_contents(__name__, __file__)
