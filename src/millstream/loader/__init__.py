"""Loaders: a pipeline with a state, an iterator and a scan, and what they give."""

from millstream._lazy import table_of_contents

__getattr__, __dir__, __all__ = table_of_contents(__name__, __file__)
