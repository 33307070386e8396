"""The stages of a pipeline, one row each: found by tracing, without a sample being read."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from millstream.loader._explanation.plan import (
    device_words,
    ending_words,
    mesh_words,
    reader_words,
)
from millstream.loader._explanation.stage import ExplainedStage, explained
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.stages import apply_stage, stage_names
from millstream.pipeline.state import is_traced
from millstream.pipeline.streams import BatchedStream, MappedStream, stages_of
from millstream.plan.plan import Plan
from millstream.reading.contracts import PyTree, Stream
from millstream.reading.derived_sources import CollatedSource, is_random, named_parts
from millstream.reading.host_side import HostSide
from millstream.reading.host_source import ArrayRows, HostSource
from millstream.reading.memory import nbytes
from millstream.reading.processes import Processes
from millstream.reading.samples import ObjectSpec
from millstream.reading.slots import slots_for
from millstream.reading.workers.messages import SlotForm
from millstream.sources.file_source import is_mapped
from millstream.text.tables import size_text
from millstream.transforms.buffer import BufferTransform
from millstream.transforms.device import DevicePutTransform

if TYPE_CHECKING:
    from millstream.loader.loader import DataLoader
    from millstream.pipeline.transform import Transform


def explained_stages(loader: "DataLoader") -> list[ExplainedStage]:
    """A row per stage of a loader."""
    source = loader._source
    if not isinstance(source, Pipeline):
        return _of_stream(source, 1)
    rows = _of_pipeline(source, 1)
    ahead = 0 if loader._effects or source.host is not None else loader._prefetch
    if ahead and rows[-1].bytes_per_batch is not None:
        rows[-1] = _holding(rows[-1], ahead * rows[-1].bytes_per_batch, f"{ahead} made ahead")
    return rows


def _of_stream(stream: Any, times: int) -> list[ExplainedStage]:
    """The rows of a stream and of all that lies below it; `times` of its values make a batch."""
    if isinstance(stream, Pipeline):
        return _of_pipeline(stream, times)
    below = getattr(stream, "inner", None)
    size = stream.batching.size if isinstance(stream, BatchedStream) else 1
    rows = _of_stream(below, times * size) if isinstance(below, Stream) else []
    if isinstance(stream, MappedStream | BatchedStream):
        name, notes = stage_names(stages_of(stream))[-1], _notes(stream.transform)
        where = _where("device", stream.transform)
    else:
        name, notes, where = type(stream).__name__, ["a stream, drawn step by step"], "device"
    if isinstance(stream, BatchedStream):
        notes.append(f"last batch: {ending_words(stream.batching)}")
    memory = _state_bytes(stream) - (_state_bytes(below) if isinstance(below, Stream) else 0)
    return [*rows, explained(name, where, stream.element_spec(), times, memory, notes)]


def _state_bytes(stream: Any) -> int:
    return nbytes(jax.eval_shape(stream.init_state, jax.random.key(0)))


def _of_pipeline(pipeline: Pipeline, times: int) -> list[ExplainedStage]:
    per_batch = times * math.prod(pipeline.plan.axes)
    device = "device" if pipeline.placement is None else f"device, over {mesh_words(pipeline.placement)}"
    if pipeline.host is None:
        return [_array_row(pipeline, device, per_batch), *_compiled(pipeline, device, device, per_batch)]
    reader = reader_words(pipeline.host)
    rows = _host_rows(pipeline.host.source, reader, per_batch)
    rows += _compiled(pipeline, reader, device, per_batch)
    last = max(number for number, row in enumerate(rows) if row.where == reader)
    if pipeline.objects is None:
        memory, note = _buffers(pipeline.host, pipeline.plan)
        rows[last] = _holding(rows[last], memory, note)
    return rows


def _array_row(pipeline: Pipeline, device: str, per_batch: int) -> ExplainedStage:
    """The source whose arrays are gathered in the program."""
    leaves = jax.tree.leaves(pipeline.arrays)
    notes = ["gathered in the program"]
    if is_traced(leaves):
        memory = nbytes(leaves)
    else:
        shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
        memory = sum(shard.data.nbytes for shard in shards)
        notes.append(f"arrays on {device_words({shard.device for shard in shards})}")
    name = "arrays" if pipeline.source is None else type(pipeline.source).__name__
    return explained(name, device, pipeline.sample_spec(), per_batch, memory, notes)


def _host_rows(source: HostSource, reader: str, per_batch: int) -> list[ExplainedStage]:
    """A source that is read on the host, and the functions that its samples go through there."""
    rows = []
    for name, part in named_parts(source):
        if isinstance(part, CollatedSource):  # it is a part of its BatchTransform
            continue
        memory, notes = _held(part)
        if is_random(part):
            notes.append("random")
        if isinstance(part.sample_spec, ObjectSpec):
            notes.append(f"Python objects: {part.sample_spec.found}")
        rows.append(explained(name, reader, part.spec(), per_batch, memory, notes))
    return rows


def _held(source: HostSource) -> tuple[int | None, list[str]]:
    """Bytes of the arrays of a source that are in memory, and what there is to say about the others."""
    if not isinstance(source, ArrayRows):
        return None, []
    in_memory = [leaf for leaf in source._leaves if isinstance(leaf, np.ndarray) and not is_mapped(leaf)]
    elsewhere = [leaf for leaf in source._leaves if not any(leaf is other for other in in_memory)]
    if not elsewhere:
        return nbytes(in_memory), []
    mapped = any(map(is_mapped, elsewhere))
    return nbytes(in_memory), [f"{size_text(nbytes(elsewhere))} in files, {'mapped' if mapped else 'read by position'}"]


def _compiled(pipeline: Pipeline, reader: str, device: str, per_batch: int) -> list[ExplainedStage]:
    """The transforms, each traced with what the one before it gives."""
    value, mask = pipeline.sample_spec(), jax.ShapeDtypeStruct((), np.dtype(bool))
    names, batchings = stage_names(pipeline.stages), iter(pipeline.plan.batchings)
    rows, where, open_batches = [], reader, len(pipeline.plan.batchings)
    for name, stage in zip(names, pipeline.stages, strict=True):
        notes = _notes(stage)
        if stage.batches:
            batching = next(batchings)
            value, mask = _stacked(value, batching.size), _stacked(mask, batching.size)
            per_batch, open_batches = per_batch // batching.size, open_batches - 1
            notes.append(f"last batch: {ending_words(batching)}")
        else:
            value, mask = _traced(name, stage, value, mask)
            where = where if stage.passive else device  # from here on it is the compiled program that works
            if open_batches and not stage.passive:
                notes.append("called for each sample" if stage.effects else "vmapped over the rows of a batch")
        rows.append(explained(name, _where(where, stage), value, per_batch, None, notes))
    return rows


def _stacked(tree: PyTree, size: int) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype), tree)


def _traced(name: str, stage: "Transform", value: PyTree, mask: Any) -> tuple[PyTree, Any]:
    def apply(value: PyTree, mask: Any) -> tuple[PyTree, Any]:
        key = jax.random.wrap_key_data(jnp.zeros(2, np.uint32), impl="threefry2x32") if stage.keyed else None
        return apply_stage(name, stage, 0, value, mask, key)

    return jax.eval_shape(apply, value, mask)


def _where(usual: str, stage: "Transform") -> str:
    if isinstance(stage, DevicePutTransform):
        return "on the way out"
    return "host, called by the program" if stage.effects else usual


def _notes(stage: "Transform") -> list[str]:
    if isinstance(stage, DevicePutTransform):
        place = stage.placement
        if place is None:
            return ["to JAX's default device"]
        return [f"to {device_words(place.device_set if isinstance(place, jax.sharding.Sharding) else [place])}"]
    if isinstance(stage, BufferTransform):
        held, given = f"{stage.capacity:,} values, {stage.write_mode}", f"{stage.sample_size:,} {stage.mode}"
        return [f"holds {held}", f"gives {given}"]
    return ["random"] if stage.keyed else []


def _buffers(host: HostSide, plan: Plan) -> tuple[int, str]:
    """The memory that batches are read into."""
    layout, count = host.layout(plan), slots_for(host.ahead(plan))
    layout = SlotForm(layout).layout if isinstance(host.executor, Processes) else layout
    kind = "shared buffers" if isinstance(host.executor, Processes) else "buffers"
    return count * layout.nbytes, f"{count:,} {kind} of {size_text(layout.nbytes)}"


def _holding(row: ExplainedStage, memory: int, note: str) -> ExplainedStage:
    """A row that holds more memory, and says for what."""
    memory += 0 if row.memory_bytes is None else row.memory_bytes
    return dataclasses.replace(row, memory_bytes=memory, note="; ".join(filter(None, [row.note, note])))
