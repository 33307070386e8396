"""What data sets that are arrays have in common."""

import numpy as np


class ArrayDataset:
    """Samples that are the rows of arrays.

    Args:
        arrays: The arrays by name. They are made read-only.
    """

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        for array in arrays.values():
            array.flags.writeable = False
        self._arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: array[index] for name, array in self._arrays.items()}

    def as_array_dict(self) -> dict[str, np.ndarray]:
        """The whole split as read-only arrays, ready for `ArraySampleSource`."""
        return dict(self._arrays)
