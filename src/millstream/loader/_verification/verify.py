"""Proving on a user's own data what every loader promises."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from millstream.loader._verification.draws import Drawn, from_cache, iterating
from millstream.loader._verification.hosts import check_hosts
from millstream.loader._verification.pace import Pace
from millstream.loader._verification.reading import seconds_per_sample
from millstream.loader._verification.result import Verification, VerificationRow
from millstream.loader._verification.resume import Stops
from millstream.loader._verification.samples import SamplesRead
from millstream.loader._verification.stages import check_stages, check_stream
from millstream.loader._verification.stream import Streams
from millstream.loader._verification.tracing import calculating
from millstream.loader._verification.ways import Executor, Way, usual_executors, ways_of
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.state import key_words
from millstream.reading.in_graph import InGraph
from millstream.reading.processes import Processes
from millstream.reading.threads import Threads
from millstream.text.errors import describe_value, listed, require_int, require_positive

if TYPE_CHECKING:
    from millstream.loader.loader import DataLoader

_SHARES = {"stages": 0.25, "executors": 0.4, "samples": 0.1, "resume": 0.15, "hosts": 0.1}
_SCAN_SHARE = 0.1  # of all time, for what a compiled loop reads at once


def verify(
    loader: "DataLoader",
    key: Any,
    steps: int | None,
    seconds: float,
    executors: Sequence[Executor] | None,
    hosts: Sequence[int],
    progress: bool,
) -> Verification:
    """Check everything; see `DataLoader.verify`."""
    own = loader._built("verify")[1]["executor"]
    _check_arguments(steps, seconds, executors, hosts)
    executors = usual_executors(own) if executors is None else executors
    key, pace = jax.random.key(0) if key is None else key, Pace(seconds, progress)
    run = _Run(
        loader=loader,
        key=key,
        words=np.asarray(key_words("verify", key)),
        steps=loader.steps_per_epoch + 2 if steps is None else steps,
        executors=executors,
        worker=next((one for one in [own, *executors] if isinstance(one, Processes)), None),
        scan_seconds=_SCAN_SHARE * seconds,
        pace=pace,
    )
    try:
        rows = run.of_pipeline(hosts) if loader._origin is not None else run.of_stream()
        return Verification(tuple(rows), pace.elapsed)
    finally:
        pace.close()


@dataclasses.dataclass(frozen=True)
class _Run:
    """One verification.

    Attributes:
        loader: The loader.
        key: The key of the run that is looked at.
        words: Its raw data.
        steps: How many batches to read, at most.
        executors: What to compare.
        worker: Worker processes, if they are to be used.
        scan_seconds: How long a compiled loop may take.
        pace: How much time there is.
    """

    loader: "DataLoader"
    key: Any
    words: np.ndarray
    steps: int
    executors: Sequence[Executor]
    worker: Processes | None
    scan_seconds: float
    pace: Pace

    def of_pipeline(self, hosts: Sequence[int]) -> list[VerificationRow]:
        """All checks of a pipeline that starts with an indexed source."""
        pipeline = self.loader.replace(executor=None, on_error="raise", cache=None, sharding=None)._source
        assert isinstance(pipeline, Pipeline)
        with self._check("stages"):
            worker = None if self.worker is None else dataclasses.replace(self.worker, workers=1, ordered=True)
            stages = check_stages(pipeline, self.words, worker, self.pace)
        with self._check("executors"):
            samples = SamplesRead(pipeline, self.words)
            seconds = seconds_per_sample(pipeline.source) * math.prod(pipeline.plan.axes)
            streams, stops = self._draw(seconds, bool(calculating(pipeline.stages)), samples.see)
        with self._check("samples"):
            read = samples.row(streams.raised, self.pace)
        with self._check("resume"):
            resume = stops.row(self.pace)
        with self._check("hosts"):
            divided = check_hosts(pipeline, self.words, hosts, self.steps, self.pace)
        return [stages, read, streams.row(), resume, divided]

    def of_stream(self) -> list[VerificationRow]:
        """All checks of a stream."""
        with self._check("stages"):
            begun = time.perf_counter()
            stages = check_stream(self.loader, self.key)
            seconds = time.perf_counter() - begun
        with self._check("executors"):
            streams, stops = self._draw(seconds, True, lambda drawn: None)
            if streams.raised is not None:
                raise streams.raised
        with self._check("resume"):
            resume = stops.row(self.pace)
        samples = VerificationRow("samples", "left out", "a stream has no samples with a number")
        hosts = VerificationRow("hosts", "left out", "every host computes the whole stream")
        return [stages, samples, streams.row(), resume, hosts]

    def _check(self, name: str) -> Any:
        return self.pace.check(name, _SHARES[name])

    def _draw(self, seconds: float, rounds: bool, see: Callable[[Drawn], None]) -> tuple[Streams, Stops]:
        """Draw the batches in all ways.

        Args:
            seconds: How long a batch takes, about.
            rounds: Whether XLA may round in one program and not in another.
            see: Shown every batch.
        """
        reference, more, notes = _compared(self.loader)
        ways, left_out = ways_of(reference, self.executors, self.steps, self.scan_seconds / max(seconds, 1e-9))
        streams = Streams(self.key, [*more, *ways], [*left_out, *notes], rounds)
        stops = Stops(reference, self.key, self.words, self.steps)

        def see_both(drawn: Drawn) -> None:
            stops.see(drawn)
            see(drawn)

        way = Way("iterate", functools.partial(iterating, reference.replace))
        streams.run(way, self.steps, self.pace, see_both)
        return streams, stops


def _compared(loader: "DataLoader") -> tuple["DataLoader", list[Way], list[str]]:
    """What all others are compared with: the loader, but in order, with every batch, and without a cache.

    Also the loader as it is, where that is something else, and its cache; and what is left out.
    """
    options, more, notes = loader._built("verify")[1], [], []
    plain: dict[str, Any] = {"cache": None}
    if options["on_error"] == "skip batch":
        plain["on_error"] = "skip item"
    if getattr(options["executor"], "ordered", True) is False:
        plain["executor"] = dataclasses.replace(options["executor"], ordered=True)
    if loader._mesh_placement is not None and not loader._mesh_placement.is_local:
        plain["sharding"] = None
        notes.append("The mesh is left out: this process has only a part of it, so it has read whole batches alone.")
    elif len(plain) > 1:
        as_it_is = functools.partial(iterating, functools.partial(loader.replace, cache=None))
        more.append(Way("the loader as it is", as_it_is))
    if options["cache"] is not None:
        more.append(Way("the cache", functools.partial(from_cache, loader)))
    return loader.replace(**plain), more, notes


def _check_arguments(steps: Any, seconds: Any, executors: Any, hosts: Any) -> None:
    if steps is not None:
        require_int("verify", "steps", steps, least=1)
    require_positive("verify", "seconds", seconds, finite=False)
    given = [] if executors is None else listed(executors)
    if given is None or not all(isinstance(executor, InGraph | Threads | Processes) for executor in given):
        raise TypeError(
            "verify needs executors to be a list of Threads(4), Processes(4) and the like. "
            f"Got {describe_value(executors)}."
        )
    counts = listed(hosts)
    if counts is None:
        raise TypeError(f"verify needs hosts to be a list of numbers. Got {describe_value(hosts)}.")
    for count in counts:
        require_int("verify", "every number of hosts", count, least=1)
