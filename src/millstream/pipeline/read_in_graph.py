"""Reading on the host from inside a compiled program."""

import functools
import weakref
from typing import Any, NamedTuple

import jax
import numpy as np

from millstream.pipeline.host_calls import remembering
from millstream.plan.keys import Array
from millstream.plan.planned import Coordinates, PlannedSteps
from millstream.reading.read_config import ReadConfig
from millstream.reading.reader import RUNS_KEPT, Reader, reader_of
from millstream.reading.samples import ObjectSpec


class Fetched(NamedTuple):
    """What a callback found of a step.

    Attributes:
        numbers: The step's coordinates; None if there are none.
        rows: The leaves of its samples.
        intact: Which of these samples could be read; None if all could.
    """

    numbers: Any
    rows: list[Any]
    intact: Any


def read_in_graph(host: ReadConfig, coordinates: Coordinates, words: Array, step: Array) -> Fetched:
    """The samples of a step, fetched by a callback that finds them read ahead.

    They are a function of key and step alone, so the callback is pure: it may be repeated, dropped and `vmap`ped. The
    step is planned by the callback, too, which has 64-bit numbers and takes the order out of the program.
    """
    spec = host.source.sample_spec
    if isinstance(spec, ObjectSpec):
        spec.require_host("What fuse=, scan_epoch or jax.jit runs")
    if jax.process_count() > 1 and host.rows is not None:
        raise TypeError(
            "A compiled program over several processes cannot read samples on the host. Use iterate, or next_batch "
            "outside jax.jit; there each process reads its own rows."
        )
    axes = host.layout(coordinates.plan).axes
    leaves = zip(spec.shapes, spec.dtypes, strict=True)
    result = Fetched(
        jax.ShapeDtypeStruct((coordinates.size,), np.uint32) if coordinates.size else None,
        [jax.ShapeDtypeStruct((*axes, *shape), dtype) for shape, dtype in leaves],
        jax.ShapeDtypeStruct(axes, np.dtype(bool)) if host.tolerant else None,
    )
    return jax.pure_callback(_fetcher(host, coordinates).fetch, result, words, step, vmap_method="sequential")


# The programs that use one hold on to it, and nobody else does.
_fetchers: "weakref.WeakValueDictionary[tuple[ReadConfig, Coordinates], _Fetcher]" = weakref.WeakValueDictionary()


def _fetcher(host: ReadConfig, coordinates: Coordinates) -> "_Fetcher":
    """One callback per pipeline, so that programs that are traced again are the same."""
    found = _fetchers.get((host, coordinates))
    if found is None:
        found = _fetchers[host, coordinates] = _Fetcher(reader_of(host, coordinates.plan), coordinates)
    return found


class _Fetcher:
    def __init__(self, reader: Reader, coordinates: Coordinates) -> None:
        self._reader = reader
        self.fetch = remembering(self._fetch)
        self._planned = functools.lru_cache(RUNS_KEPT)(functools.partial(_planned, coordinates))

    def _fetch(self, words: Any, step: Any) -> Fetched:
        words, step, reader = np.asarray(words), int(step), self._reader
        filled, intact = reader.rows(words, step), None
        if reader.host.tolerant:
            intact = reader.host.intact(filled, reader.host.layout(reader.plan).axes)
        return Fetched(self._planned(words.tobytes()).numbers(step), filled.rows, intact)


def _planned(coordinates: Coordinates, run: bytes) -> PlannedSteps:
    return PlannedSteps(coordinates.plan, np.frombuffer(run, np.uint32), coordinates=(coordinates,))
