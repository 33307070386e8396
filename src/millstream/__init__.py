"""Millstream: data pipelines and training loops for JAX.

What is public is in `__init__.pyi`. A name is loaded when it is first used, so that importing `millstream` costs
nothing and a worker process can use the NumPy-only rooms without loading JAX.
"""

from millstream._lazy import table_of_contents

__version__ = "0.1.0.dev0"

__getattr__, __dir__, __all__ = table_of_contents(__name__, __file__)
