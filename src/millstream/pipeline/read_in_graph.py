"""Reading on the host from inside a compiled program."""

import weakref
from typing import Any

import jax
import numpy as np

from millstream.pipeline.host_calls import remembering
from millstream.plan.keys import Array
from millstream.plan.plan import Plan
from millstream.reading.read_config import ReadConfig
from millstream.reading.reader import Reader, reader_of
from millstream.reading.samples import ObjectSpec


def read_in_graph(host: ReadConfig, plan: Plan, words: Array, step: Array) -> tuple[list[Any], Any]:
    """The leaves of the samples of a step, fetched by a callback that finds them read ahead, and which could be read.

    The rows are a function of key and step alone, so the callback is pure: it may be repeated, dropped and `vmap`ped.
    """
    spec = host.source.sample_spec
    if isinstance(spec, ObjectSpec):
        spec.require_host("What fuse=, scan_epoch or jax.jit runs")
    if jax.process_count() > 1 and host.rows is not None:
        raise TypeError(
            "A compiled program over several processes cannot read samples on the host. Use iterate, or next_batch "
            "outside jax.jit; there each process reads its own rows."
        )
    layout = host.layout(plan)
    leaves = zip(spec.shapes, spec.dtypes, strict=True)
    result = [jax.ShapeDtypeStruct((*layout.axes, *shape), dtype) for shape, dtype in leaves]
    if host.tolerant:
        result.append(jax.ShapeDtypeStruct(layout.axes, np.dtype(bool)))
    fetched = jax.pure_callback(_fetcher(host, plan).fetch, result, words, step, vmap_method="sequential")
    return (fetched[:-1], fetched[-1]) if host.tolerant else (fetched, None)


# The programs that use one hold on to it, and nobody else does.
_fetchers: "weakref.WeakValueDictionary[tuple[ReadConfig, Plan], _Fetcher]" = weakref.WeakValueDictionary()


def _fetcher(host: ReadConfig, plan: Plan) -> "_Fetcher":
    """One callback per pipeline, so that programs that are traced again are the same."""
    found = _fetchers.get((host, plan))
    if found is None:
        found = _fetchers[host, plan] = _Fetcher(reader_of(host, plan))
    return found


class _Fetcher:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.fetch = remembering(self._fetch)

    def _fetch(self, words: Any, step: Any) -> list[np.ndarray]:
        reader = self._reader
        filled = reader.rows(np.asarray(words), int(step))
        if not reader.host.tolerant:
            return filled.rows
        return [*filled.rows, reader.host.intact(filled, reader.host.layout(reader.plan).axes)]
