"""Reading on the host from inside a compiled program."""

import functools
from typing import Any

import jax
import numpy as np

from millstream._core.callbacks import remembering
from millstream._core.host_side import HostSide
from millstream._core.keys import Array
from millstream._core.plan import Plan
from millstream._core.read_ahead import ReadAhead
from millstream._core.samples import ObjectSpec
from millstream._core.stats import LoaderStats


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


@functools.lru_cache(maxsize=64)
def _fetcher(host: HostSide, plan: Plan) -> "_Fetcher":
    """One read-ahead per host side and plan, whatever programs use it."""
    return _Fetcher(host, plan)


def end_reading_in_graph(host: HostSide, plan: Plan) -> None:
    """End the workers that programs have begun to read with; a program that runs again begins anew."""
    _fetcher(host, plan).close()


class _Fetcher:
    def __init__(self, host: HostSide, plan: Plan) -> None:
        self._host = host
        self._plan = plan
        self._ahead: ReadAhead | None = None
        self.fetch = remembering(self._fetch)

    def _fetch(self, words: Any, step: Any) -> list[np.ndarray]:
        if self._ahead is None:
            self._ahead = self._host.open(self._plan, LoaderStats())
        filled = self._ahead.rows(np.asarray(words), int(step))
        return [*filled.rows, self._host.intact(self._plan, filled)] if self._host.tolerant else filled.rows

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
