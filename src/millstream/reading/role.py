"""Whether this process is a worker."""

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
