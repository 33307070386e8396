"""Meshes of devices, and where they hold the rows of a batch: one file per idea.

A lazy table of contents: worker processes load `split_by_host`'s views from this room, and must not load JAX.
"""

from millstream._lazy import table_of_contents

__getattr__, __dir__, __all__ = table_of_contents(__name__, __file__)
