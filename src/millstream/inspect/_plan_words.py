"""The plan of a loader in words: what an epoch is, who reads, and where batches go."""

import math
import time
from typing import Any

import jax
import numpy as np

from millstream.files.changed import ABSENT, Stamp
from millstream.files.data_files import is_remote
from millstream.files.remote_options import options_for
from millstream.loader.build import stages
from millstream.loader.loader import DataLoader
from millstream.pipeline.bucketed import BucketedPipeline
from millstream.pipeline.compose import IndexedPipeline, masking_stages
from millstream.pipeline.iterable import IterablePipeline
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.placement import BatchPlacement
from millstream.pipeline.stages import stage_names
from millstream.pipeline.state import is_traced
from millstream.plan.block_order import mixing, typical_size
from millstream.plan.bucket_plan import BucketPlan
from millstream.plan.mixture import Mixed, block_size
from millstream.plan.ordering import Shuffle
from millstream.plan.plan import Batching, Plan
from millstream.plan.selection import Selection
from millstream.reading.blocks import block_sizes, stored_blocks
from millstream.reading.contracts import IndexedSource
from millstream.reading.derived_sources import is_random, named_parts
from millstream.reading.host_source import HostSource
from millstream.reading.iterable import UNKNOWN_LENGTH
from millstream.reading.memory import mapped_file, nbytes
from millstream.reading.processes import Processes
from millstream.reading.read_config import ReadConfig
from millstream.reading.threads import Threads
from millstream.reading.view import source_length
from millstream.text.tables import size_text
from millstream.transforms.device import DevicePutTransform

_ORDERS = {
    "itemwise": "a different order every epoch",
    "reseed": "the same order every epoch, with new keys",
    "repeat": "the same batches every epoch, in the same order",
    "batchwise": "the same batches every epoch, in a different order",
    "blocks": "a different order every epoch, read almost in sequence",
}
_ERRORS = {
    "raise": "a sample that raises ends the stream",
    "skip item": "the row of a sample that raises is masked",
    "skip batch": "the batch of a sample that raises is left out",
}


def count_made_ahead(loader: DataLoader) -> int:
    """How many batches the compiled program makes ahead."""
    pipeline = loader.pipeline
    if not isinstance(pipeline, Pipeline) or pipeline.host is not None or any(one.effects for one in pipeline.stages):
        return 0
    return loader.options["prefetch"]


def state_bytes(stream: Any) -> int:
    return nbytes(jax.eval_shape(stream.init_state, jax.random.key(0)))


def plan_in_words(loader: DataLoader) -> dict[str, str]:
    """What an epoch is, who reads and where batches go, by name."""
    pipeline = loader.pipeline
    if isinstance(pipeline, IndexedPipeline):
        words = _indexed_words(pipeline, count_made_ahead(loader))
    elif isinstance(pipeline, IterablePipeline):
        words = _iterable_words(pipeline, loader.options["prefetch"])
    else:
        words = {
            "epoch": f"{pipeline.steps_per_epoch:,} steps of a stream, which depend on the steps before them",
            "made": "one step at a time in the compiled program, never ahead",
            "state": f"{size_text(state_bytes(pipeline))}, all that the stream remembers",
        }
    if masking := masking_stages(pipeline):
        words["mask"] = f"set by {', '.join(masking)}: how many rows count is known when a batch is made"
    if random := _random_stages(_body(pipeline)):
        words["random stages"] = ", ".join(random)
    return words | {"handed out": _hand_over_words(loader)}


def _body(pipeline: Any) -> Any:
    """What the samples of a pipeline go through, wherever they come from."""
    return pipeline.body if isinstance(pipeline, IterablePipeline) else pipeline


def _iterable_words(pipeline: IterablePipeline, prefetch: int) -> dict[str, str]:
    source, plan, host = pipeline.iterable, pipeline.plan, pipeline.body.host
    assert host is not None
    shuffled = f"shuffled within a buffer of {source.shuffle_buffer:,}, by the key and the pass"
    kind = f"of {plan.axes[0]:,}" if plan.batchings else "of single samples"
    known = pipeline.steps_per_epoch is not None
    words = {
        "samples": f"{source.length:,}" if known else "as many as the iterable gives",
        "order": shuffled if source.shuffle_buffer > 1 else "as the iterable gives them",
        "epoch": f"one pass, {f'{pipeline.steps_per_epoch:,} batches' if known else 'batches'} {kind}",
    }
    if plan.batchings:
        words["last batch"] = ending_words(plan.batchings[-1])
    words["read"] = f"drawn by a thread, host stages by {reader_words(host)}, {_ahead_words(prefetch)}"
    if pipeline.placement is not None:
        words["shards"] = _shard_words(pipeline.placement)
    return words | {"state": "a key, a step, and how far the pass is; resuming draws the pass again up to there"}


