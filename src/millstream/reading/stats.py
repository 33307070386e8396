"""What reading costs, counted while it happens: a few additions per batch."""

import dataclasses
import threading
import time

from millstream.text.html import html_names, html_text
from millstream.text.tables import line_width, name_table, size_text, time_text, times_text

_UNUSED = "nothing read yet"
_local = threading.local()


def collect_into(times: dict[str, float] | None) -> None:
    """Add up the seconds of the stages that this thread runs from here on, by name."""
    _local.times = times
    _local.inside = 0.0


def add_time(name: str, begun: float) -> None:
    """A stage without others inside it has run from `begun`, by `time.perf_counter`, to now."""
    times = getattr(_local, "times", None)
    if times is not None:
        seconds = time.perf_counter() - begun
        times[name] = times.get(name, 0.0) + seconds
        _local.inside += seconds


class timed:
    """A block whose time belongs to a stage. What stages inside it take counts as theirs."""

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


@dataclasses.dataclass
class LoaderStats:
    """Counts and times of all the reading of one loader. Printed, it is a small table that names the bottleneck.

    Example:
        >>> source = ms.DiskSampleSource(100, lambda index: {"x": np.float32(index)})
        >>> loader = ms.DataLoader([source, ms.BatchTransform(10)])
        >>> for batch, mask in loader.iterate(loader.init_state(jax.random.key(0))):
        ...     pass
        >>> loader.stats().samples
        100

    Attributes:
        batches: Batches handed out.
        samples: Samples that were read for them; those that a stage masks were read, too.
        nbytes: Bytes in them.
        first: Seconds until the first batch of each stream: starting, compiling, reading.
        idle: Seconds that the loop waited for the others.
        loop: Seconds between a batch and the next request: what the loop itself takes.
        reading: Seconds of readers per stage, all readers together.
        ready: Batches that were ready at each request, added up.
        failed: Samples that could not be read and were skipped.
        dropped: Batches that were left out because of such samples.
        restarts: Worker processes that died and were replaced.
        cached: Batches that came from the cache on disk.
        sources: Samples of each source, if the loader reads a mixture, in all batches drawn so far, also in those that
            are made ahead. They are found from the plan: none is left out because it could not be read.
    """

    batches: int = 0
    samples: int = 0
    nbytes: int = 0
    first: float = 0.0
    idle: float = 0.0
    loop: float = 0.0
    reading: dict[str, float] = dataclasses.field(default_factory=dict)
    ready: int = 0
    failed: int = 0
    dropped: int = 0
    restarts: int = 0
    cached: int = 0
    sources: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def bottleneck(self) -> str:
        """What a faster run would have to begin with."""
        if self.batches == 0:
            return _UNUSED
        if self.first and self.idle <= 0.05 * (self.idle + self.loop):
            return "the loop itself: batches are ready when it asks for them"
        if not self.reading:
            return "taking batches from the cache" if self.cached else "making batches in the compiled program"
        stage = max(self.reading, key=self.reading.__getitem__)
        seconds = self.reading[stage]
        return f"{stage}, which takes {time_text(seconds / max(1, self.samples))} per sample"

    @property
    def speedup_of_an_instant_loader(self) -> float:
        """How many times as fast the loop would be if every batch were there at once."""
        return (self.idle + self.loop) / self.loop if self.loop else float("inf")

    def __repr__(self) -> str:
        return name_table(self._rows(), width=line_width()) if self.batches else _UNUSED

    def _repr_html_(self) -> str:
        return html_names(self._rows()) if self.batches else html_text(_UNUSED)

    def _rows(self) -> list[tuple[str, str]]:
        """What there is to say: counts of what is rare, and what is not known of a compiled program, only if any."""
        count, faster = max(1, self.batches), self.speedup_of_an_instant_loader
        rare = {
            "from the cache": (self.cached, "batches"),
            "failed": (self.failed, "samples"),
            "dropped": (self.dropped, "batches"),
            "restarted": (self.restarts, "workers"),
        }
        waits = [
            ("first batches", f"{time_text(self.first)}, with starting and compiling"),
            ("idle", f"{time_text(self.idle / count)} per batch, waiting for the loader"),
            ("loop", f"{time_text(self.loop / count)} per batch, between two requests"),
        ]
        return [
            ("batches", f"{self.batches:,}"),
            *([("samples", f"{self.samples:,}")] if self.samples else []),
            *((f"of {name}", f"{samples:,}") for name, samples in self.sources.items()),
            *([("bytes", size_text(self.nbytes))] if self.nbytes else []),
            *(waits if self.first else []),
            *([("ready", f"{self.ready / count:.2g} batches when one was asked for")] if self.reading else []),
            *((f"reading: {name}", f"{time_text(s / count)} per batch") for name, s in self.reading.items()),
            *((name, f"{number:,} {what}") for name, (number, what) in rare.items() if number),
            ("bottleneck", self.bottleneck),
            *([("upper bound", f"{times_text(faster)} as fast with an instant loader")] if self.loop else []),
        ]
