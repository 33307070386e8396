"""The batches of a loader beside those of all other ways to them, step by step: few are in memory at a time."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from millstream.loader._verification.compare import Mismatch, compare, on_host
from millstream.loader._verification.draws import Drawn, Draws, NotAllowed
from millstream.loader._verification.pace import Pace
from millstream.loader._verification.reading import IN_A_WORKER
from millstream.loader._verification.result import Difference, VerificationRow
from millstream.loader._verification.ways import Way
from millstream.loader.info import BatchInfo
from millstream.text.errors import describe_value

_CHECK = "executors"
_LEAST = 2  # batches that are compared even if there is no time

_CAUSES = {
    "Processes": IN_A_WORKER,
    "the cache": "The cache holds other values than the source gives now. If the data have changed, delete its folder.",
    "Threads": "Several threads read at once, in any order. A function that keeps something between two calls (a "
    "position in a file, a buffer, a counter) must be given a lock, or keep nothing.",
    "compiled": "The same stages give other values in another compiled program: does a function depend on anything but "
    "its arguments when it is traced?",
}


@dataclasses.dataclass
class Beside:
    """One of the other ways, while it is compared.

    Attributes:
        way: The way.
        batches: Its batches.
        compared: How many were compared.
        over: Whether nothing more is asked of it.
        raised: What it raised, and at which batch of the loader.
    """

    way: Way
    batches: Draws
    compared: int = 0
    over: bool = False
    raised: tuple[Exception, Drawn] | None = None


class Streams:
    """Draws the batches of a loader and compares the other ways with them.

    Args:
        key: The run's key.
        ways: The other ways.
        left_out: Why there are not more.
        rounds: Whether compiled stages of the pipeline calculate, so that XLA may round in one program and not in
            another.
    """

    def __init__(self, key: Any, ways: Sequence[Way], left_out: Sequence[str], rounds: bool) -> None:
        self._key = key
        self._ways = ways
        self._notes = list(left_out)
        self._rounds = rounds
        self._rounded: dict[str, tuple[float, str]] = {}  # the largest difference of a leaf, and where
        self._beside: list[Beside] = []
        self._difference: Difference | None = None
        self.batches = 0
        self.raised: Exception | None = None

    def run(self, reference: Way, steps: int, pace: Pace, see: Callable[[Drawn], None]) -> None:
        """Draw up to so many batches, as far as the time goes.

        Args:
            reference: What the others are compared with.
            steps: How many.
            pace: How much time there is.
            see: Shown every batch.
        """
        with contextlib.ExitStack() as open_ones:

            def opened(way: Way) -> Draws:
                return open_ones.enter_context(contextlib.closing(way.draw(self._key, steps)))

            batches, self._beside = opened(reference), [Beside(way, opened(way)) for way in self._ways]
            while self.batches < steps and (self.batches < _LEAST or not pace.is_over):
                try:
                    drawn = next(batches)
                except StopIteration:
                    break
                except Exception as error:
                    self.raised = error
                    break
                see(drawn)
                expected = on_host((drawn.value, drawn.mask))
                for beside in self._beside:
                    if not beside.over:
                        self._compare(beside, drawn, expected)
                self.batches += 1
                pace.show("batch", self.batches, steps)
        for beside in self._beside:
            # A compiled loop reads ahead of the loader, and meets a sample that cannot be read before it does.
            if beside.raised is not None and type(beside.raised[0]) is not type(self.raised):
                error, drawn = beside.raised
                self._differ(beside, drawn, Mismatch("batch", (), "a batch", describe_value(error)))

    def _compare(self, beside: Beside, drawn: Drawn, expected: Any) -> None:
        name = beside.way.name
        try:
            found = next(beside.batches)
        except StopIteration:
            beside.over = True
            return
        except NotAllowed as reason:
            self._notes.append(f"{name} is left out: {' '.join(str(reason).split())}")
            beside.over = True
            return
        except Exception as error:
            beside.raised, beside.over = (error, drawn), True
            return
        beside.compared += 1
        if found.value is None and drawn.info is not None and drawn.info.failed:
            return  # on_error="skip batch" leaves it out, as it should
        for mismatch in compare_batches(expected, on_host((found.value, found.mask))):
            if mismatch.rounding is None or not self._rounds:
                self._differ(beside, drawn, mismatch)
                return
            if mismatch.rounding >= self._rounded.get(mismatch.leaf, (0.0, ""))[0]:
                self._rounded[mismatch.leaf] = mismatch.rounding, name

    def _differ(self, beside: Beside, drawn: Drawn, mismatch: Mismatch) -> None:
        beside.over = True
        if self._difference is None:
            name = beside.way.name
            where = f"{name}, {place_of(drawn.step, drawn.info, mismatch)}"
            cause = next((text for kind, text in _CAUSES.items() if name.startswith(kind)), _CAUSES["compiled"])
            self._difference = Difference(_CHECK, where, mismatch.shown, mismatch.expected, mismatch.found, cause)
        else:
            self._notes.append(f"{beside.way.name} differs, too, at step {drawn.step}.")

    def row(self) -> VerificationRow:
        """The check."""
        notes = [
            f"{leaf} differs by at most {size:.2g} ({name}): rounding of XLA, which contracts x * a + b where it can."
            for leaf, (size, name) in self._rounded.items()
        ]
        same = [beside for beside in self._beside if beside.compared]
        if self._difference is not None:
            return VerificationRow(_CHECK, "failed", "not the same batches", self._difference, (*self._notes, *notes))
        if not same:
            return VerificationRow(_CHECK, "left out", "nothing could be compared", None, tuple(self._notes))
        most = max(beside.compared for beside in same)
        names = [f"{one.way.name}{'' if one.compared == most else f' ({one.compared:,})'}" for one in same]
        equal = "equal but for rounding" if notes else "equal bit for bit"
        evidence = f"{', '.join(['iterate', *names])}: {most:,} batches, {equal}"
        return VerificationRow(_CHECK, "ok", evidence, None, (*self._notes, *notes))


def compare_batches(expected: tuple[Any, Any], found: tuple[Any, Any]) -> list[Mismatch]:
    """Where two batches and their masks differ, on the host."""
    return [*compare("mask", expected[1], found[1]), *compare("batch", expected[0], found[0])]


def place_of(step: int, info: BatchInfo | None, mismatch: Mismatch) -> str:
    """In words where a difference is: step, epoch, row and sample."""
    if info is None:
        return f"step {step}"
    text, axes = f"step {step} (epoch {info.epoch}, batch {info.step_in_epoch})", info.indices.ndim
    row = mismatch.place[:axes]
    if not axes or len(row) < axes or any(np.array(row) >= info.indices.shape):
        return f"{text}, sample {info.indices.item():,}" if not axes else text
    shown = str(row[0]) if axes == 1 else str(row)
    return f"{text}, row {shown}, sample {info.indices[row]:,}"
