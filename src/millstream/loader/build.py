"""From a list of stages to one source, refusing what cannot work while it can still be named."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from millstream.pipeline.compose import IndexedPipeline, SeekablePipeline, StagedPipeline
from millstream.pipeline.iterable import IterablePipeline
from millstream.pipeline.phased import PhasedPipeline
from millstream.pipeline.pipeline import as_stream
from millstream.pipeline.placement import BatchShardings
from millstream.pipeline.streams import stages_of
from millstream.pipeline.transform import Transform
from millstream.reading.cached_backend import CacheOf
from millstream.reading.caches import BatchCache
from millstream.reading.contracts import IndexedSource, Stream
from millstream.reading.iterable import IterableSource
from millstream.reading.reading import OnError
from millstream.sharding import check_batch_size
from millstream.text.errors import describe_value, function_name, noted


def build(pipeline: Any) -> Stream:
    """The composed source of a pipeline given as a list of stages or composed already."""
    if not isinstance(pipeline, list | tuple):
        return as_stream(pipeline)
    if not pipeline:
        raise ValueError("DataLoader needs a source and any number of stages. Got an empty list.")
    first, *rest = pipeline
    if rest and all(isinstance(sample, Mapping) for sample in pipeline):
        raise TypeError(
            f"DataLoader needs a source and any number of stages. Got a list of {len(pipeline):,} dicts. If these are "
            "the samples, wrap them: DataLoader([ms.DatasetSource(samples), ms.BatchTransform(32)])."
        )
    source = as_stream(first)
    for number, stage in enumerate(rest, 2):
        source = _attach(source, stage, number)
    return source


def stages(source: Any) -> tuple[Transform, ...]:
    """The transforms of a composed source that lie above its last custom stage."""
    return source.stages if isinstance(source, StagedPipeline) else stages_of(source)


def read_on_host(
    source: Any, executor: Any, prefetch: int, on_error: OnError, cache: BatchCache | None
) -> SeekablePipeline:
    """The source with its samples read on the host; refuses streams."""
    if isinstance(source, IterablePipeline):
        raise TypeError(
            "DataLoader can give an executor, on_error and cache only to samples that have an index. An IterableSource "
            "is drawn by a thread of its own, and HostMapTransform(fn, readers=4) says how many threads call fn. Leave "
            "them out."
        )
    if not isinstance(source, SeekablePipeline):
        raise TypeError(
            f"DataLoader can give an executor, on_error and cache only to samples that are read; "
            f"{type(source).__name__} is a stream, which is computed step by step. Leave them out."
        )
    kept = None if cache is None else CacheOf(cache.folder, cache.mode, source.origin)
    return source.read_by(executor=executor, prefetch=prefetch, on_error=on_error, cache=kept)


def check_first_sample(source: Any) -> None:
    """Read the samples again that could not be read when the spec was found, unless such samples are skipped."""
    if isinstance(source, PhasedPipeline):
        for phase in source.phases:
            check_first_sample(phase)
        return
    host = source.host if isinstance(source, IndexedPipeline) else None
    if host is None or host.tolerant or host.source.first_sample == 0 or source.plan.buckets[0].view is not None:
        return  # a view may have been made to leave such samples out
    rows = host.layout(source.plan).rows if host.source.whole_batches else 1
    host.source.read_keyed(np.zeros(rows, np.int64), np.zeros((rows, 2), np.uint32) if host.source.keyed else None)


def sharded(source: Any, shardings: BatchShardings, placements: list[Any]) -> StagedPipeline:
    """The source with its batches over a mesh; refuses what cannot lie there."""
    caller, sharding = "DataLoader with a sharding", shardings.rows
    if not isinstance(source, StagedPipeline) or not source.plan.buckets[0].batchings:
        raise TypeError(
            f"{caller} needs an indexed source and a BatchTransform after it: it is the batches that are sharded."
        )
    if isinstance(source, IterablePipeline) and not sharding.is_fully_addressable:
        raise TypeError(
            f"{caller} over several processes needs an indexed source: each process reads only its rows, and an "
            "IterableSource has to be drawn whole. Without a sharding, give every process an iterable of its own part "
            "of the data, by jax.process_index(), and join their batches with ms.sharding.distribute_global_batch."
        )
    if source.objects is not None:
        raise TypeError(f"{caller} makes arrays, and these samples are Python objects ({source.objects.found}).")
    if any(placement is not None for placement in placements):
        raise ValueError(f"{caller} says already where batches go. Leave out the device of the DevicePutTransform.")
    for bucket in source.plan.buckets:
        check_batch_size("DataLoader", bucket.batchings[-1].size, sharding)
    if isinstance(source, SeekablePipeline) and source.host is not None and not sharding.is_fully_addressable:
        if not source.host.ordered:
            raise ValueError(
                f"{caller} over several processes needs an executor with ordered=True: all take the same batch."
            )
        if source.host.on_error == "skip batch":
            raise ValueError(f'{caller} over several processes cannot skip batches. Use on_error="skip item".')
    return source.over(shardings)


def _attach(source: Stream, stage: Any, number: int) -> Stream:
    if isinstance(stage, type):
        raise TypeError(f"DataLoader stage {number} is the class {stage.__name__}. Write {stage.__name__}(...).")
    if isinstance(stage, Stream | IndexedSource | IterableSource):
        raise TypeError(f"DataLoader stage {number} is a source ({type(stage).__name__}). Only the first stage is one.")
    if not callable(stage):
        raise TypeError(
            f"DataLoader stage {number} is not a transform. Got {describe_value(stage)}. "
            "A stage is a transform such as BatchTransform(128), or any function from source to source."
        )
    try:
        composed = stage(source)
    except Exception as error:
        if not inspect.isfunction(stage):
            raise
        raise noted(  # noqa: B904
            error,
            f"DataLoader called stage {number}, {function_name(stage)}, with the source, as any function in the list. "
            "To call it with samples or batches, wrap it: ms.MapTransform(lambda value, mask: ...).",
        )
    if not isinstance(composed, Stream):
        raise TypeError(
            f"DataLoader stage {number} must return a source. It returned {describe_value(composed)}. "
            "To apply a function to samples or batches, wrap it: MapTransform(fn)."
        )
    return composed
