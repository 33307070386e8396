"""Drawing the batches of a run by each of the calls that a loader has, as generators that end what they begin."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from millstream.files import plain
from millstream.loader._verification.compare import raw_key
from millstream.loader.info import BatchInfo
from millstream.pipeline.host_calls import original_errors
from millstream.reading.contracts import PyTree
from millstream.reading.memory import nbytes
from millstream.reading.samples import ObjectSpec
from millstream.reading.stats import LoaderStats

if TYPE_CHECKING:
    from millstream.loader.loader import DataLoader

Make = Callable[[], "DataLoader"]  # a loader that nobody else uses
Draws = Generator["Drawn", None, None]

_SCANNED_BYTES = 64 * 2**20  # what one compiled loop may return at once
_SCANNED_STEPS = 8


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One batch of a way.

    Attributes:
        step: Its number.
        value: The batch; None if it is left out.
        mask: Its mask; likewise.
        info: What is known about it, if anything.
        position: What a run would save after it, if it is known: plain values, or the state of a stream.
    """

    step: int
    value: Any
    mask: Any
    info: BatchInfo | None = None
    position: Any = None


def iterating(make: Make, key: Any, steps: int) -> Draws:
    """By `iterate`, in the order of the steps; a batch that is left out is one without a value."""
    early: dict[int, Drawn] = {}  # by step, where an executor hands out whichever batch is read first
    step, loader = 0, make()
    indexed, ordered = loader._origin is not None, loader._host is None or loader._host.ordered
    with loader, contextlib.closing(loader.iterate(loader.init_state(key), steps=steps, with_info=indexed)) as batches:
        for value, mask, *info in batches:
            number = info[0].step if indexed else step
            position = (batches.get_state() if indexed else batches.state) if ordered else None
            early[number] = Drawn(number, value, mask, info[0] if indexed else None, position)
            while early and (step in early or ordered):
                yield early.pop(step, Drawn(step, None, None))
                step += 1
        for last in range(step, steps):
            yield early.pop(last, Drawn(last, None, None))


def stepping(make: Make, key: Any, steps: int) -> Draws:
    """By `next_batch`, outside of `jax.jit`."""
    with contextlib.closing(make()) as loader:
        state = loader.init_state(key)
        for step in range(steps):
            value, state, mask = loader.next_batch(state)
            yield Drawn(step, value, mask)


def stepping_compiled(make: Make, key: Any, steps: int) -> Draws:
    """By `next_batch` inside of `jax.jit`."""
    with contextlib.closing(make()) as loader:
        state = loader.init_state(key)
        for step in range(steps):
            with original_errors():
                value, state, mask = jax.block_until_ready(_next(loader, state))
            yield Drawn(step, value, mask)


def scanning(make: Make, width: int | None, key: Any, steps: int) -> Draws:
    """By `scan_epoch`, or, if there is a width, by `run_steps` with so many steps at a time."""
    with contextlib.closing(make()) as loader:
        state, length = loader.init_state(key), loader.steps_per_epoch
        for first in range(0, steps - length + 1, length) if width is None else range(0, steps, width):
            if width is None:
                state, _, batches = loader.scan_epoch(state, None, _collected)
                count = length
            else:
                count = min(width, steps - first)
                state, _, batches = loader.run_steps(state, None, _collected, count, width=width)
            batches = jax.tree.map(np.asarray, batches)
            for number in range(count):
                yield Drawn(first + number, *jax.tree.map(lambda leaf, at=number: leaf[at], batches))


def scan_width(loader: "DataLoader", steps: int, batches_in_time: float) -> int | None:
    """How many steps a compiled loop should have; None for a whole epoch, if it is asked for and fits.

    Args:
        loader: The loader.
        steps: How many batches will be drawn.
        batches_in_time: How many there is time for, about.
    """
    length = loader.steps_per_epoch
    fitting = max(1, _SCANNED_BYTES // max(1, nbytes(loader.element_spec())))
    if length <= min(steps, fitting, batches_in_time):
        return None
    return min(steps, fitting, _SCANNED_STEPS)


def _collected(carry: None, batch: PyTree, mask: jax.Array) -> tuple[None, Any]:
    return carry, jax.tree.map(raw_key, (batch, mask))


@jax.jit
def _next(loader: "DataLoader", state: PyTree) -> Any:
    return loader.next_batch(state)


class NotAllowed(Exception):
    """A pipeline cannot be run in this way; the text says why."""


def with_workers(loader: "DataLoader") -> "DataLoader":
    """A loader whose workers have their pipeline; refused if it cannot be sent, or its samples cannot be sent back."""
    host = loader._host
    assert host is not None
    if isinstance(host.source.sample_spec, ObjectSpec):
        try:
            plain.encode(host.source.read_sample(0, np.zeros(2, np.uint32) if host.source.keyed else None)[0])
        except TypeError as error:
            raise NotAllowed(str(error)) from None
    try:
        loader._backend = host.backend(loader._source.plan, LoaderStats())
    except Exception as error:
        raise NotAllowed(f"the pipeline cannot be sent to a worker: {type(error).__name__}: {error}") from None
    return loader


def from_cache(loader: "DataLoader", key: Any, steps: int) -> Draws:
    """By `iterate`, with what a loader's cache on disk holds; nothing is stored."""
    cache = loader._built("verify")[1]["cache"]
    read_only = dataclasses.replace(cache, mode="read-only")
    make = functools.partial(loader.replace, cache=read_only, on_error="raise")
    with contextlib.closing(iterating(make, key, steps)) as batches:
        try:
            first = next(batches)
        except (ValueError, FileNotFoundError) as error:
            raise NotAllowed(str(error)) from None
        yield first
        yield from batches
