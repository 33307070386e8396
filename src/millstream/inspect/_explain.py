"""A pipeline as a drawing and as a table: its stages, where they run, what leaves them, and the plan in words."""

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millstream.inspect._drawing import Drawing, can_show
from millstream.inspect._flow import LETTERS, flow_svg, flow_text, leaf_lines
from millstream.inspect._plan_words import (
    count_made_ahead,
    device_words,
    ending_words,
    mesh_words,
    place_words,
    plan_in_words,
    reader_words,
    source_shares,
    state_bytes,
)
from millstream.loader.loader import DataLoader
from millstream.pipeline.compose import IndexedPipeline, StagedPipeline
from millstream.pipeline.iterable import IterablePipeline
from millstream.pipeline.phased import PhasedPipeline
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.stages import apply_stage, stage_names
from millstream.pipeline.state import is_traced
from millstream.pipeline.streams import BatchedStream, MappedStream, stages_of
from millstream.pipeline.transform import Transform
from millstream.plan.planned import AnyPlan
from millstream.reading.contracts import PyTree, Stream
from millstream.reading.derived_sources import CollatedSource, is_random, named_parts
from millstream.reading.host_source import ArrayRows, HostSource
from millstream.reading.memory import nbytes
from millstream.reading.processes import Processes
from millstream.reading.read_config import ReadConfig
from millstream.reading.samples import ObjectSpec
from millstream.reading.slots import slots_for
from millstream.reading.threads import Threads
from millstream.reading.view import source_name
from millstream.reading.workers.messages import SlotLayout
from millstream.sources.file_source import OpenedRows, is_mapped
from millstream.text.errors import describe_value, require_bool, whole_number
from millstream.text.html import html_names, html_table
from millstream.text.svg import Svg
from millstream.text.tables import line_width, name_table, size_text, text_table
from millstream.transforms.buffer import BufferTransform
from millstream.transforms.device import DevicePutTransform

_HEADER = ("stage", "where", "shape and dtype", "per batch", "memory", "note")
_NUMBERS = ("per batch", "memory")
_COLUMNS, _LEAST_COLUMNS, _MOST_COLUMNS = 80, 40, 10_000  # of a drawing


@dataclasses.dataclass(frozen=True)
class ExplainedStage:
    """One stage of a pipeline, and what comes out of it.

    Example:
        >>> stage = loader.explain().rows[-1]
        >>> stage.stage, stage.where, stage.shapes, stage.bytes_per_batch
        ('BatchTransform', 'device', {'x': (4,)}, 16)

    Attributes:
        stage: Its name.
        where: Where it runs: on the device, in threads, in worker processes.
        shapes: The shape of each array that comes out of it, by its path, which is "" if there is only one array.
            Before the batch, those of a sample. Empty for Python objects.
        dtypes: Their dtypes, likewise.
        bytes_per_batch: Bytes that leave it for one batch; None for Python objects.
        memory_bytes: Memory that it holds in this process while the loader is in use; None if that is not known.
        note: Anything else worth knowing.
    """

    stage: str
    where: str
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    bytes_per_batch: int | None
    memory_bytes: int | None = None
    note: str = ""


