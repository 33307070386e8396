"""From a list of stages to one source, refusing what cannot work while it can still be named."""

from typing import Any

from millstream._core.contracts import IndexedSource, Stream
from millstream._core.errors import describe_value
from millstream._core.pipeline import Pipeline, as_stream
from millstream._core.streams import stages_of
from millstream._core.transform import Transform


def build(pipeline: Any) -> Stream:
    """The composed source of a pipeline given as a list of stages or composed already."""
    if not isinstance(pipeline, list | tuple):
        return as_stream(pipeline)
    if not pipeline:
        raise ValueError("DataLoader needs a source and any number of stages. Got an empty list.")
    source = as_stream(pipeline[0])
    for number, stage in enumerate(pipeline[1:], 2):
        source = _attach(source, stage, number)
    return source


def stages(source: Any) -> tuple[Transform, ...]:
    """The transforms of a composed source that lie above its last custom stage."""
    return source.stages if isinstance(source, Pipeline) else stages_of(source)


def _attach(source: Stream, stage: Any, number: int) -> Stream:
    if isinstance(stage, type):
        raise TypeError(f"DataLoader stage {number} is the class {stage.__name__}. Write {stage.__name__}(...).")
    if isinstance(stage, Stream | IndexedSource):
        raise TypeError(f"DataLoader stage {number} is a source ({type(stage).__name__}). Only the first stage is one.")
    if not callable(stage):
        raise TypeError(
            f"DataLoader stage {number} is no transform. Got {describe_value(stage)}. "
            "A stage is a transform such as BatchTransform(128), or any function from source to source."
        )
    composed = stage(source)
    if not isinstance(composed, Stream):
        raise TypeError(
            f"DataLoader stage {number} must return a source. It returned {describe_value(composed)}. "
            "To apply a function to samples or batches, wrap it: MapTransform(fn)."
        )
    return composed
