"""Counting a run: its steps, samples, epochs and time."""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from millstream.loops.elapsed import Elapsed
from millstream.loops.schedules import Epochs, Period
from millstream.loops.skips import Skips
from millstream.plan.phases import EpochLengths


class StepSpan(NamedTuple):
    """Several steps, by columns.

    Attributes:
        steps: Their numbers.
        samples: Samples of the run after each of them.
        epochs: Completed epochs after each of them; None if the run knows no epochs.
        times: Seconds that the run had taken when each began.
        date_start: As in `Elapsed`.
        samples_before: Samples of the run before the first of them.
    """

    steps: range
    samples: list[int]
    epochs: list[int] | None
    times: Sequence[float]
    date_start: float
    samples_before: int

    def moments(self) -> Iterator[Elapsed]:
        """The elapsed of each, as far as a history keeps it."""
        before = self.samples_before
        for i, samples in enumerate(self.samples):
            epochs = None if self.epochs is None else self.epochs[i]
            yield Elapsed(self.steps[i], samples, epochs, self.times[i], self.date_start, before)
            before = samples


class Clock:
    """Makes the elapsed of each step from the one before it.

    Args:
        start: How far an earlier run had come; None for a new one.
        epoch: How long an epoch is; None if unknown.
        skips: Batches that are left out; they count in epochs that are given in steps.

    Attributes:
        now: How far the run is.
        epochs: Where epochs end, if they are given in steps.
    """

    def __init__(self, start: Elapsed | None, epoch: Period | EpochLengths | None, skips: Skips | None = None) -> None:
        begun = 0.0 if start is None else start.time
        self._epoch = epoch
        steps = epoch.units.get("steps") if isinstance(epoch, Period) else None
        length = epoch if isinstance(epoch, EpochLengths) else None if steps is None else int(steps)
        self.epochs = None if length is None else Epochs(length, Skips() if skips is None else skips)
        self._origin = time.perf_counter() - begun
        # The date on which the run would have started, had it never been stopped: so its date is always now.
        elapsed = (Elapsed() if start is None else start).replace(date_start=time.time() - begun, final=False)
        if epoch is not None:
            before = self._count(epoch, elapsed.step_before()) if elapsed.steps else 0
            elapsed = elapsed.replace(epochs=self._count(epoch, elapsed), epochs_before=before)
        self.now = elapsed

    def tick(self, samples: int, now: float | None = None) -> Elapsed:
        """One more step, of that many samples; `now` is what `time.perf_counter` says."""
        seconds = (time.perf_counter() if now is None else now) - self._origin
        self.now = self._after(self.now, samples, seconds)
        return self.now

    def ahead(self, samples: list[int]) -> list[Elapsed]:
        """The steps that come next, with that many samples each. Their time is now: it cannot be foreseen."""
        made, elapsed = [], self.now
        for count in samples:
            elapsed = self._after(elapsed, count, self.now.time)
            made.append(elapsed)
        return made

    def skip(self, samples: list[int], moments: Sequence[float] | None = None) -> StepSpan:
        """Several steps more.

        Args:
            samples: Samples of each.
            moments: What `time.perf_counter` said when each began; None if all of them are now.
        """
        before, count = self.now, len(samples)
        if moments is None:
            times = [time.perf_counter() - self._origin] * count
        else:
            times = [moment - self._origin for moment in moments]
        reached = list(itertools.accumulate(samples, initial=before.samples))[1:]
        steps = range(before.steps + 1, before.steps + count + 1)
        last = before
        if count > 1:
            earlier = before.replace(steps=steps[-1] - 2, samples=reached[-2] - samples[-2])
            earlier.epochs = before.epochs if self._epoch is None else self._count(self._epoch, earlier)
            # Of steps that are one program, the last is the only one at which something can be due because of the time.
            last = self._after(earlier, samples[-2], before.time if moments is None else times[-2])
        self.now = self._after(last, samples[-1], times[-1])
        return StepSpan(steps, reached, self._epochs_at(steps, reached), times, before.date_start, before.samples)

    def _epochs_at(self, steps: range, samples: list[int]) -> list[int] | None:
        """How many epochs were complete at each of some steps, which had reached that many samples."""
        if self.now.epochs is None:
            return None
        if self.epochs is not None:
            return self.epochs.count_each(steps)
        length = self._epoch.units.get("samples") if isinstance(self._epoch, Period) else None
        if length is None:
            return [self.now.epochs] * len(steps)
        whole = int(length)  # as samples are
        return [count // whole for count in samples]

    def _count(self, epoch: Period | EpochLengths, elapsed: Elapsed) -> int:
        if self.epochs is not None:
            return self.epochs.count(elapsed.steps)
        assert isinstance(epoch, Period)
        return epoch.count(elapsed)

    @property
    def epoch(self) -> tuple[str, float] | EpochLengths | None:
        """How long an epoch is: a unit and a number, or how long each one is."""
        return next(iter(self._epoch.units.items())) if isinstance(self._epoch, Period) else self._epoch

    def _after(self, before: Elapsed, samples: int, now: float) -> Elapsed:
        elapsed = Elapsed(
            before.steps + 1,
            before.samples + samples,
            before.epochs,
            now,
            before.date_start,
            before.samples,
            before.epochs,
            before.time,
            before.steps == 0 or before.epochs != before.epochs_before,
        )
        if self._epoch is not None:
            elapsed.epochs = self._count(self._epoch, elapsed)
        return elapsed
