"""Views: which samples of a source there are. Each one is a source again, with a length and random access."""

from millstream._lazy import table_of_contents

__getattr__, __dir__, __all__ = table_of_contents(__name__, __file__)