class Explanation(Drawing):
    """The stages of a pipeline and its plan: printed, and in notebooks, a drawing. See `explain`.

    Example:
        >>> explanation = loader.explain()
        >>> [row.stage for row in explanation.rows], explanation.plan["epoch"]
        (['ArraySampleSource', 'BatchTransform'], '3 batches of 4')
        >>> explanation.save("pipeline.svg")

    Attributes:
        rows: One `ExplainedStage` per stage, in the order of the pipeline.
        plan: What an epoch is, how samples are read and where batches go, as texts by name.
        sources: The share of each source, if it is a mixture, by name.
        parts: The explanations that it was joined of, by name.
        whole: The plan without those of the parts.
    """

    def __init__(
        self,
        rows: list[ExplainedStage],
        plan: dict[str, str],
        sources: Mapping[str, str] | None = None,
        parts: "Mapping[str, Explanation] | None" = None,
    ) -> None:
        self.rows = rows
        self.plan = plan
        self.sources = dict(sources or {})
        self.parts = dict(parts or {})
        below = {f"{name}: {what}" for name, part in self.parts.items() for what in part.plan}
        self.whole = {what: text for what, text in plan.items() if what not in below}

    @classmethod
    def joined(cls, parts: Mapping[str, "Explanation"], plan: dict[str, str]) -> "Explanation":
        """Several explanations as one: each part under its name, and the plan of the whole before those of the parts.

        Args:
            parts: The explanations, by name.
            plan: The plan of the whole.
        """
        named = ((name, row) for name, part in parts.items() for row in part.rows)
        rows = [dataclasses.replace(row, stage=f"{name}: {row.stage}") for name, row in named]
        plans = {f"{name}: {what}": text for name, part in parts.items() for what, text in part.plan.items()}
        return cls(rows, plan | plans, parts=parts)

    def as_dict(self) -> dict[str, PyTree]:
        """The same as values that JSON has: `{"stages": [{"stage": ..., ...}], "plan": {...}}`."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        for row in rows:
            row["shapes"] = {path: list(shape) for path, shape in row["shapes"].items()}
        return {"stages": rows, "plan": dict(self.plan)}

    def table(self, width: int | None = None) -> str:
        """The same as a table.

        Example:
            >>> print(loader.explain().table().splitlines()[0])
            stage              where   shape and dtype  per batch  memory  note

        Args:
            width: The most characters of a line; by default as many as the terminal has, up to 120.
        """
        width = max(line_width(), _LEAST_COLUMNS) if width is None else width
        whole_number("table", "width", width, least=_LEAST_COLUMNS, most=_MOST_COLUMNS)
        table = text_table(_HEADER, map(_cells, self.rows), numbers=_NUMBERS, prose=("where", "note"), width=width)
        return f"{table}\n\n{name_table(self.plan.items(), width=width)}"

    def to_text(self, width: int | None = None, *, ascii_only: bool = False) -> str:
        """The drawing as text.

        Example:
            >>> print(loader.explain().to_text(width=44).splitlines()[0])
            ┌──── plan ────────────────────────────────┐

        Args:
            width: The most characters of a line; by default 80, or as many as a terminal has that has fewer.
            ascii_only: Draw boxes with "+", "-" and "|".
        """
        if width is None:
            width = max(_LEAST_COLUMNS, min(_COLUMNS, shutil.get_terminal_size((_COLUMNS, 24)).columns))
        width = whole_number("to_text", "width", width, least=_LEAST_COLUMNS, most=_MOST_COLUMNS)
        require_bool("to_text", "ascii_only", ascii_only)
        return flow_text(self, width, ascii_only=ascii_only)

    def __repr__(self) -> str:
        return self.to_text(ascii_only=not can_show(LETTERS))

    def _draw(self) -> Svg:
        return flow_svg(self)

    def _tables(self) -> str:
        return html_table(_HEADER, map(_cells, self.rows), numbers=_NUMBERS) + html_names(self.plan.items())


def explain(loader: DataLoader[PyTree, PyTree]) -> Explanation:
    """The pipeline as a drawing: its stages, where they run, what leaves them, the memory they hold, and the plan.

    Nothing is read and nothing is compiled; stages are traced.

    Example:
        >>> ms.inspect.explain(loader).plan["last batch"]
        '2 of 4 rows real, the others padding'

    Args:
        loader: The loader, which stays as it is.
    """
    require_loader("explain", loader)
    pipeline = loader.pipeline
    if isinstance(pipeline, PhasedPipeline):
        parts = {f"from step {start:,}": explain(phase) for start, phase in loader.phases.items()}
        whole = {"epoch": f"{loader.steps_per_epoch:,} batches at first", "state": "a key and a step"}
        return Explanation.joined(parts, whole)
    placement = pipeline.placement if isinstance(pipeline, StagedPipeline) else None
    with contextlib.nullcontext() if placement is None else jax.set_mesh(placement.mesh):
        return Explanation(_rows(loader), plan_in_words(loader), source_shares(pipeline))


def require_loader(caller: str, loader: Any, *, built: bool = False) -> None:
    """Refuse anything but a `DataLoader`; and, if it has to be built again, one whose options are not known."""
    if not isinstance(loader, DataLoader):
        raise TypeError(f"{caller} needs loader to be a DataLoader. Got {describe_value(loader)}.")
    if built and "executor" not in loader.options:
        raise TypeError(f"{caller} needs a loader that was built, not one that came out of jax.jit or jax.tree.map.")


def calculating(stages: Iterable[Transform]) -> int:
    """How many stages change values in a compiled program."""
    return sum(not (stage.batches or stage.passive) for stage in stages)


def _cells(row: ExplainedStage) -> tuple[str, ...]:
    sizes = ("" if size is None else size_text(size) for size in (row.bytes_per_batch, row.memory_bytes))
    return (row.stage, row.where, "\n".join(leaf_lines(row)), *sizes, row.note)


def _row(
    stage: str, where: str, value: PyTree, times: int, memory: int | None = None, notes: list[str] | None = None
) -> ExplainedStage:
    """A stage that gives such values, of which `times` make a batch."""
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
    }
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    dtypes = {path: str(leaf.dtype) for path, leaf in leaves.items()}
    size = None if value is None else times * nbytes(value)
    return ExplainedStage(stage, where, shapes, dtypes, size, memory, "; ".join(notes or []))


def _rows(loader: DataLoader) -> list[ExplainedStage]:
    rows, ahead = _stream_rows(loader.pipeline, 1), count_made_ahead(loader)
    if ahead and rows[-1].bytes_per_batch is not None:
        rows[-1] = _holding(rows[-1], ahead * rows[-1].bytes_per_batch, f"{ahead} made ahead")
    return rows


def _holding(row: ExplainedStage, memory: int, note: str) -> ExplainedStage:
    """A row that holds more memory, and why."""
    memory += row.memory_bytes or 0
    return dataclasses.replace(row, memory_bytes=memory, note="; ".join(filter(None, [row.note, note])))


def _stream_rows(stream: Any, times: int) -> list[ExplainedStage]:
    """The rows of a stream and of what it is made from; `times` of its values make a batch."""
    if isinstance(stream, IndexedPipeline):
        return _pipeline_rows(stream, times)
    if isinstance(stream, IterablePipeline):
        return _iterable_rows(stream, times)
    inner = getattr(stream, "inner", None)
    size = stream.batching.size if isinstance(stream, BatchedStream) else 1
    rows = _stream_rows(inner, times * size) if isinstance(inner, Stream) else []
    if isinstance(stream, MappedStream | BatchedStream):
        name, notes = stage_names(stages_of(stream))[-1], _notes(stream.transform)
        where = _where("device", stream.transform)
    else:
        name, notes, where = type(stream).__name__, ["a stream, drawn step by step"], "device"
    if isinstance(stream, BatchedStream):
        notes.append(f"last batch: {ending_words(stream.batching)}")
    memory = state_bytes(stream) - (state_bytes(inner) if isinstance(inner, Stream) else 0)
    return [*rows, _row(name, where, stream.element_spec(), times, memory, notes)]


def _pipeline_rows(whole: IndexedPipeline, times: int) -> list[ExplainedStage]:
    pipeline = whole.buckets[-1]  # of several shapes, the longest
    per_batch = times * math.prod(pipeline.plan.axes)
    device = "device" if pipeline.placement is None else f"device, over {mesh_words(pipeline.placement)}"
    if pipeline.host is None:
        return [_array_row(pipeline, device, per_batch), *_compiled_rows(pipeline, device, device, per_batch)]
    reader = reader_words(pipeline.host)
    rows = _host_rows(pipeline.host.source, reader, per_batch)
    rows += _compiled_rows(pipeline, reader, device, per_batch)
    if pipeline.objects is None:
        last = max(number for number, row in enumerate(rows) if row.where == reader)
        rows[last] = _holding(rows[last], *_buffers(whole.host, whole.plan))
    return rows


def _iterable_rows(pipeline: IterablePipeline, times: int) -> list[ExplainedStage]:
    body, source = pipeline.body, pipeline.iterable
    assert body.host is not None
    per_batch, reader = times * math.prod(body.plan.axes), reader_words(body.host)
    device = "device" if body.placement is None else f"device, over {mesh_words(body.placement)}"
    first, *rest = _host_rows(body.host.source, reader, per_batch)
    notes = [first.note, "drawn in order", f"shuffle buffer of {source.shuffle_buffer:,}" if source.slots > 1 else ""]
    sample = source.items.spec()
    held = None if sample is None else source.slots * nbytes(sample)
    drawn = dataclasses.replace(first, where="1 thread", memory_bytes=held, note="; ".join(filter(None, notes)))
    return [drawn, *rest, *_compiled_rows(body, reader, device, per_batch)]


def _array_row(pipeline: Pipeline, device: str, per_batch: int) -> ExplainedStage:
    """The source whose arrays the program gathers from."""
    leaves, notes = jax.tree.leaves(pipeline.arrays), ["gathered in the program"]
    if is_traced(leaves):
        memory = nbytes(leaves)
    else:
        shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
        memory = sum(shard.data.nbytes for shard in shards)
        notes.append(f"arrays on {device_words({shard.device for shard in shards})}")
    name = "arrays" if pipeline.source is None else source_name(pipeline.source)
    return _row(name, device, pipeline.sample_spec(), per_batch, memory, notes)


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
        rows.append(_row(name, reader, part.spec(), per_batch, memory, notes))
    return rows


def _held(source: HostSource) -> tuple[int | None, list[str]]:
    """Bytes of the arrays of a source that are in memory, and a note on those that are not."""
    rows = getattr(source, "array_rows", None)
    if not isinstance(rows, ArrayRows | OpenedRows):
        return None, []
    leaves = jax.tree.leaves(rows.data)
    outside = [leaf for leaf in leaves if is_mapped(leaf) or not isinstance(leaf, np.ndarray)]
    if not outside:
        return nbytes(leaves), []
    how = "mapped" if any(map(is_mapped, outside)) else "read by position"
    return nbytes(leaves) - nbytes(outside), [f"{size_text(nbytes(outside))} in files, {how}"]


def _buffers(host: ReadConfig | None, plan: AnyPlan) -> tuple[int, str]:
    """The memory that batches are read into, and a note on it."""
    assert host is not None
    layout, count, kind = host.layout(plan), slots_for(host.ahead(plan)), "buffers"
    if isinstance(host.executor, Processes):
        layout, kind = SlotLayout(layout).layout, "shared buffers"
    elif not isinstance(host.executor, Threads | None):
        count, kind = host.ahead(plan) + 1, "batches in flight,"
    return count * layout.nbytes, f"{count:,} {kind} of {size_text(layout.nbytes)}"


def _compiled_rows(pipeline: Pipeline, reader: str, device: str, per_batch: int) -> list[ExplainedStage]:
    """The transforms, each traced with what the one before it gives."""
    value, mask = pipeline.sample_spec(), jax.ShapeDtypeStruct((), np.dtype(bool))
    rows, where, batchings = [], reader, list(pipeline.plan.batchings)
    for name, stage in zip(stage_names(pipeline.stages), pipeline.stages, strict=True):
        notes = _notes(stage)
        if stage.batches:
            batching = batchings.pop(0)
            value, mask = _stacked((value, mask), batching.size)
            per_batch //= batching.size
            notes.append(f"last batch: {ending_words(batching)}")
        else:
            value, mask = _traced(name, stage, value, mask)
            where = where if stage.passive else device  # from here on the compiled program does the work
            if batchings and not stage.passive:
                notes.append("called for each sample" if stage.effects else "vmapped over the rows of a batch")
        rows.append(_row(name, _where(where, stage), value, per_batch, None, notes))
    return rows


def _stacked(tree: PyTree, size: int) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype), tree)


def _traced(name: str, stage: Transform, value: PyTree, mask: Any) -> tuple[PyTree, Any]:
    def apply(value: PyTree, mask: Any) -> tuple[PyTree, Any]:
        key = jax.random.wrap_key_data(jnp.zeros(2, np.uint32), impl="threefry2x32") if stage.keyed else None
        return apply_stage(name, stage, 0, value, mask, key)

    return jax.eval_shape(apply, value, mask)


def _where(usual: str, stage: Transform) -> str:
    if isinstance(stage, DevicePutTransform):
        return "on the way out"
    return "host, called by the program" if stage.effects else usual


def _notes(stage: Transform) -> list[str]:
    if isinstance(stage, DevicePutTransform):
        return [f"to {place_words(stage.placement)}"]
    if isinstance(stage, BufferTransform):
        held, given = f"{stage.capacity:,} values, {stage.write_mode}", f"{stage.sample_size:,} {stage.mode}"
        return [f"holds {held}", f"gives {given}"]
    return ["random"] if stage.keyed else []
