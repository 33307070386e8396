"""What a loop can do besides its steps: bars, writers, checkpoints, and watchers that stop or measure."""

from millstream._lazy import table_of_contents

__getattr__, __dir__, __all__ = table_of_contents(__name__, __file__)
