"""A pipeline or stream in one line: its source and its stages."""

from collections.abc import Iterator
from typing import Any

from millstream.pipeline.compose import IndexedPipeline, StagedPipeline
from millstream.pipeline.iterable import IterablePipeline
from millstream.pipeline.phased import PhasedPipeline
from millstream.pipeline.streams import stages_of
from millstream.reading.derived_sources import CollatedSource, named_parts
from millstream.reading.host_source import HostSource
from millstream.reading.view import source_name
from millstream.text.summaries import never_raising

_STAGE = 40  # characters; of a longer stage only the name is shown


@never_raising
def pipeline_text(pipeline: Any) -> str:
    """A pipeline or stream as its `__repr__`: its kind, and its stages."""
    return f"{type(pipeline).__name__}({path_text(pipeline)})"


def path_text(pipeline: Any) -> str:
    """The stages of a pipeline or stream, such as `ArraySampleSource(10 samples) -> BatchTransform(4)`."""
    if not isinstance(pipeline, PhasedPipeline):
        return " -> ".join(_stage_texts(pipeline))
    before = list(_stage_texts(pipeline.phases[0]))
    texts = [" -> ".join(before)]
    for phase, start in zip(pipeline.phases[1:], pipeline.starts[1:], strict=True):
        now = list(_stage_texts(phase))
        same = next((at for at, pair in enumerate(zip(before, now, strict=False)) if pair[0] != pair[1]), len(now))
        texts.append(f"from step {start:,} {' -> '.join(now[min(same, len(now) - 1) :])}")
        before = now
    return ", ".join(texts)


def _stage_texts(pipeline: Any) -> Iterator[str]:
    if isinstance(pipeline, IndexedPipeline):
        yield from _source_texts(pipeline)
    elif isinstance(pipeline, IterablePipeline):
        _, *mapped = _host_names(pipeline.source)
        yield from (pipeline.iterable.name, *mapped)
    else:
        stream = pipeline
        for _ in stages_of(pipeline):
            stream = stream.inner
        yield path_text(stream) if isinstance(stream, StagedPipeline) else type(stream).__name__
    for stage in pipeline.stages if isinstance(pipeline, StagedPipeline) else stages_of(pipeline):
        text = repr(stage).removesuffix("()")
        yield text if len(text) <= _STAGE and "\n" not in text else type(stage).__name__


def _source_texts(pipeline: IndexedPipeline) -> Iterator[str]:
    source = pipeline.source
    names = _host_names(source) or ["arrays" if source is None else source_name(source)]
    yield f"{names[0].partition('(')[0]}({pipeline.plan.samples:,} samples)"
    yield from names[1:]


def _host_names(source: Any) -> list[str]:
    """A source that is read on the host and the functions over it, by name."""
    if not isinstance(source, HostSource):
        return []
    return [name for name, part in named_parts(source) if not isinstance(part, CollatedSource)]
