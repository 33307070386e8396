"""A loader in one or two lines: its stages, what a batch is, and how many make an epoch."""

from collections.abc import Iterator
from typing import Any

from millstream.loader.build import stages
from millstream.pipeline.compose import IndexedPipeline
from millstream.pipeline.iterable import IterablePipeline
from millstream.pipeline.phased import PhasedPipeline
from millstream.pipeline.streams import stages_of
from millstream.reading.derived_sources import CollatedSource, named_parts
from millstream.reading.host_source import HostSource
from millstream.reading.view import source_name
from millstream.text.summaries import never_raising, value_text

_LINE = 110  # characters; what is longer is written in two lines
_STAGE = 40


@never_raising
def loader_text(loader: Any) -> str:
    """A loader, such as `DataLoader(ArraySampleSource(10 samples) -> BatchTransform(4), batch {x: f32[4]}, ...)`."""
    path = _path(loader.pipeline)
    specs = loader.element_specs()
    facts = ["Python objects" if specs[0] is None else f"batch {' or '.join(map(value_text, specs))}"]
    length = loader.steps_per_epoch
    known = length is not None
    facts.append(f"{length:,} step{'' if length == 1 else 's'} per epoch" if known else "epochs of unknown length")
    facts += [
        f"{name}={value_text(loader.options[name])}" for name in ("executor", "cache") if loader.options.get(name)
    ]
    facts += ["sharded"] if loader.options.get("sharding") is not None else []
    one = f"{type(loader).__name__}({path}, {', '.join(facts)})"
    return one if len(one) <= _LINE else f"{type(loader).__name__}({path},\n  {', '.join(facts)})"


def _path(pipeline: Any) -> str:
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
        yield type(stream).__name__
    for stage in stages(pipeline):
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
