"""How long each stage of reading takes, added up per thread at the cost of two looks at the clock."""

import threading
import time

_local = threading.local()


def collect_into(times: dict[str, float] | None) -> None:
    """Add up the seconds of the stages that this thread runs from here on, by name."""
    _local.times = times


class timed:
    """A block whose time belongs to a stage. What stages inside of it take counts as theirs."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._inside = 0.0
        self._outer = getattr(_local, "stage", None)
        _local.stage = self
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._begun
        _local.stage = self._outer
        if self._outer is not None:
            self._outer._inside += seconds
        times = getattr(_local, "times", None)
        if times is not None:
            times[self._name] = times.get(self._name, 0.0) + seconds - self._inside
