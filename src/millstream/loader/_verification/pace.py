"""How much time a verification has, and how far it is."""

import contextlib
import time
from collections.abc import Iterator

from millstream.text.progress_line import ProgressLine


class Pace:
    """Divides some seconds among checks. What one of them leaves over, the next ones have.

    Args:
        seconds: How many, all together. Each check does a little even if they are over.
        shown: Whether a line says how far it is.
    """

    def __init__(self, seconds: float, shown: bool) -> None:
        self._seconds = seconds
        self._line = ProgressLine("verify", shown=shown)
        self._begun = time.perf_counter()
        self._check, self._before, self._share = "", 0.0, 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._begun

    @property
    def is_over(self) -> bool:
        """Whether the time of the check under way is over."""
        return self.elapsed >= (self._before + self._share) * self._seconds

    @contextlib.contextmanager
    def check(self, name: str, share: float) -> Iterator[None]:
        """Around a check, which may take this share of all the time."""
        self._check, self._share = name, share
        self._line.say(name)
        try:
            yield
        finally:
            self._before += share

    def show(self, what: str, done: int, total: int) -> None:
        """Say how far the check is."""
        share = self._before + self._share * done / max(total, 1)
        left = min(self.elapsed * (1 - share) / max(share, 1e-9), max(self._seconds - self.elapsed, 0.0))
        self._line.show(f"{self._check}, {what} {done:,} of {total:,}, about {left:.0f} s left")

    def close(self) -> None:
        """Clear the line."""
        self._line.close()
