"""Shuffled batches of chosen rows: what others call filter, subset, concatenation and weighted sampling.

A million rows of 64 bytes with a label in memory, batch 256. Every leaf of every batch is a JAX array when it counts,
and is waited for. Choosing is done before; a round continues where the last one has ended. Every peer runs in a process
of its own. Grain weighs datasets, not samples, so there two datasets are mixed.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from _case import Options, main
from _libraries import Libraries, Stream
from _measure import Entry, Run, measured
from _result import Table
from _views import BATCH, ROWS, chosen, data, part, rounds, weights

import millstream as ms

TORCH, GRAIN, DATASETS = "torch", "grain", "datasets"
TASKS: dict[str, tuple[str, Callable[[dict[str, np.ndarray]], Any], list[Stream]]] = {
    "Rows that a predicate keeps": (
        "Millstream, select",
        lambda arrays: ms.views.select(ms.ArraySampleSource(arrays), chosen(arrays)),
        [
            Stream("torch, Subset", "torch_select", "torch", TORCH),
            Stream("torch, Subset, sampler of batches", "torch_select_by_batch", "torch", TORCH),
            Stream("Grain, filter", "grain_select", "grain", GRAIN),
            Stream("Grain, rows of a batch at once", "grain_select_gathered", "grain", GRAIN),
            Stream("datasets, filter", "datasets_select", "datasets", DATASETS),
        ],
    ),
    "A part of the rows": (
        "Millstream, a slice",
        lambda arrays: ms.ArraySampleSource(arrays)[part(len(arrays["label"]))],
        [
            Stream("torch, Subset", "torch_part", "torch", TORCH),
            Stream("Grain, slice", "grain_part", "grain", GRAIN),
            Stream("datasets, select", "datasets_part", "datasets", DATASETS),
        ],
    ),
    "Two halves as one": (
        "Millstream, concat",
        lambda arrays: ms.views.concat(*(ms.ArraySampleSource(data(len(arrays["label"]) // 2)) for _ in range(2))),
        [
            Stream("torch, ConcatDataset", "torch_concat", "torch", TORCH),
            Stream("Grain, concatenate", "grain_concat", "grain", GRAIN),
            Stream("datasets, concatenate_datasets", "datasets_concat", "datasets", DATASETS),
        ],
    ),
    "By weight": (
        "Millstream, weighted",
        lambda arrays: ms.views.weighted(ms.ArraySampleSource(arrays), weights(arrays)),
        [
            Stream("torch, WeightedRandomSampler", "torch_weighted", "torch", TORCH),
            Stream("torch, WeightedRandomSampler of batches", "torch_weighted_by_batch", "torch", TORCH),
            Stream("Grain, mix", "grain_weighted", "grain", GRAIN),
            Stream("Grain, mix, rows of a batch at once", "grain_weighted_gathered", "grain", GRAIN),
        ],
    ),
}


def millstream_rounds(view: Callable[[], Any], steps: int) -> Run:
    loader = ms.DataLoader([view(), ms.BatchTransform(BATCH, drop_last=True)])
    state = loader.init_state(jax.random.key(0))
    return rounds(lambda: loader.iterate(state), steps)


def measure(options: Options) -> list[Table]:
    rows, steps, tables = options.size(ROWS, 6_000), options.size(40, 4), []
    arrays = data(rows)
    for title, (ours, view, peers) in TASKS.items():
        with Libraries(options.also) as libraries:
            question = {"how": "pass", "module": "_views", "arguments": [rows, steps]}
            make = functools.partial(millstream_rounds, functools.partial(view, arrays), steps)
            entries = [Entry(ours, make, "millstream", steps)]
            entries += libraries.entries(peers, per_round=steps, **question)
            table = measured(title, "µs per batch", ours, entries, options.rounds(5))
        for peer in peers:
            if "batch" not in peer.label:  # the way that its documents show
                table.hold(f"times as fast as {peer.label}", table.ratio(peer.label, ours), at_least=5)
        tables.append(table)
    return tables


if __name__ == "__main__":
    main(measure)
