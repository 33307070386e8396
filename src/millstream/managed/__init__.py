"""The managed API: a state that knows how its steps run, and decorators that make steps of plain functions."""

from millstream._lazy import table_of_contents

__getattr__, __dir__, __all__ = table_of_contents(__name__, __file__)
