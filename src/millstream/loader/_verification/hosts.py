"""Each of several hosts reads its own rows of a batch, and together they are the batch."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from millstream.loader._verification.compare import compare
from millstream.loader._verification.pace import Pace
from millstream.loader._verification.result import Difference, VerificationRow
from millstream.pipeline.pipeline import Pipeline
from millstream.reading.samples import ObjectSpec
from millstream.reading.stats import LoaderStats
from millstream.sharding import shard_bounds

_CHECK = "hosts"
_RANDOM = 2  # batches besides the first ones and the last of an epoch

_CAUSE = (
    "What a sample is read as depends on the samples that are read beside it. Each host reads only its rows, so "
    "values must depend on the index alone, and those of a collate function on each sample alone."
)


def check_hosts(pipeline: Pipeline, words: np.ndarray, hosts: Sequence[int], steps: int, pace: Pace) -> VerificationRow:
    """Read batches as hosts would, all in this process.

    Args:
        pipeline: The pipeline, over no mesh.
        words: The run's key.
        hosts: How many hosts to try.
        steps: How many batches there are to choose from.
        pace: How much time there is.
    """
    reading = pipeline.read_by(executor=None, on_error="skip item", cache=None)
    size, reason = pipeline.plan.axes[0] if pipeline.plan.axes else 0, _why_not(reading, hosts)
    if reason is not None:
        return VerificationRow(_CHECK, "left out", reason)
    able = [count for count in hosts if size % count == 0]
    notes = [f"{count} hosts are left out: {size} rows do not divide by {count}." for count in hosts if size % count]
    if not able:
        return VerificationRow(_CHECK, "left out", "no number of hosts divides a batch", None, tuple(notes))
    random = np.random.default_rng(words).integers(0, steps, _RANDOM).tolist()
    chosen = sorted({step for step in (0, 1, pipeline.steps_per_epoch - 1, *random) if step < steps})
    done = 0
    with contextlib.ExitStack() as opened:
        whole = _Host(opened, reading, "all", range(size))
        each = [
            _Host(opened, reading, f"host {host} of {count}", range(*shard_bounds(count, host, size)))
            for count in able
            for host in range(count)
        ]
        for step in chosen:
            if done and pace.is_over:
                break
            for host in each:
                difference = host.compare(whole, words, step)
                if difference is not None:
                    return VerificationRow(_CHECK, "failed", f"not the same on {host.name}", difference, tuple(notes))
            done += 1
            pace.show("batch", done, len(chosen))
    evidence = f"in parts for {', '.join(map(str, able))} hosts: {done} batches, together equal bit for bit"
    return VerificationRow(_CHECK, "ok", evidence, None, tuple(notes))


def _why_not(reading: Pipeline, hosts: Sequence[int]) -> str | None:
    assert reading.host is not None
    if not hosts:
        return "no number of hosts is asked for"
    if not reading.plan.batchings:
        return "samples that are not batched have no rows to divide"
    source = reading.host.source
    if source.whole_batches and isinstance(source.sample_spec, ObjectSpec):
        return "a collate function that returns objects makes one of the rows of each host"
    return None


class _Host:
    """Reads some rows of every batch.

    Args:
        opened: Ends the reading.
        reading: The pipeline.
        name: What it is called.
        rows: Its rows.
    """

    def __init__(self, opened: contextlib.ExitStack, reading: Pipeline, name: str, rows: range) -> None:
        self.name = name
        self._rows = rows
        self._axes = reading.plan.axes
        host = reading.read_by(rows=tuple(rows)).host
        assert host is not None
        self._spec = host.source.sample_spec
        self._reader = opened.enter_context(contextlib.closing(host.open(reading.plan, LoaderStats())))

    def read(self, words: np.ndarray, step: int) -> tuple[np.ndarray, Any]:
        """The indices of its samples, and the samples; both with an axis of rows and one of the samples in a row."""
        filled = self._reader.rows(words, step)
        axes = (len(self._rows), math.prod(self._axes[1:]))
        pairs = zip(filled.rows, self._spec.shapes, strict=True)
        leaves = [np.array(leaf).reshape(*axes, *shape) for leaf, shape in pairs]
        samples = leaves[0] if isinstance(self._spec, ObjectSpec) else self._spec.unflatten(leaves)
        assert filled.request is not None
        return filled.request.indices.reshape(axes), samples

    def compare(self, whole: "_Host", words: np.ndarray, step: int) -> Difference | None:
        """Where its rows are not those of the whole batch."""
        (indices, samples), (own_indices, own_samples) = whole.read(words, step), self.read(words, step)
        part = slice(self._rows.start, self._rows.stop)
        expected = jax.tree.map(lambda leaf: leaf[part], samples)
        for wrong in [*compare("indices", indices[part], own_indices), *compare("samples", expected, own_samples)]:
            row, inner = wrong.place[:2] if len(wrong.place) > 1 else (0, 0)
            where = f"{self.name}, step {step}, row {self._rows[row]}, sample {indices[part][row, inner]:,}"
            return Difference(_CHECK, where, wrong.shown, wrong.expected, wrong.found, _CAUSE)
        return None
