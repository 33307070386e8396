"""Putting a stage after a source, whatever kind of source it is."""

from typing import TYPE_CHECKING, Any, overload

import jax

from millstream.pipeline.bucketed import BucketedPipeline
from millstream.pipeline.iterable import IterablePipeline
from millstream.pipeline.phased import PhasedPipeline
from millstream.pipeline.pipeline import Pipeline, as_stream
from millstream.pipeline.stages import is_all_true
from millstream.pipeline.streams import BatchedStream, MappedStream
from millstream.reading.contracts import IndexedSource, Stream
from millstream.reading.iterable import IterableSource

if TYPE_CHECKING:
    from millstream.pipeline.transform import Transform

# What has the same stages throughout a run; what draws any batch alone, by a key and a step; what reads samples one
# after the other through functions on the host; and all of these.
IndexedPipeline = Pipeline | BucketedPipeline
SeekablePipeline = Pipeline | BucketedPipeline | PhasedPipeline
HostPipeline = Pipeline | BucketedPipeline | IterablePipeline
StagedPipeline = Pipeline | BucketedPipeline | PhasedPipeline | IterablePipeline


@overload
def compose(source: IndexedSource | Pipeline, transform: "Transform") -> Pipeline: ...
@overload
def compose(source: Stream | IterableSource, transform: "Transform") -> Stream: ...
def compose(source: IndexedSource | Stream | IterableSource, transform: "Transform") -> Stream:
    """A source seen through one more stage."""
    source = as_stream(source)
    if isinstance(source, StagedPipeline):
        return source.then(transform)
    return BatchedStream(source, transform) if transform.batches else MappedStream(source, transform)


def masking_stages(source: Any) -> tuple[str, ...]:
    """The names of the stages that set the mask: only a batch itself says then how many of its rows count."""
    if isinstance(source, SeekablePipeline):
        return source.trace()[1]
    if isinstance(source, IterablePipeline):
        return source.body.trace()[1]
    state = jax.eval_shape(source.init_state, jax.random.key(0))
    traced = jax.make_jaxpr(lambda state: source.next(state)[1])(state)
    all_real = is_all_true(traced.jaxpr, traced.consts, traced.jaxpr.outvars[0])
    return () if all_real else (type(source).__name__,)
