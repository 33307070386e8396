"""How long each stage of a pipeline takes, alone, in one thread."""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from millstream.inspect._explain import calculating
from millstream.inspect._tuning import TimedStage
from millstream.loader.loader import DataLoader
from millstream.pipeline.pipeline import Pipeline
from millstream.reading.reading import Reading, Report

READING = "reading, all of it"  # the stage that is all of the reading
SKIPPING = 'A loader with on_error="skip item" continues without samples that cannot be read.'

_MOST_REPEATS = 50


def time_stages(loader: DataLoader, words: np.ndarray, seconds: float) -> tuple[list[TimedStage], float | None]:
    """How long the stages take, and the seconds per sample if samples are read in this process."""
    pipeline = loader.pipeline
    if pipeline.host is None:
        state, alone = loader.init_state(words), loader.replace()
        return [TimedStage("compiled stages", "batch", _median(lambda: alone.next_batch(state)[::2], seconds))], None
    arrays = pipeline.host.source.sample_spec.empty(pipeline.host.layout(pipeline.plan).rows)
    for array in arrays:  # not all rows may come to be read
        array[...] = None if array.dtype.hasobject else 0
    read, per_sample = [], None
    if getattr(pipeline.host.executor, "startup", None) is None:  # what it prepares is there in workers alone
        try:
            read = _time_reading(pipeline, words, arrays, 0.6 * seconds)
        except Exception as error:
            error.add_note(f"tune was timing the stages. {SKIPPING}")
            raise
        per_sample = read[-1].seconds
    return [*read, *_time_delivery(pipeline, words, arrays, 0.4 * seconds)], per_sample


def _time_reading(pipeline: Pipeline, words: np.ndarray, out: list[np.ndarray], seconds: float) -> list[TimedStage]:
    """How long reading takes in this thread: by stage, and all of it."""
    host = pipeline.host
    assert host is not None
    run, size = pipeline.planned_steps(words), host.layout(pipeline.plan).rows
    part, deadline = 1 if host.source.reads_samples else size, time.perf_counter() + seconds
    samples, elapsed, cpu, total = 0, 0.0, 0.0, Report()
    for number in itertools.count():
        step, first = divmod(number * part, size)
        if number == 1:  # the first reading opens files and fills caches; it counts only if there is time for no other
            samples, elapsed, cpu, total = 0, 0.0, 0.0, Report()
        request = run.request(step, host.source.keyed)
        begun, cpu_begun = time.perf_counter(), time.thread_time()
        report = Reading(host.source, request, out, tolerant=host.tolerant).read(first, first + part)
        cpu, elapsed = cpu + time.thread_time() - cpu_begun, elapsed + time.perf_counter() - begun
        samples += int(request.real[first : first + part].sum())
        total.add(report)
        if time.perf_counter() >= deadline:
            break
    count = max(1, samples)
    rows = [TimedStage(name, "sample", taken / count) for name, taken in total.times.items()]
    return [*rows, TimedStage(READING, "sample", elapsed / count, cpu / count)]


def _time_delivery(pipeline: Pipeline, words: np.ndarray, arrays: list[np.ndarray], seconds: float) -> list[TimedStage]:
    """How long a batch takes from the host's memory to the device, and through the compiled stages."""
    if pipeline.objects is not None:
        return []
    host, placement = pipeline.host, pipeline.placement
    assert host is not None
    axes = host.layout(pipeline.plan).axes
    rows = [leaf.reshape((*axes, *leaf.shape[1:])) for leaf in arrays]

    def hand_over() -> list[Any]:
        if placement is None or host.rows is None:
            return jax.device_put(rows)
        return [placement.place(leaf, host.rows[0]) for leaf in rows]

    numbers = pipeline.planned_steps(words).numbers(0)

    @jax.jit
    def make_batch(rows: list[Any]) -> Any:
        return pipeline.planned(words, numbers, rows)

    with contextlib.nullcontext() if placement is None else jax.set_mesh(placement.mesh):
        stages = [TimedStage("hand-over", "batch", _median(hand_over, seconds / 2))]
        # A user's function must not be called with a batch that is only partly read.
        if calculating(pipeline.stages) and not any(stage.effects for stage in pipeline.stages):
            there = hand_over()
            stages.append(TimedStage("compiled stages", "batch", _median(lambda: make_batch(there), seconds / 2)))
    return stages


def _median(run: Callable[[], Any], seconds: float) -> float:
    """The usual time of a call, after one that compiles."""
    jax.block_until_ready(run())
    times, deadline = [], time.perf_counter() + seconds
    while not times or (time.perf_counter() < deadline and len(times) < _MOST_REPEATS):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begun)
    return statistics.median(times)
