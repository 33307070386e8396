"""Proving on a user's own data what every loader promises: draw the batches in all ways, compare, stop and resume."""

import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from millstream.inspect._explain import require_loader
from millstream.inspect._samples import SampleCheck
from millstream.inspect._stages import check_stages
from millstream.inspect._verification import Verification, VerificationRow
from millstream.inspect._ways import Executor, Ways, usual_executors
from millstream.loader.loader import DataLoader
from millstream.pipeline.compose import SeekablePipeline
from millstream.pipeline.iterable import IterablePipeline
from millstream.pipeline.phased import PhasedPipeline
from millstream.reading import executor as reading
from millstream.reading.contracts import PyTree
from millstream.reading.executor import InGraph
from millstream.text.bar_line import ProgressLine
from millstream.text.errors import describe_value, listed, require_bool, require_int, require_positive

_STAGES = 0.3  # of the time, for the stages alone
_SCAN = 0.1  # of the time, for what a compiled loop reads at once
_UNKNOWN_EPOCH = 64  # batches that are read where an epoch has no known length
_STREAM_SCAN = 1024  # batches of a stream that a compiled loop makes at once


def verify(
    loader: DataLoader[PyTree, PyTree],
    key: jax.Array | np.ndarray | None = None,
    *,
    steps: int | None = None,
    seconds: float = 60.0,
    executors: Sequence[Executor] | None = None,
    hosts: Sequence[int] = (1, 2, 4),
    progress: bool = True,
    raises: bool = True,
) -> Verification:
    """Prove on your own data what a loader promises, and name the first difference if there is one.

    Stages are deterministic; no sample comes twice in an epoch, or is missing; every executor and every number of hosts
    gives the same stream; a stream that is saved and resumed continues as if it had not stopped. Your functions are
    called more often than in a run. The loader stays as it is.

    Example:
        >>> print(ms.inspect.verify(loader, executors=[ms.Threads(2)], hosts=[1, 2]).rows[4].evidence)
        1 host, 2 hosts: 5 batches, equal bit for bit

    Args:
        loader: The loader.
        key: The key of the run to look at; None for `jax.random.key(0)`.
        steps: How many batches to read, at most; None for an epoch and two more, or 64 if its length is not known.
        seconds: About how long to take, at most. Each check does a little even if there is no time.
        executors: What to compare with this loader; by default no executor, one thread, three threads and two
            worker processes.
        hosts: Numbers of hosts to divide batches by.
        progress: Whether to show progress on stderr, if that is a terminal or a notebook.
        raises: Whether a difference raises `VerificationFailed`, as a test wants it; if not, the table has it.
    """
    require_loader("verify", loader, built=True)
    for name, value in {"progress": progress, "raises": raises}.items():
        require_bool("verify", name, value)
    _check_arguments(steps, seconds, executors, hosts)
    executors = usual_executors(loader.options["executor"]) if executors is None else executors
    key, begun = jax.random.key(0) if key is None else key, time.perf_counter()
    if steps is None:
        length: int | None = loader.steps_per_epoch
        steps = _UNKNOWN_EPOCH if length is None else length + 2
    ways = Ways(loader, key, steps)
    with contextlib.closing(ProgressLine("verify", shown=progress)) as line:
        if isinstance(loader.pipeline, SeekablePipeline):
            rows = _check_indexed(loader, ways, executors, hosts, begun, seconds, line)
        else:
            rows = _check_stream(ways, begun + seconds, line)
    verification = Verification(tuple(rows), time.perf_counter() - begun)
    if raises:
        verification.raise_if_failed()
    return verification


def _check_arguments(steps: Any, seconds: Any, executors: Any, hosts: Any) -> None:
    if steps is not None:
        require_int("verify", "steps", steps, least=1)
    require_positive("verify", "seconds", seconds, finite=False)
    given = [] if executors is None else listed(executors)
    if given is None or not all(isinstance(executor, InGraph | reading.Executor) for executor in given):
        raise TypeError(
            "verify needs executors to be a list of Threads(4), Processes(4) and the like. "
            f"Got {describe_value(executors)}."
        )
    counts = listed(hosts)
    if counts is None:
        raise TypeError(f"verify needs hosts to be a list of numbers. Got {describe_value(hosts)}.")
    for count in counts:
        require_int("verify", "every number of hosts", count, least=1)


def _check_indexed(
    loader: DataLoader,
    ways: Ways,
    executors: Sequence[Executor],
    hosts: Sequence[int],
    begun: float,
    seconds: float,
    line: ProgressLine,
) -> list[VerificationRow]:
    """All checks of a pipeline that starts with an indexed source."""
    pipeline = loader.replace(executor=None, on_error="raise", cache=None, sharding=None).pipeline
    line.say("stages")
    phases = pipeline.phases if isinstance(pipeline, PhasedPipeline) else (pipeline,)
    checked = [check_stages(phase, ways.words, begun + _STAGES * seconds) for phase in phases]
    stages, per_sample = next((one for one in checked if one[0].result == "failed"), checked[0])
    samples = SampleCheck(pipeline, ways.words)
    largest = max(math.prod(bucket.axes) for bucket in pipeline.plan.buckets)
    ways.add_calls(_SCAN * seconds / (max(per_sample, 1e-9) * largest))
    ways.add_executors(executors)
    ways.add_resuming()
    ways.add_hosts(pipeline, hosts)
    ways.compare(begun + seconds, line, samples.see)
    return [stages, samples.row(ways.raised), *(ways.row(check) for check in ("executors", "resume", "hosts"))]


def _check_stream(ways: Ways, deadline: float, line: ProgressLine) -> list[VerificationRow]:
    """All checks of a stream."""
    ways.add_second_drawing()
    ways.add_calls(_STREAM_SCAN)
    in_order = isinstance(ways.pipeline, IterablePipeline)
    how = "drawn by a thread of its own, in order" if in_order else "computed step by step"
    ways.leave_out("Threads and Processes", f"a stream is {how}.")
    ways.add_resuming()
    ways.compare(deadline, line, lambda drawn: None)
    if ways.raised is not None:
        raise ways.raised
    samples = VerificationRow("samples", "left out", "the samples of a stream have no index")
    hosts = VerificationRow("hosts", "left out", f"every host {'draws' if in_order else 'computes'} the whole stream")
    return [ways.row("stages"), samples, ways.row("executors"), ways.row("resume"), hosts]
