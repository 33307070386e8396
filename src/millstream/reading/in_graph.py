"""The executor of data that are arrays."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class InGraph:
    """Make batches inside the compiled program, from arrays that live on the device.

    Example:
        >>> loader = ms.DataLoader(stages, executor=ms.InGraph())  # the default
    """
