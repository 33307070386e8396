"""Text to token ids: one form for the tokenizers of all libraries, and one of bytes."""

from millstream._lazy import table_of_contents

__getattr__, __dir__, __all__ = table_of_contents(__name__, __file__)