def _source(pipeline: IndexedPipeline) -> IndexedSource:
    assert pipeline.source is not None
    return pipeline.source


def _indexed_words(pipeline: IndexedPipeline, made_ahead: int) -> dict[str, str]:
    plan, host = pipeline.plan, pipeline.host
    words = {
        "samples": f"{plan.samples:,}",
        **({} if (view := plan.buckets[0].view) is None else _view_words(view, source_length(_source(pipeline)))),
        "order": _order_words(plan.shuffle),
        **({} if isinstance(plan, BucketPlan) or plan.blocks is None else _block_words(plan, _source(pipeline))),
        **(_bucket_words(pipeline) if isinstance(pipeline, BucketedPipeline) else _epoch_words(pipeline.plan)),
    }
    if host is None:
        words["made"] = f"in the compiled program, {_ahead_words(made_ahead)}"
    else:
        order = "in order" if host.ordered else "in the order in which they are read"
        several = isinstance(host.executor, Processes) and host.executor.workers > 1
        each = ", each at a batch of its own" if several else ""
        words["read"] = f"by {reader_words(host)}{each}, {_ahead_words(host.ahead(plan))}, {order}"
        if several and plan.shuffle.mode == "blocks" and _is_fetched_by_each(host.source):
            words["fetched"] = (
                "each worker fetches the blocks of its own batches, so that most come once per worker; with "
                "millstream.integrations.cloud.configure(stage=True) they come once for all, or use Threads"
            )
        words["errors"] = _ERRORS[host.on_error]
        if host.cache is not None:
            words["cache"] = f"{host.cache.folder} ({host.cache.mode})"
    if pipeline.placement is not None:
        words["shards"] = _shard_words(pipeline.placement)
    return words | {"state": "a key and a step"}


def _is_fetched_by_each(source: HostSource) -> bool:
    """Whether files of other machines are read that no disk keeps for all processes."""
    addresses = [name for name, _, _ in source.stamps if is_remote(name)]
    return source.looks_ahead and not all(options_for(address).stage for address in addresses)


def _view_words(selection: Selection, samples: int) -> dict[str, str]:
    words = {"view": f"{selection.words} of {samples:,}"}
    for function, table in zip(selection.functions, selection.tables, strict=True):
        if isinstance(function, Mixed):
            words["sources"] = _source_words(function, table)
    tables = jax.tree.leaves(selection.tables)
    return words | ({"plan file": "; ".join(map(_table_words, tables))} if tables else {})


def source_shares(pipeline: Any) -> dict[str, str]:
    """Of a mixture, how many samples each source has and its share, by name; nothing without one."""
    view = pipeline.plan.buckets[0].view if isinstance(pipeline, IndexedPipeline) else None
    functions = () if view is None else view.functions
    number = next((at for at, function in enumerate(functions) if isinstance(function, Mixed)), None)
    if view is None or number is None:
        return {}
    mixture: Any = functions[number]
    _, alone, table = mixture.sets_of_quotas(view.tables[number])[-1]
    whole = alone.counts(table, np.array([mixture.length]))[0]
    return {
        part.name: f"{part.length:,} samples, {100 * count / mixture.length:.1f} %"
        for part, count in zip(mixture.parts, whole.tolist(), strict=True)
    }


def _source_words(mixture: Mixed, table: Any) -> str:
    """The share of each source in an epoch of a mixture, after every change of its quotas."""
    length, size = mixture.length, block_size(mixture.length)
    first, rest = min(size, length), (length - 1) // size * size
    shown = []
    for after, alone, its in mixture.sets_of_quotas(table):
        begun, before, whole = alone.counts(its, np.array([first, rest, length]))
        shares = zip(mixture.parts, whole / length, begun / first, (whole - before) / (length - rest), strict=True)
        each = ", ".join(_share_words(part.name, *of_it) for part, *of_it in shares)
        shown.append(f"after {after:,} samples {each}" if after else each)
    return "; ".join(shown)


