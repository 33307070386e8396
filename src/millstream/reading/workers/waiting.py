"""Waiting for workers: a warning if no batch comes for long, and an error at the end."""

import time
import warnings
from collections.abc import Callable
from typing import Protocol

from millstream.errors import WorkerStalled
from millstream.reading._settings import settings

_TICK = 0.25  # seconds after which a wait looks around


class Group(Protocol):
    """Workers that can be waited for."""

    ended: bool
    reason: BaseException

    def poll(self, seconds: float) -> bool:
        """Take in what the workers have to say, waiting for it at most that long; whether there was anything."""
        ...

    def end(self, reason: BaseException) -> None:
        """End the workers."""
        ...


def wait_for(
    group: Group,
    done: Callable[[], bool],
    timeout: float | None,
    describe: Callable[[], str],
    stall_text: Callable[[float], str],
) -> None:
    """Poll workers until something is done, or raise on a timeout.

    Args:
        group: The workers.
        done: Whether what is waited for has happened.
        timeout: Seconds of silence that are an error; None for those of the settings.
        describe: Says where each worker is.
        stall_text: What to say after that many seconds.
    """
    limit, patience = settings.limit(timeout), settings.patience(timeout)
    silence, warned = 0.0, patience >= limit
    while not done():
        if silence >= limit and not group.ended:
            group.end(WorkerStalled(stall_text(limit)))
        if group.ended:
            raise group.reason
        if silence >= patience and not warned:
            warned = True
            warnings.warn(f"No batch for {silence:.0f} s.\n{describe()}", stacklevel=3)
        begun = time.monotonic()
        if group.poll(min(_TICK, limit - silence)):
            silence = 0.0
        else:  # if this process was stopped meanwhile, that was not the workers' fault
            silence += min(time.monotonic() - begun, 2 * _TICK)
