"""What happens to samples and batches: one file per idea."""

from millstream._lazy import table_of_contents

__getattr__, __dir__, __all__ = table_of_contents(__name__, __file__)
