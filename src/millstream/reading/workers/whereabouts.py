"""What a worker is at."""

import numpy as np


class Whereabouts:
    """Kept in memory that both sides see: told without a message, readable after its death.

    Args:
        memory: `SIZE` bytes of shared memory.
    """

    SIZE = 64
    NOTHING = -1

    def __init__(self, memory: np.ndarray) -> None:
        self._words = memoryview(memory).cast("q")  # type: ignore[arg-type]  # faster than NumPy for single numbers

    def begin(self, job: int) -> None:
        """It has begun a job, or none (`NOTHING`)."""
        self._words[0], self._words[1], self._words[2] = job, self.NOTHING, self.NOTHING

    def at(self, row: int, index: int) -> None:
        """It is about to read this sample for this row."""
        self._words[1] = row
        self._words[2] = index

    @property
    def job(self) -> int:
        return self._words[0]

    @property
    def row(self) -> int:
        return self._words[1]

    @property
    def sample(self) -> int:
        return self._words[2]
