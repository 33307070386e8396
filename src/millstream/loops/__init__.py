"""Loops: what drives a run, when callbacks are due, what is logged, and what becomes of it."""

from millstream._lazy import table_of_contents

__getattr__, __dir__, __all__ = table_of_contents(__name__, __file__)
