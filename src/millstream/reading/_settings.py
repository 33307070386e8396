"""Limits of time and memory, in one place, so that a test can wait one second where a user's run waits two minutes."""

import dataclasses
import math

_worker = False


def is_worker() -> bool:
    """Whether this code runs in a worker process of a loader.

    Example:
        >>> ms.is_worker()
        False
    """
    return _worker


def become_worker() -> None:
    """From now on, this process is a worker."""
    global _worker
    _worker = True


@dataclasses.dataclass
class Settings:
    """What a process waits for and how long. Change the fields of `ms.reading.settings`.

    Example:
        >>> ms.reading.settings.stall_seconds = 300.0  # a network drive that may sleep for minutes
        >>> ms.reading.settings.stall_seconds = 120.0

    Attributes:
        warn_seconds: A batch that takes longer than this is warned about once.
        stall_seconds: A batch that takes longer than this is an error, unless the executor has a `timeout`.
        shared_memory_folder: A folder for the memory that worker processes fill, such as a mounted tmpfs; the file has
            no name there. None takes anonymous memory of the kernel where available.
    """

    warn_seconds: float = 30.0
    stall_seconds: float = 120.0
    shared_memory_folder: str | None = None

    def limit(self, timeout: float | None) -> float:
        """How long a batch may take, for an executor with this `timeout`."""
        return self.stall_seconds if timeout is None else timeout

    def patience(self, timeout: float | None) -> float:
        """How long a batch may take before a warning: any time, where any time is allowed."""
        return math.inf if timeout == math.inf else min(self.warn_seconds, self.limit(timeout))


settings = Settings()
