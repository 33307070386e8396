"""Where samples come from: one file per kind of source."""

from millstream._lazy import table_of_contents

__getattr__, __dir__, __all__ = table_of_contents(__name__, __file__)
