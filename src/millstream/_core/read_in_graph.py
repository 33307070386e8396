"""Reading on the host from inside a compiled program."""

import functools
from typing import Any

import jax
import numpy as np

from millstream._core.callbacks import remembering
from millstream._core.host_source import HostSource
from millstream._core.keys import Array
from millstream._core.plan import Plan
from millstream._core.read_ahead import ReadAhead
from millstream._core.samples import ObjectSpec


def read_in_graph(source: HostSource, plan: Plan, words: Array, step: Array) -> list[Any]:
    """The leaves of the samples of a step, fetched by a callback that finds them read ahead.

    The rows are a function of key and step alone, so the callback is pure: it may be repeated, dropped and `vmap`ped.
    """
    spec = source.sample_spec
    if isinstance(spec, ObjectSpec):
        spec.require_host("This")
    axes = tuple(batching.size for batching in reversed(plan.batchings))
    leaves = zip(spec.shapes, spec.dtypes, strict=True)
    result = [jax.ShapeDtypeStruct((*axes, *shape), dtype) for shape, dtype in leaves]
    return jax.pure_callback(_fetcher(source, plan), result, words, step, vmap_method="sequential")


@functools.lru_cache(maxsize=64)
def _fetcher(source: HostSource, plan: Plan) -> Any:
    """One read-ahead per source and plan, whatever programs use it."""
    ahead = ReadAhead(source, plan)

    @remembering
    def fetch(words: Any, step: Any) -> list[np.ndarray]:
        return ahead.rows(np.asarray(words), int(step))

    return fetch
