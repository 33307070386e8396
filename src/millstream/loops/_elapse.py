"""Iterating by hand, with a count of how far one is."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from millstream.loops._clock import Clock
from millstream.loops._dataset import Loader, as_dataset, epoch_of, one_pass, open_batches
from millstream.loops.elapsed import Elapsed
from millstream.loops.schedules import Period, as_epoch, as_stop
from millstream.loops.signatures import Dataset, Point, Stop
from millstream.plan.phases import EpochLengths
from millstream.reading.contracts import PyTree, T
from millstream.text.errors import describe_value


def elapse(
    dataset: Dataset[T],
    *,
    initial: Elapsed | None = None,
    stop: Stop | None = None,
    key: jax.Array | np.ndarray | None = None,
    data_state: PyTree = None,
    epoch_duration: Point | None = None,
    batch_size_fn: Callable[[PyTree], int] | None = None,
) -> Iterator[tuple[Elapsed, T]]:
    """Go through batches by hand: (elapsed, batch), one after the other.

    Example:
        >>> due = ms.every(2)
        >>> for elapsed, batch in ms.loops.elapse([np.ones(4), np.ones(4), np.ones(2)]):
        ...     if due(elapsed):
        ...         print(elapsed.steps, elapsed.samples)
        2 8

    Args:
        dataset: An iterable of batches, or a `DataLoader`, whose batches are then (batch, mask), or a function that
            returns one.
        initial: How far an earlier run had come.
        stop: When to end: a number of steps, `at(...)`, or a function of the elapsed. None: with the data, which for a
            `DataLoader` is after one epoch.
        key: The key of a loader's run.
        data_state: The state of a loader to begin with, instead of a key.
        epoch_duration: How long an epoch is; a `DataLoader` says it itself.
        batch_size_fn: How many samples a batch has, where its shape does not say it.
    """
    if not isinstance(initial, Elapsed | None):
        raise TypeError(f"elapse needs initial as an earlier run's elapsed. Got {describe_value(initial)}.")
    if batch_size_fn is not None and not callable(batch_size_fn):
        raise TypeError(f"elapse needs batch_size_fn to be a function. Got {describe_value(batch_size_fn)}.")
    dataset = as_dataset("elapse", dataset)
    epoch: Point | EpochLengths | None = epoch_duration
    if isinstance(dataset, Loader):
        epoch = epoch_of(dataset) if epoch is None else epoch
        if stop is None and dataset.steps_per_epoch is None:
            dataset = one_pass("elapse", dataset, key, data_state, 0 if initial is None else initial.steps)
            data_state = None
        elif stop is None:
            stop = Period(epochs=1 + (0 if initial is None else initial.epochs or 0))
    stops = None if stop is None else as_stop("elapse", stop)
    clock = Clock(initial, None if epoch is None else as_epoch("elapse", epoch))
    point = stops if isinstance(stops, Period) else None
    batches = open_batches(
        "elapse", dataset, start=clock.now, stop=point, key=key, data_state=data_state, batch_size_fn=batch_size_fn
    )
    return _elapse(clock, batches, stops)


def _elapse(clock: Clock, batches: Any, stop: Any) -> Iterator[tuple[Elapsed, Any]]:
    stops = stop.reached if isinstance(stop, Period) else stop
    last = stop.units.get("steps") if isinstance(stop, Period) else None
    try:
        if isinstance(stop, Period) and stop.reached(clock.now):
            return
        while True:
            try:
                batch = batches.draw()
            except StopIteration:
                return
            elapsed = clock.tick(batches.size_of(batch))
            elapsed.final = elapsed.steps == last
            yield elapsed, batch
            if stops is not None and stops(elapsed):
                return
    finally:
        batches.close()
