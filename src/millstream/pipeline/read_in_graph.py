"""Reading on the host from inside a compiled program."""

import threading
import weakref
from typing import Any

import jax
import numpy as np

from millstream.pipeline.host_calls import remembering
from millstream.plan.keys import Array
from millstream.plan.plan import Plan
from millstream.reading.host_side import HostSide
from millstream.reading.read_ahead import ReadAhead, still_open
from millstream.reading.samples import ObjectSpec
from millstream.reading.stats import LoaderStats


def read_in_graph(host: HostSide, plan: Plan, words: Array, step: Array) -> tuple[list[Any], Any]:
    """The leaves of the samples of a step, fetched by a callback that finds them read ahead, and which could be read.

    The rows are a function of key and step alone, so the callback is pure: it may be repeated, dropped and `vmap`ped.
    """
    spec = host.source.sample_spec
    if isinstance(spec, ObjectSpec):
        spec.require_host("This")
    if jax.process_count() > 1 and host.rows is not None:
        raise TypeError(
            "A compiled program over several processes cannot read samples on the host. Use iterate, or next_batch "
            "outside of jax.jit; there each process reads its own rows."
        )
    layout = host.layout(plan)
    leaves = zip(spec.shapes, spec.dtypes, strict=True)
    result = [jax.ShapeDtypeStruct((*layout.axes, *shape), dtype) for shape, dtype in leaves]
    if host.tolerant:
        result.append(jax.ShapeDtypeStruct(layout.axes, np.dtype(bool)))
    fetched = jax.pure_callback(_fetcher(host, plan).fetch, result, words, step, vmap_method="sequential")
    return (fetched[:-1], fetched[-1]) if host.tolerant else (fetched, None)


# The programs that use one hold on to it. Nobody else does, so that a loader that is forgotten takes its data along.
_fetchers: "weakref.WeakValueDictionary[tuple[HostSide, Plan], _Fetcher]" = weakref.WeakValueDictionary()


def _fetcher(host: HostSide, plan: Plan) -> "_Fetcher":
    """One read-ahead per host side and plan, whatever programs use it."""
    found = _fetchers.get((host, plan))
    if found is None:
        found = _fetchers[host, plan] = _Fetcher(host, plan)
    return found


def end_reading_in_graph(host: HostSide, plan: Plan) -> None:
    """End the workers that programs have begun to read with; a program that runs again begins anew."""
    found = _fetchers.get((host, plan))
    if found is not None:
        found.close()


class _Fetcher:
    def __init__(self, host: HostSide, plan: Plan) -> None:
        self._host = host
        self._plan = plan
        self._ahead: ReadAhead | None = None
        self._lock = threading.Lock()  # programs may run in several threads, and one set of readers is enough
        self.fetch = remembering(self._fetch)

    def _fetch(self, words: Any, step: Any) -> list[np.ndarray]:
        with self._lock:
            self._ahead = still_open(self._ahead)
            if self._ahead is None:
                self._ahead = self._host.open(self._plan, LoaderStats())
            ahead = self._ahead
        filled = ahead.rows(np.asarray(words), int(step))
        return [*filled.rows, self._host.intact(self._plan, filled)] if self._host.tolerant else filled.rows

    def close(self) -> None:
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
