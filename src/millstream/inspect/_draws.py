"""Drawing the batches of a loader in several ways: one generator each, and all of them should give the same batches."""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np

from millstream.checkpoints import CheckpointStore
from millstream.files import plain
from millstream.inspect._compare import raw_key
from millstream.loader.batch_info import BatchInfo
from millstream.loader.loader import DataLoader
from millstream.pipeline.compose import IndexedPipeline, SeekablePipeline, StagedPipeline
from millstream.pipeline.host_calls import call_and_wait
from millstream.pipeline.state import key_words
from millstream.reading.contracts import PyTree
from millstream.reading.reader import Reader
from millstream.reading.samples import ObjectSpec
from millstream.sharding import shard_bounds


class NotAllowed(Exception):
    """A pipeline cannot be run in this way; the text says why."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One batch; without a value, if it is left out."""

    step: int
    value: Any = None
    mask: Any = None
    info: BatchInfo | None = None


Draws = Generator[Drawn, None, None]


def iterate(loader: DataLoader, key: Any, steps: int) -> Draws:
    """By `iterate`, in the order of the steps."""
    early: dict[int, Drawn] = {}  # by step, where an executor hands out whichever batch is read first
    step, indexed = 0, isinstance(loader.pipeline, SeekablePipeline)
    ordered = not indexed or loader.pipeline.host is None or loader.pipeline.host.ordered
    with loader, contextlib.closing(loader.iterate(loader.init_state(key), steps=steps, with_info=indexed)) as batches:
        for value, mask, *info in batches:
            number = info[0].step if indexed else step
            early[number] = Drawn(number, value, mask, info[0] if indexed else None)
            while early and (step in early or ordered):
                yield early.pop(step, Drawn(step))
                step += 1
        for last in range(step, steps):
            yield early.pop(last, Drawn(last))


def iterate_in_workers(loader: DataLoader, key: Any, steps: int) -> Draws:
    """By `iterate`, unless the pipeline cannot be sent to worker processes, or its samples cannot be sent back."""
    for phase in loader.phases.values():
        _require_sendable(phase.pipeline)
    yield from iterate(loader, key, steps)


def _require_sendable(pipeline: Any) -> None:
    source = pipeline.host.source
    if isinstance(source.sample_spec, ObjectSpec):
        try:
            index = source.first_sample if pipeline.plan.selection is None else pipeline.plan.first_indices(1)[0]
            plain.encode(source.read_sample(index, np.zeros(2, np.uint32) if source.keyed else None)[0])
        except TypeError as error:
            raise NotAllowed(str(error)) from None
    try:
        pipeline.host.backend(pipeline.plan).close()
    except Exception as error:
        raise NotAllowed(f"the pipeline cannot be sent to a worker: {type(error).__name__}: {error}") from None


def iterate_cached(loader: DataLoader, key: Any, steps: int) -> Draws:
    """By `iterate`, unless a cache does not hold the batches."""
    with contextlib.closing(iterate(loader, key, steps)) as batches:
        try:
            first = next(batches)
        except (ValueError, FileNotFoundError) as error:
            raise NotAllowed(str(error)) from None
        yield first
        yield from batches


def step_through(loader: DataLoader, key: Any, steps: int, *, compiled: bool = False) -> Draws:
    """By `next_batch`, in a function that is compiled or not."""
    call = jax.jit(_next_batch) if compiled else _next_batch
    with contextlib.closing(loader):
        state = loader.init_state(key)
        for step in range(steps):
            value, state, mask = call_and_wait(call, loader, state)
            yield Drawn(step, value, mask)


def _next_batch(loader: DataLoader, state: PyTree) -> Any:
    return loader.next_batch(state)


def scan_epochs(loader: DataLoader, key: Any, steps: int) -> Draws:
    """By `scan_epoch`, as many whole epochs as there are steps for."""
    with contextlib.closing(loader):
        state, length = loader.init_state(key), loader.steps_per_epoch
        for first in range(0, steps - length + 1, length):
            state, _, batches = loader.scan_epoch(state, None, _output_batch)
            batches = jax.tree.map(np.asarray, batches)
            for number in range(length):
                yield Drawn(first + number, *jax.tree.map(lambda leaf, at=number: leaf[at], batches))


def _output_batch(carry: None, batch: PyTree, mask: jax.Array) -> tuple[None, Any]:
    return carry, jax.tree.map(raw_key, (batch, mask))


def resume_at(loader: DataLoader, key: Any, steps: int, stops: tuple[int, ...]) -> Draws:
    """By `iterate`, which is ended before some steps and resumed from the position that a run would save."""
    with loader:
        batches = loader.iterate(loader.init_state(key), steps=steps)
        try:
            for step in range(steps):
                if step in stops:
                    saved = batches.get_state() if isinstance(loader.pipeline, StagedPipeline) else batches.state
                    batches.close()
                    batches = _resume(loader, saved, key, steps - step)
                yield Drawn(step, *next(batches))
        finally:
            batches.close()


def _resume(loader: DataLoader, saved: Any, key: Any, left: int) -> Any:
    if isinstance(loader.pipeline, StagedPipeline):
        batches = loader.iterate(loader.init_state(key), steps=0)
        batches.set_state(json.loads(json.dumps(saved)))
        return batches
    try:
        with tempfile.TemporaryDirectory() as folder, CheckpointStore(folder) as store:
            store.save(0, saved)
            return loader.iterate(store.load(like=saved).tree, steps=left)
    except ImportError as error:
        raise NotAllowed(str(error)) from None


def seek_each(loader: DataLoader, key: Any, steps: int) -> Draws:
    """By `iterate`, which starts again at every step."""
    with loader:
        for step in range(steps):
            with contextlib.closing(loader.iterate(loader.init_state(key, step), steps=1)) as batches:
                yield Drawn(step, *next(batches))


def join_hosts(
    pipeline: IndexedPipeline, key: Any, steps: int, count: int, make_batch: Sequence[Callable[..., Any]]
) -> Draws:
    """By reading the rows of each host and joining them; `make_batch` are the compiled parts, one per bucket."""
    plan, words = pipeline.plan, np.asarray(key_words("verify", key))
    sizes = [bucket.axes[0] for bucket in plan.buckets]
    rows_of = [tuple(tuple(range(*shard_bounds(count, host, size))) for size in sizes) for host in range(count)]
    parts = [pipeline.read_by(rows=rows).host for rows in rows_of]
    planned = pipeline.planned_steps(words)
    with contextlib.ExitStack() as opened:
        readers = [opened.enter_context(contextlib.closing(Reader(part, plan))) for part in parts if part]
        for step in range(steps):
            filled = [reader.rows(words, step) for reader in readers]
            rows = [np.concatenate(leaves) for leaves in zip(*(one.rows for one in filled), strict=True)]
            bucket = planned.request(step, keyed=False).bucket
            intact = np.concatenate(
                [
                    part.intact(one, part.layout(plan).of(bucket).axes)
                    for part, one in zip(parts, filled, strict=True)
                    if part
                ]
            )
            if pipeline.objects is None:
                yield Drawn(step, *make_batch[bucket](words, planned.numbers(step), rows, intact))
            else:
                real = np.concatenate([one.request.real for one in filled if one.request is not None])
                yield Drawn(step, rows[0].tolist(), real.reshape(intact.shape) & intact)
