"""Whether every sample comes once in an epoch, and whether masks are those of the plan."""

import numpy as np

from millstream.inspect._compare import compare, on_host
from millstream.inspect._draws import Drawn
from millstream.inspect._verification import Difference, VerificationRow
from millstream.pipeline.compose import SeekablePipeline
from millstream.pipeline.phased import PhasedPipeline
from millstream.plan.bucket_plan import BucketPlan
from millstream.plan.phases import PhasedPlan
from millstream.plan.plan import Plan
from millstream.plan.planned import PlannedSteps
from millstream.reading.host_source import as_host_source
from millstream.text.errors import describe_value

_NAMED = 3  # samples that could not be read and are named


class SampleCheck:
    """Counts the samples of the batches that are read, and compares masks with the plan."""

    def __init__(self, pipeline: SeekablePipeline, words: np.ndarray) -> None:
        self._pipeline, self._words = pipeline, words
        self._seen: dict[int, np.ndarray] = {}  # which samples have come, by epoch
        self._failed: dict[int, BaseException] = {}
        self._batches = self._samples = 0
        # A user's stage may change the mask on purpose; ours only repeat it, which changes its shape.
        self._keeps_masks = all(type(stage).__module__.startswith("millstream.") for stage in pipeline.stages)
        self._difference: Difference | None = None

    def see(self, drawn: Drawn) -> None:
        """Count a batch."""
        info = drawn.info
        assert info is not None
        plan, step = _plan_at(self._pipeline.plan, info.step)
        real = np.asarray(info.indices >= 0)
        if isinstance(plan, Plan) and any(batching.ending == "wrap" for batching in plan.batchings):  # of two epochs
            epochs = np.broadcast_to(plan.rows_at(np, self._words, np.asarray(step))[-1].epoch, real.shape)[real]
        else:
            epochs = np.full(int(real.sum()), info.epoch)
        self._failed |= {int(info.indices.reshape(-1)[row]): error for row, error in info.failed.items()}
        self._batches, self._samples = self._batches + 1, self._samples + len(epochs)
        expected, mask = real.copy(), on_host(drawn.mask)
        expected.reshape(-1)[list(info.failed)] = False
        if self._difference is None and self._keeps_masks and mask.shape == expected.shape:
            for wrong in compare("mask", expected, mask):
                where = f"step {info.step} (epoch {info.epoch}, batch {info.step_in_epoch})"
                cause = "The mask must be True in rows that are samples and False in rows that are padding."
                self._difference = Difference.of("samples", where, wrong, cause)
        for epoch in np.unique(epochs).tolist():
            positions, times = np.unique(info.positions[real][epochs == epoch], return_counts=True)
            seen = self._seen.setdefault(epoch, np.zeros(plan.samples, bool))
            for position in positions[seen[positions] | (times > 1)][:1]:
                self._miscounted(epoch, position, "twice")
            seen[positions] = True

    def _miscounted(self, epoch: int, position: int, times: str) -> None:
        cause = "Every sample belongs to an epoch once. This is a fault of the plan; please report it."
        plan, _ = _plan_at(self._pipeline.plan, 0)
        what = "sample" if plan.selection is None else "position"
        difference = Difference("samples", f"epoch {epoch}", f"{what} {position:,}", "once", times, cause)
        self._difference = self._difference or difference

    def row(self, raised: Exception | None) -> VerificationRow:
        """The check of the samples, after reading that may have raised."""
        plan, once = self._pipeline.plan, ""
        if plan.samples is not None and self._batches >= plan.steps_per_epoch:
            came = int(np.count_nonzero(self._seen[0]))
            once = f"{came:,} samples, each once in an epoch; "
            if came < plan.samples:
                once = f"{came:,} of {plan.samples:,} samples (the rest is dropped), each once in an epoch; "
                if not any(batching.ending == "drop" for bucket in plan.buckets for batching in bucket.batchings):
                    self._miscounted(0, int(np.argmin(self._seen[0])), "never")
        if raised is not None:
            self._difference = self._difference or _unreadable(self._pipeline, self._words, self._batches, raised)
        notes = ()
        if self._failed:
            named = [f"{index:,} ({describe_value(error)})" for index, error in list(self._failed.items())[:_NAMED]]
            others = f" and {len(self._failed) - _NAMED:,} others" if len(self._failed) > _NAMED else ""
            notes = (f"Samples that cannot be read and are skipped: {', '.join(named)}{others}.",)
        if self._difference is not None:
            evidence = f"{self._batches:,} batches read, with a difference"
            return VerificationRow("samples", "failed", evidence, self._difference, notes)
        evidence = f"{once}{self._samples:,} read in {self._batches:,} batches, none twice, masks as planned"
        return VerificationRow("samples", "ok", evidence, None, notes)


def _plan_at(plan: Plan | BucketPlan | PhasedPlan, step: int) -> tuple[Plan | BucketPlan, int]:
    """The plan that makes a batch, and the number of the batch there."""
    if not isinstance(plan, PhasedPlan):
        return plan, step
    phase, own = plan.phase_at(step)
    return plan.phases[phase], own


def _unreadable(pipeline: SeekablePipeline, words: np.ndarray, step: int, raised: Exception) -> Difference:
    """The sample of a step that raises when it is read, found by reading one after the other."""
    plan, own = _plan_at(pipeline.plan, step)
    request = PlannedSteps(plan, words).request(own, keyed=False)
    part = pipeline.phases[pipeline.plan.phase_at(step)[0]] if isinstance(pipeline, PhasedPipeline) else pipeline
    assert part.source is not None
    source, where = as_host_source(part.source), f"step {step}"
    cause = "A stage has raised it. The stream cannot continue from here."
    for index in request.indices[request.real].tolist():
        try:
            source.read_keyed(np.array([index]), np.zeros((1, 2), np.uint32) if source.keyed else None)
        except Exception:
            where = f"step {step}, sample {index:,}"
            cause = 'Fix the sample, or skip it: on_error="skip item" masks such samples, and verify lists them all.'
            break
    return Difference("samples", where, "the batch", "arrays", describe_value(raised), cause)
