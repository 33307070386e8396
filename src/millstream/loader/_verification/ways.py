"""All the ways to the batches of a loader that its pipeline allows."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from millstream.loader._verification.draws import (
    Draws,
    iterating,
    scan_width,
    scanning,
    stepping,
    stepping_compiled,
    with_workers,
)
from millstream.pipeline.pipeline import Pipeline
from millstream.reading.in_graph import InGraph
from millstream.reading.processes import Processes
from millstream.reading.threads import Threads

if TYPE_CHECKING:
    from millstream.loader.loader import DataLoader

Executor = InGraph | Threads | Processes


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to the batches.

    Attributes:
        name: What it is called in a table.
        draw: `draw(key, steps)` yields the first batches of the run with this key.
    """

    name: str
    draw: Callable[[Any, int], Draws]


def ways_of(
    loader: "DataLoader", executors: Sequence[Executor], steps: int, batches_in_time: float
) -> tuple[list[Way], list[str]]:
    """The ways that a pipeline allows, and why it does not allow the others.

    Args:
        loader: The loader whose `iterate` the others are compared with.
        executors: The executors to try.
        steps: How many batches will be drawn.
        batches_in_time: How many a compiled loop has time for, about.
    """
    ways, left_out = [Way("next_batch", functools.partial(stepping, loader.replace))], []
    source, placement = loader._source, loader._mesh_placement
    if isinstance(source, Pipeline) and source.objects is not None:
        left_out.append("jax.jit and scan_epoch are left out: Python objects enter no compiled program.")
    elif placement is not None and placement.mesh != placement.sharding.mesh:
        left_out.append("jax.jit and scan_epoch are left out: a mesh with explicit axes does not allow them.")
    else:
        width = scan_width(loader, steps, batches_in_time)
        name = "scan_epoch" if width is None else "run_steps"
        ways.append(Way("next_batch in jax.jit", functools.partial(stepping_compiled, loader.replace)))
        ways.append(Way(name, functools.partial(scanning, loader.replace, width)))
    if not isinstance(source, Pipeline):
        left_out.append("Threads and Processes are left out: a stream is computed step by step.")
        return ways, left_out
    ways += [_with_executor(loader, executor) for executor in executors]
    return ways + _on_devices(loader), left_out


def _with_executor(loader: "DataLoader", executor: Executor) -> Way:
    def make() -> "DataLoader":
        other = loader.replace(executor=executor)
        return with_workers(other) if isinstance(executor, Processes) else other

    if isinstance(executor, InGraph):
        name = "no executor" if loader._source.source.arrays is None else "InGraph()"
    else:
        name = f"{type(executor).__name__}({executor.workers})"
    return Way(name, functools.partial(iterating, make))


def _on_devices(loader: "DataLoader") -> list[Way]:
    """On one device if the loader has many, and on all of this process if it has one."""
    source = loader._source
    if loader._mesh_placement is not None:
        return [Way("one device", functools.partial(iterating, functools.partial(loader.replace, sharding=None)))]
    if source.objects is not None or not source.plan.batchings or loader._placement is not None:
        return []
    count = math.gcd(jax.local_device_count(), source.plan.batchings[-1].size)
    if count == 1:
        return []
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:count]), ("data",))
    return [Way(f"{count} devices", functools.partial(iterating, functools.partial(loader.replace, sharding=mesh)))]


def usual_executors(own: Executor | None) -> list[Executor]:
    """Threads and worker processes, with the other fields of the loader's own executor; and none, if it has one."""
    threads = own if isinstance(own, Threads) else Threads(1)
    processes = own if isinstance(own, Processes) else Processes(2)
    tried: list[Executor] = [dataclasses.replace(threads, workers=count, ordered=True) for count in (1, 3)]
    tried.append(dataclasses.replace(processes, workers=2, ordered=True))
    return [one for one in [InGraph(), *tried] if one != (InGraph() if own is None else own)]
