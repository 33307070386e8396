"""The plan of a loader in words: what an epoch is, who reads, and where batches go."""

import math
from typing import TYPE_CHECKING, Any

import jax

from millstream.loader.build import stages
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.placement import BatchPlacement
from millstream.pipeline.stages import stage_names
from millstream.pipeline.state import is_traced
from millstream.plan.ordering import Shuffle
from millstream.plan.plan import Batching, Plan
from millstream.reading.derived_sources import is_random, named_parts
from millstream.reading.host_side import HostSide
from millstream.reading.memory import nbytes
from millstream.reading.processes import Processes
from millstream.text.tables import size_text

if TYPE_CHECKING:
    from millstream.loader.loader import DataLoader

_ORDERS = {
    "itemwise": "another order every epoch",
    "reseed": "the same order every epoch, with new keys",
    "repeat": "the same batches every epoch, in the same order",
    "batchwise": "the same batches every epoch, in another order",
}
_ERRORS = {
    "raise": "a sample that raises ends the stream",
    "skip item": "the row of a sample that raises is masked",
    "skip batch": "the batch of a sample that raises is left out",
}


def plan_in_words(loader: "DataLoader") -> dict[str, str]:
    """What an epoch is, who reads and where batches go, by name."""
    source = loader._source
    if not isinstance(source, Pipeline):
        state = jax.eval_shape(source.init_state, jax.random.key(0))
        words = {
            "epoch": f"{source.steps_per_epoch:,} steps of a stream, which depend on the steps before them",
            "made": "one step at a time in the compiled program, never ahead",
            "state": f"{size_text(nbytes(state))}, all of what the stream remembers",
        }
    else:
        words = _indexed(loader, source)
    if loader._masking:
        words["mask"] = f"set by {', '.join(loader._masking)}: how many rows count is known when a batch is made"
    if random := _random_stages(source):
        words["random stages"] = ", ".join(random)
    return words | {"handed out": _hand_over_words(loader, source)}


def _indexed(loader: "DataLoader", pipeline: Pipeline) -> dict[str, str]:
    plan, host = pipeline.plan, pipeline.host
    words = {
        "samples": f"{plan.samples:,}",
        "order": _order_words(plan.shuffle),
        "epoch": _epoch_words(plan),
    }
    if plan.batchings:
        words["last batch"] = _last_words(plan)
    if host is None:
        ahead = 0 if loader._effects else loader._prefetch
        words["made"] = f"in the compiled program, {_ahead_words(ahead)}"
    else:
        words |= _reading(host, plan)
    if pipeline.placement is not None:
        words["shards"] = _shard_words(pipeline.placement)
    return words | {"state": "a key and a step"}


def _reading(host: HostSide, plan: Plan) -> dict[str, str]:
    order = "in order" if host.ordered else "in the order in which they are read"
    each = ", each at a batch of its own" if isinstance(host.executor, Processes) and host.executor.workers > 1 else ""
    words = {
        "read": f"by {reader_words(host)}{each}, {_ahead_words(host.ahead(plan))}, {order}",
        "errors": _ERRORS[host.on_error],
    }
    if host.cache is not None:
        words["cache"] = f"{host.cache.folder} ({host.cache.mode})"
    return words


def reader_words(host: HostSide) -> str:
    """Who reads the samples."""
    count = host.source.readers if host.executor is None else getattr(host.executor, "workers", 1)
    kind = "worker process" if isinstance(host.executor, Processes) else "thread"
    plural = "" if count == 1 else "es" if kind.endswith("s") else "s"
    return f"{count} {kind}{plural}"


def _ahead_words(batches: int) -> str:
    """How far ahead of the caller batches are made."""
    return f"{batches:,} ahead of the one in use" if batches else "when they are asked for"


def mesh_words(placement: BatchPlacement) -> str:
    """A mesh, by the sizes of its axes."""
    return "mesh (" + ", ".join(f"{name}: {size}" for name, size in placement.sharding.mesh.shape.items()) + ")"


def device_words(devices: Any) -> str:
    """Some devices, by name."""
    names = sorted(f"{device.platform}:{device.id}" for device in devices)
    return names[0] if len(names) == 1 else f"{len(names)} devices, {names[0]} to {names[-1]}"


def ending_words(batching: Batching) -> str:
    """What the last batch of an epoch is like."""
    left = batching.inner % batching.size
    if left == 0:
        return "full"
    if batching.ending == "drop":
        return f"full; {left:,} left over and dropped"
    if batching.ending == "pad":
        return f"{left:,} of {batching.size:,} rows real, the others padding"
    return f"{batching.size - left:,} of {batching.size:,} rows from the next epoch"


def _order_words(shuffle: Shuffle) -> str:
    first = "" if shuffle.first_epoch or shuffle.words == "sequential" else "; the first one in sequence"
    meaning = "in sequence, every epoch" if shuffle.words == "sequential" else _ORDERS[shuffle.mode]
    return f"{shuffle.words.split(',')[0]}: {meaning}{first}"


def _epoch_words(plan: Plan) -> str:
    if not plan.batchings:
        return f"{plan.steps_per_epoch:,} single samples"
    sizes = " x ".join(f"{size:,}" for size in plan.axes)
    return f"{plan.steps_per_epoch:,} {'batch' if plan.steps_per_epoch == 1 else 'batches'} of {sizes}"


def _last_words(plan: Plan) -> str:
    moved = "; it may come anywhere in an epoch" if plan.shuffle.mode == "batchwise" else ""
    return "; of batches of them: ".join(map(ending_words, plan.batchings)) + moved


def _shard_words(placement: BatchPlacement) -> str:
    sharding = placement.of(1)
    rows, devices = placement.local_rows(), sharding.device_set
    hosts = len({device.process_index for device in devices})
    per_device = math.prod(sharding.shard_shape((placement.size,)))
    words = f"{placement.size:,} rows over {mesh_words(placement)}, {per_device:,} per device"
    if hosts > 1:
        words += f"; {hosts} processes, of which this one has {len(rows):,} rows, from {rows[0]} to {rows[-1]}"
    return words


def _hand_over_words(loader: "DataLoader", source: Any) -> str:
    if isinstance(source, Pipeline) and source.objects is not None:
        return "as Python objects"
    if loader._mesh_placement is not None:
        return f"over {device_words(loader._mesh_placement.sharding.device_set)}"
    placement = loader._placement
    if placement is None:
        placed = [leaf for leaf in loader._arrays if isinstance(leaf, jax.Array) and not is_traced(leaf)]
        return f"on {device_words(placed[0].devices())}" if placed else "on JAX's default device"
    if isinstance(placement, jax.sharding.Sharding):
        return f"over {device_words(placement.device_set)}"
    return f"on {device_words([placement])}"


def _random_stages(source: Any) -> list[str]:
    """The names of all that makes use of keys, besides the order."""
    host = source.host if isinstance(source, Pipeline) else None
    read = [] if host is None else [name for name, part in named_parts(host.source) if is_random(part)]
    compiled = stages(source)
    named = zip(stage_names(compiled), compiled, strict=True)
    return read + [name for name, stage in named if stage.keyed]