def _share_words(name: str, share: float, first: float, last: float) -> str:
    ramp = abs(first - last) > 0.05  # of a block: less may be rounding in a short one
    return f"{name} {100 * share:.1f} %" + (f" (from {100 * first:.0f} to {100 * last:.0f} %)" if ramp else "")


def _table_words(table: np.ndarray) -> str:
    """Where the table of a view is."""
    file = mapped_file(table)
    if file is None:
        return f"none: {size_text(table.nbytes)} in memory"
    stamp = Stamp.of(str(file.filename))
    age = "removed since" if stamp == ABSENT else f"made {_age_text(time.time() - stamp.mtime_ns / 1e9)} ago"
    return f"{file.filename} ({size_text(stamp.size or table.nbytes)}, {age}, mapped)"


def _age_text(seconds: float) -> str:
    """A time in whole days, hours, minutes or seconds."""
    units = ("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1)
    unit, length = next((one for one in units if seconds >= one[1]), units[-1])
    count = max(int(seconds // length), 0)
    return f"{count} {unit}{'' if count == 1 else 's'}"


def _epoch_words(plan: Plan) -> dict[str, str]:
    batches = "batch" if plan.steps_per_epoch == 1 else "batches"
    kind = f"{batches} of {' x '.join(f'{size:,}' for size in plan.axes)}" if plan.batchings else "single samples"
    words = {"epoch": f"{plan.steps_per_epoch:,} {kind}"}
    if plan.batchings:
        moved = "; it may come anywhere in an epoch" if plan.shuffle.mode == "batchwise" else ""
        words["last batch"] = "; of batches of them: ".join(map(ending_words, plan.batchings)) + moved
    return words


def _bucket_words(pipeline: BucketedPipeline) -> dict[str, str]:
    plans, count = pipeline.plan.buckets, len(pipeline.lengths)
    each = [
        f"{plan.steps_per_epoch:,} batches of {plan.axes[0]:,} x {length:,} ({ending_words(plan.batchings[0])})"
        for length, plan in zip(pipeline.lengths, plans, strict=True)
    ]
    return {
        "epoch": f"{pipeline.steps_per_epoch:,} batches of {count} shape{'' if count == 1 else 's'}",
        "buckets": "; ".join(each),
        "padding": f"{100 * (1 - pipeline.fill):.1f} % of all places in an epoch",
    }


def reader_words(host: ReadConfig) -> str:
    """Who reads, and how many there are."""
    executor = host.executor
    count = host.source.readers if executor is None else getattr(executor, "workers", 1)
    usual = Threads.reader_names if executor is None else ("reader", "readers")
    one, many = getattr(executor, "reader_names", usual)
    return f"{count} {one if count == 1 else many}"


def _ahead_words(batches: int) -> str:
    return f"{batches:,} ahead of the one in use" if batches else "when they are asked for"


def _block_words(plan: Plan, source: IndexedSource) -> dict[str, str]:
    """How a block shuffle reads and mixes."""
    assert plan.blocks is not None and plan.selection is not None
    table: Any = plan.selection.tables[0]
    batch = plan.batchings[0].size if plan.batchings else 1
    expected, each = mixing(plan.blocks, table, batch), plan.samples / plan.blocks.blocks
    arrays = nbytes(source.spec())
    size = f", {size_text(expected.samples * arrays)}" if arrays else ""
    return {
        "blocks": f"{plan.blocks.blocks:,} of {each:,.0f} samples on average, about {expected.blocks:,.0f} in flight "
        f"({expected.samples:,} samples{size}) in {plan.blocks.lanes:,} lanes",
        "mixing": f"labels that are stored in sequence vary {expected.ratio:.2f} times as much from batch to batch as "
        "after a full shuffle",
        **_cache_words(plan, source, expected.blocks),
    }


def _cache_words(plan: Plan, source: Any, in_flight: float) -> dict[str, str]:
    """Whether more blocks of other machines are in flight than the source keeps; nothing if they fit."""
    assert plan.blocks is not None
    remote = any(is_remote(name) for name, _, _ in getattr(source, "stamps", ()))
    if not remote or getattr(source, "cache_bytes", None) is None or block_sizes(source) is None:
        return {}
    stored = stored_blocks(plan.shuffle, source)
    blocks = min(in_flight, len(stored.sizes))  # a part of a block needs all of it
    needed = math.ceil(blocks * typical_size(stored.sizes) * stored.sample_bytes)
    if stored.divisible or needed <= stored.kept_bytes:
        return {}
    window = int(plan.blocks.window * stored.kept_bytes / needed)
    smaller = f"window={window:,} or less, or " if window else ""
    return {
        "fetched again": f"about {blocks:,.0f} blocks in flight take {size_text(needed)}, and the source keeps "
        f"{size_text(stored.kept_bytes)} (cache_bytes), so blocks are fetched several times; use {smaller}"
        f"cache_bytes={needed:,} or more"
    }


def _order_words(shuffle: Shuffle) -> str:
    first = "" if shuffle.first_epoch or shuffle.words == "sequential" else "; the first one in sequence"
    meaning = "in sequence, every epoch" if shuffle.words == "sequential" else _ORDERS[shuffle.mode]
    return f"{shuffle.words.split(',')[0]}: {meaning}{first}"


def ending_words(batching: Batching) -> str:
    """What the last batch of an epoch is like."""
    if batching.inner == UNKNOWN_LENGTH:
        return "left out unless it is full" if batching.ending == "drop" else f"padded to {batching.size:,} rows"
    left = batching.inner % batching.size
    if left == 0:
        return "full"
    if batching.ending == "drop":
        return f"full; {left:,} left over and dropped"
    if batching.ending == "pad":
        return f"{left:,} of {batching.size:,} rows real, the others padding"
    return f"{batching.size - left:,} of {batching.size:,} rows from the next epoch"


def mesh_words(placement: BatchPlacement) -> str:
    return "mesh (" + ", ".join(f"{name}: {size}" for name, size in placement.sharding.mesh.shape.items()) + ")"


def _shard_words(placement: BatchPlacement) -> str:
    sharding, rows = placement.by_rows, placement.local_rows()
    hosts = len({device.process_index for device in sharding.device_set})
    per_device = math.prod(sharding.shard_shape((placement.size,)))
    words = f"{placement.size:,} rows over {mesh_words(placement)}, {per_device:,} per device"
    if not placement.shardings.divides_rows_alone:
        words += f"; {placement.shardings.words}"
    if hosts > 1:
        words += f"; {hosts} processes, of which this one has {len(rows):,} rows, from {rows[0]} to {rows[-1]}"
    return words


def device_words(devices: Any) -> str:
    names = sorted(f"{device.platform}:{device.id}" for device in devices)
    return names[0] if len(names) == 1 else f"{len(names)} devices, {names[0]} to {names[-1]}"


def place_words(place: Any) -> str:
    if place is None:
        return "JAX's default device"
    return device_words(place.device_set if isinstance(place, jax.sharding.Sharding) else [place])


def _hand_over_words(loader: DataLoader) -> str:
    pipeline = _body(loader.pipeline)
    if isinstance(pipeline, IndexedPipeline) and pipeline.objects is not None:
        return "as Python objects"
    if isinstance(pipeline, IndexedPipeline) and pipeline.placement is not None:
        return f"over {place_words(pipeline.placement.sharding)}"
    place = next((one.placement for one in stages(pipeline)[::-1] if isinstance(one, DevicePutTransform)), None)
    if place is None:
        data = [leaf for leaf in jax.tree.leaves(loader) if isinstance(leaf, jax.Array) and not is_traced(leaf)]
        place = data[0].sharding if data else None
        return f"on {place_words(place)}"
    return f"{'over' if isinstance(place, jax.sharding.Sharding) else 'on'} {place_words(place)}"


def _random_stages(pipeline: Any) -> list[str]:
    """The names of all stages that use keys."""
    host = pipeline.host if isinstance(pipeline, IndexedPipeline) else None
    read = [] if host is None else [name for name, part in named_parts(host.source) if is_random(part)]
    compiled = stages(pipeline)
    return read + [name for name, stage in zip(stage_names(compiled), compiled, strict=True) if stage.keyed]
