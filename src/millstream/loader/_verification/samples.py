"""Every sample exactly once per epoch: in the plan, which is cheap, and in the batches that were read."""

import math

import numpy as np

from millstream.loader._verification.compare import compare, on_host
from millstream.loader._verification.draws import Drawn
from millstream.loader._verification.pace import Pace
from millstream.loader._verification.result import Difference, VerificationRow
from millstream.pipeline.pipeline import Pipeline
from millstream.plan.plan import Plan
from millstream.reading.host_source import as_host_source
from millstream.text.errors import describe_value

_CHECK = "samples"
_BLOCK = 1 << 16  # samples that are planned together
_AT_LEAST = 1 << 20  # samples that are planned even if there is no time
_PLANNED = 2  # epochs that are planned without reading
_NAMED = 3  # samples that could not be read and are named


class Visits:
    """The samples that have come, a bit each, in the epoch they belong to.

    Args:
        plan: What the batches are of.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._wraps = any(batching.ending == "wrap" for batching in plan.batchings)
        self._bits: dict[int, np.ndarray] = {}
        self.repeated: tuple[int, int] | None = None  # the first sample that came twice, and in which epoch

    def add(self, steps: np.ndarray, indices: np.ndarray, epochs: np.ndarray) -> None:
        """Take in samples: their steps, their indices, and the epochs that the plan has them from."""
        # Batches that recur are all from epoch 0, and those that wrap have samples of two epochs.
        own = epochs if self._wraps else steps // self._plan.steps_per_epoch
        for epoch in np.unique(own).tolist():
            bits = self._bits.setdefault(epoch, np.zeros(-(-self._plan.samples // 8), np.uint8))
            chosen, counts = np.unique(indices[own == epoch], return_counts=True)
            byte, bit = chosen >> 3, np.left_shift(np.uint8(1), (chosen & 7).astype(np.uint8))
            again = (counts > 1) | (bits[byte] & bit != 0)
            if self.repeated is None and again.any():
                self.repeated = int(chosen[np.argmax(again)]), epoch
            np.bitwise_or.at(bits, byte, bit)

    def count(self, epoch: int) -> int:
        """How many samples have come in an epoch."""
        return int(np.bitwise_count(self._bits[epoch]).sum()) if epoch in self._bits else 0

    def first_missing(self, epoch: int) -> int:
        """The first sample that has not come in an epoch."""
        bits = self._bits[epoch]
        byte = int(np.argmax(bits != 255))
        return 8 * byte + int(np.argmin(np.unpackbits(bits[byte : byte + 1], bitorder="little")))


def samples_per_epoch(plan: Plan) -> int:
    """How many samples an epoch should have, from sizes alone."""
    elements, full, total = plan.samples, 1, plan.samples  # `full`: samples of an element, the last one aside
    for batching in plan.batchings:
        if batching.ending == "drop" and elements % batching.size:
            total = elements // batching.size * batching.size * full
        elements, full = batching.length, full * batching.size
    return total


def check_plan(plan: Plan, words: np.ndarray, pace: Pace) -> tuple[int, str | None]:
    """Plan epochs without reading: how many were planned to their end, and what is wrong with them."""
    visits, length, expected = Visits(plan), plan.steps_per_epoch, samples_per_epoch(plan)
    block = max(1, _BLOCK // math.prod(plan.axes))
    endings = {batching.ending for batching in plan.batchings}
    for epoch in range(_PLANNED):
        for first in range(epoch * length, (epoch + 1) * length, block):
            if pace.is_over and first >= _AT_LEAST // math.prod(plan.axes):
                return epoch, None
            _add_planned(visits, plan, words, np.arange(first, min(first + block, (epoch + 1) * length)))
            if visits.repeated is not None:
                return epoch, "sample {:,} comes twice in epoch {}".format(*visits.repeated)
        # Where batches of batches wrap and are dropped, how many are left out differs from epoch to epoch.
        if visits.count(epoch) != expected and not {"wrap", "drop"} <= endings:
            missing = visits.first_missing(epoch)
            return epoch, f"{visits.count(epoch):,} samples come in epoch {epoch}, and sample {missing:,} does not"
    return _PLANNED, None


def _add_planned(visits: Visits, plan: Plan, words: np.ndarray, steps: np.ndarray) -> None:
    indices, rows = plan.at(np, words, steps)
    real, epochs = rows[-1].mask, rows[-1].epoch
    of_step = np.broadcast_to(steps.reshape(-1, *(1,) * (real.ndim - 1)), real.shape)
    visits.add(of_step[real], indices[real].astype(np.int64), epochs[real].astype(np.int64))


class SamplesRead:
    """Looks at the batches that are read, one after the other.

    Args:
        pipeline: What they are batches of.
        words: The run's key.
    """

    def __init__(self, pipeline: Pipeline, words: np.ndarray) -> None:
        self._pipeline, self._words = pipeline, words
        self._visits = Visits(pipeline.plan)
        self._failed: dict[int, BaseException] = {}
        self._batches = self._samples = 0
        # A stage of the user's may change the mask on purpose; ours only repeat it, which changes its shape.
        self._keeps_masks = all(type(stage).__module__.startswith("millstream.") for stage in pipeline.stages)
        self._difference: Difference | None = None

    def see(self, drawn: Drawn) -> None:
        """Take in a batch."""
        info = drawn.info
        assert info is not None
        real = np.asarray(info.indices >= 0)
        epochs = self._pipeline.plan.rows_at(np, self._words, np.asarray(info.step))[-1].epoch
        steps = np.full(int(real.sum()), info.step)
        self._visits.add(steps, info.indices[real], np.broadcast_to(epochs, real.shape)[real].astype(np.int64))
        self._failed |= {int(info.indices.reshape(-1)[row]): error for row, error in info.failed.items()}
        self._batches += 1
        self._samples += len(steps)
        expected = real.copy()
        expected.reshape(-1)[list(info.failed)] = False
        mask = on_host(drawn.mask)
        if self._difference is None and self._keeps_masks and mask.shape == expected.shape:
            for wrong in compare("mask", expected, mask):
                where = f"step {info.step} (epoch {info.epoch}, batch {info.step_in_epoch})"
                cause = "The mask must be True in rows that are samples and False in rows that are padding."
                self._difference = Difference(_CHECK, where, wrong.shown, wrong.expected, wrong.found, cause)

    def row(self, raised: Exception | None, pace: Pace) -> VerificationRow:
        """The check.

        Args:
            raised: What ended the reading too early, if anything did.
            pace: How much time there is.
        """
        plan = self._pipeline.plan
        difference, notes = self._difference, self._unreadable()
        if raised is not None:
            difference = difference or unreadable(self._pipeline, self._words, self._batches, raised)
        if self._visits.repeated is not None:
            sample, epoch = self._visits.repeated
            difference = difference or _other_count(f"epoch {epoch}", f"sample {sample:,}", "once", "twice")
        planned, wrong = check_plan(plan, self._words, pace)
        if wrong is not None:
            difference = difference or _other_count(f"epoch {planned}", "the plan", "every sample once", wrong)
        of = samples_per_epoch(plan)
        counted = (
            f"{of:,} samples" if of == plan.samples else f"{of:,} of {plan.samples:,} samples (the rest is dropped)"
        )
        once = f"{counted}, each once in {planned} planned epochs; " if planned else ""
        evidence = f"{once}{self._samples:,} read in {self._batches:,} batches, none twice, masks as planned"
        if not planned:
            notes = (*notes, "The plan of a whole epoch is left out: there was no time for so many samples.")
        if difference is not None:
            evidence = f"{self._batches:,} batches read, with a difference"
        return VerificationRow(_CHECK, "ok" if difference is None else "failed", evidence, difference, notes)

    def _unreadable(self) -> tuple[str, ...]:
        if not self._failed:
            return ()
        named = [f"{index:,} ({describe_value(error)})" for index, error in list(self._failed.items())[:_NAMED]]
        others = f" and {len(self._failed) - _NAMED:,} others" if len(self._failed) > _NAMED else ""
        return (f"Samples that cannot be read and are skipped: {', '.join(named)}{others}.",)


def unreadable(pipeline: Pipeline, words: np.ndarray, step: int, raised: Exception) -> Difference:
    """The sample of a step that raises when it is read, found by reading one after the other."""
    indices, rows = pipeline.plan.at(np, words, np.asarray(step))
    assert pipeline.source is not None
    source, where = as_host_source(pipeline.source), f"step {step}"
    cause = "A stage has raised it. The stream cannot go on from here."
    for index in indices[rows[-1].mask].tolist():
        try:
            source.read_sample(index, np.zeros(2, np.uint32) if source.keyed else None)
        except Exception:
            where = f"step {step}, sample {index:,}"
            cause = (
                'Mend the sample, or leave it out: on_error="skip item" masks such samples, and verify lists them all.'
            )
            break
    return Difference(_CHECK, where, "the batch", "arrays", describe_value(raised), cause)


def _other_count(where: str, what: str, expected: str, found: str) -> Difference:
    cause = "Every sample belongs into an epoch once. This is a fault of the plan; please report it."
    return Difference(_CHECK, where, what, expected, found, cause)
