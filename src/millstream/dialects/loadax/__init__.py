"""The API of loadax, over the engine of Millstream: datasets, batchers, a builder of loaders, sharding.

Names are loaded on demand: worker processes load datasets from this room, and must not load JAX.
"""

from millstream._lazy import table_of_contents

__getattr__, __dir__, __all__ = table_of_contents(__name__, __file__)
