"""How long the stages of a pipeline take, each alone, in one thread."""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from millstream.plan.planned import PlannedSteps, Request
from millstream.reading.reading import Filled, Reading, Report

if TYPE_CHECKING:
    from millstream.loader.loader import DataLoader

_MOST_REPEATS = 50


@dataclasses.dataclass(frozen=True)
class TimedStage:
    """How long a stage of a pipeline takes.

    Example:
        >>> tuning = loader.tune(seconds=0.5, progress=False)
        >>> [(stage.stage, stage.per) for stage in tuning.stages]
        [('compiled stages', 'batch')]

    Attributes:
        stage: Its name.
        per: Whether the seconds are for a sample or for a batch.
        seconds: How long it takes, alone, in one thread.
        cpu_seconds: How much of that it is at work; the rest of the time it waits. None if that is not known.
    """

    stage: str
    per: Literal["sample", "batch"]
    seconds: float
    cpu_seconds: float | None = None


@dataclasses.dataclass
class TimedReading:
    """What reading in one thread has cost so far.

    Attributes:
        samples: How many samples were read.
        seconds: How long that took.
        cpu_seconds: How much of that the thread was at work.
        times: The seconds by stage.
    """

    samples: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    times: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def per_sample(self) -> float:
        """Seconds per sample."""
        return self.seconds / max(1, self.samples)

    def stages(self) -> list[TimedStage]:
        """A row per stage, and one for all of them together."""
        count = max(1, self.samples)
        rows = [TimedStage(name, "sample", seconds / count) for name, seconds in self.times.items()]
        return [*rows, TimedStage("reading, all of it", "sample", self.per_sample, self.cpu_seconds / count)]

    def read(self, reading: Reading, first: int, end: int, samples: int) -> None:
        """Read some rows, and count what that costs."""
        begun, cpu = time.perf_counter(), time.thread_time()
        report = reading.read(first, end)
        self.cpu_seconds += time.thread_time() - cpu
        self.seconds += time.perf_counter() - begun
        self.samples += samples
        for name, seconds in report.times.items():
            self.times[name] = self.times.get(name, 0.0) + seconds
        report.times.clear()


def time_reading(loader: "DataLoader", words: np.ndarray, seconds: float) -> tuple[TimedReading, Filled]:
    """Read in this thread, from the first step on, for so many seconds; also the batch that was read last."""
    host, plan = loader._host, loader._source.plan
    assert host is not None
    run, out = PlannedSteps(plan, words, host.rows), _memory(loader)
    size = host.layout(plan).rows
    part = 1 if host.source.reads_samples else size
    timed, cold, deadline = TimedReading(), TimedReading(), time.perf_counter() + seconds
    for step in itertools.count():
        request = run.request(step, host.source.keyed)
        reading = Reading(host.source, request, out, tolerant=host.tolerant)
        for first in range(0, size, part):
            # The first reading opens files and fills caches; it counts only if there is time for no other.
            into = cold if step == first == 0 else timed
            into.read(reading, first, first + part, int(request.real[first : first + part].sum()))
            if time.perf_counter() >= deadline:
                return (timed if timed.samples else cold), _filled(loader, out, request)
    raise AssertionError("steps do not end")


def read_batch(loader: "DataLoader", words: np.ndarray, step: int) -> None:
    """Read a batch in this thread; raises what reading raises."""
    host = loader._host
    assert host is not None
    request = PlannedSteps(loader._source.plan, words, host.rows).request(step, host.source.keyed)
    Reading(host.source, request, _memory(loader), tolerant=host.tolerant).read(0, len(request.indices))


def unread_batch(loader: "DataLoader", words: np.ndarray) -> Filled:
    """A batch of zeros."""
    assert loader._host is not None
    return _filled(
        loader, _memory(loader), PlannedSteps(loader._source.plan, words, loader._host.rows).request(0, False)
    )


def _memory(loader: "DataLoader") -> list[np.ndarray]:
    """Arrays for the rows of one batch; zeros, as not all of them may come to be read."""
    assert loader._host is not None
    arrays = loader._host.source.sample_spec.empty(loader._host.layout(loader._source.plan).rows)
    for array in arrays:
        array[...] = None if array.dtype.hasobject else 0
    return arrays


def _filled(loader: "DataLoader", out: list[np.ndarray], request: Request) -> Filled:
    assert loader._host is not None
    axes = loader._host.layout(loader._source.plan).axes
    rows = [leaf.reshape((*axes, *leaf.shape[1:])) for leaf in out]
    return Filled(rows, Report(), 0.0, int(request.real.sum()), request=request)


def time_delivery(loader: "DataLoader", words: np.ndarray, filled: Filled, seconds: float) -> list[TimedStage]:
    """How long a batch takes from the host's memory to the device, and through the compiled stages."""
    if loader._source.objects is not None:
        return []
    deliver = functools.partial(loader._delivery.deliver, words)
    if loader._mesh_placement is not None and not loader._effects:  # the rows become global arrays on the way
        return [TimedStage("hand-over and compiled stages", "batch", _median(lambda: deliver(filled), seconds))]
    handed = _median(lambda: jax.device_put(filled.rows), seconds / 2)
    rows = [TimedStage("hand-over", "batch", handed)]
    compiled = any(not (stage.batches or stage.passive) for stage in loader._source.stages)
    if compiled and not loader._effects:  # a function of the user's must not be called with a batch that was half read
        there = dataclasses.replace(filled, rows=jax.device_put(filled.rows))
        rows.append(TimedStage("compiled stages", "batch", _median(lambda: deliver(there), seconds / 2)))
    return rows


def time_program(loader: "DataLoader", words: np.ndarray, seconds: float) -> list[TimedStage]:
    """How long the program takes that makes a batch of arrays on the device."""
    state = loader.init_state(words)
    return [TimedStage("compiled stages", "batch", _median(lambda: loader._draw(state)[::2], seconds))]


def _median(run: Callable[[], Any], seconds: float) -> float:
    """The usual time of a call, which has been made once before, so that nothing is compiled in it."""
    jax.block_until_ready(run())
    times, deadline = [], time.perf_counter() + seconds
    while not times or (time.perf_counter() < deadline and len(times) < _MOST_REPEATS):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begun)
    return statistics.median(times)
