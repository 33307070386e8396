"""Checkpoints: whole, verified states of a run in a directory."""

from millstream._lazy import table_of_contents

__getattr__, __dir__, __all__ = table_of_contents(__name__, __file__)
