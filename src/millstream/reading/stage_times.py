"""How long each stage of reading takes, added up per thread at the cost of a look at the clock before and after."""

import threading
import time

_local = threading.local()


def collect_into(times: dict[str, float] | None) -> None:
    """Add up the seconds of the stages that this thread runs from here on, by name."""
    _local.times = times
    _local.inside = 0.0


def spent(name: str, begun: float) -> None:
    """A stage without others inside of it has run from `begun`, by `time.perf_counter`, to now."""
    times = getattr(_local, "times", None)
    if times is not None:
        seconds = time.perf_counter() - begun
        times[name] = times.get(name, 0.0) + seconds
        _local.inside += seconds


class timed:
    """A block whose time belongs to a stage. What stages inside of it take counts as theirs."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._inside = getattr(_local, "inside", 0.0)
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        times = getattr(_local, "times", None)
        if times is not None:
            seconds = time.perf_counter() - self._begun
            times[self._name] = times.get(self._name, 0.0) + seconds - (_local.inside - self._inside)
            _local.inside = self._inside + seconds
