"""Questions about a loader: what it does, whether it keeps its promises, how it is read fastest, what a step had."""

from millstream._lazy import table_of_contents

__getattr__, __dir__, __all__ = table_of_contents(__name__, __file__)
