"""Random divisions of random views, and random views of their parts: no sample may come in two of them.

`python -m soak.split_leaks COUNT SEED`, in `tests`, prints an outcome as a line of JSON. Nothing is compiled: the plan
finds samples in NumPy.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import random
import subprocess
import sys
from typing import Any

import nested_views
import numpy as np
from nested_views import Nested, doubled_back, listed, masked, repeated, sliced

import millstream as ms
from millstream.plan.ordering import Shuffle
from millstream.plan.plan import Batching, Plan
from millstream.views.joins import located
from soak import chaos

NAME = "split leaks"
TESTS = pathlib.Path(__file__).parent.parent
LINKS = [sliced, listed, masked, repeated, doubled_back]
ORDERINGS = ["sequential", "shuffle", Shuffle("reseed"), Shuffle("repeat"), Shuffle("batchwise", first_epoch=False)]
KINDS = list(nested_views.SOURCES)
OTHERS = 1000  # the first sample of a second source


@functools.cache
def source(kind: str) -> Any:
    """Sources do not change, and making one takes longer than dividing it."""
    return nested_views.SOURCES[kind]("shuffle")


@functools.cache
def other_source() -> Any:
    return ms.ArraySampleSource(nested_views.fields(range(OTHERS, OTHERS + 40)))


def some_views(chance: random.Random, nested: Nested, most: int) -> Nested:
    """Up to that many views, one of the other; never very long ones."""
    for _ in range(chance.randint(0, most)):
        nested = chance.choice(LINKS)(chance, nested)
        if len(nested.view) > 200:
            nested = listed(chance, nested)
    return nested


def divided(chance: random.Random, view: Any) -> tuple[tuple[Any, ...], np.ndarray | None]:
    """The parts of a random division; and the group of every position, if whole groups are kept together."""
    indices, group_of = located(view), np.random.default_rng(chance.randrange(1 << 32)).integers(0, 6, 2 * OTHERS)
    seed, groups = chance.randrange(3), group_of[indices]
    ways: list[dict[str, Any]] = [{}, {"by": groups}, {"stratify": groups}, {"by": "y"}]
    options = chance.choices(ways, [10, 5, 3, 1])[0]
    if chance.random() < 0.3:
        pairs = ms.views.folds(view, chance.randint(2, 4), seed=seed, **options)
        parts = chance.choice(pairs) if chance.random() < 0.5 else tuple(test for _, test in pairs)
    else:
        fractions = chance.choice([(0.5, 0.5), (0.8, 0.2), (0.6, 0.2, 0.2)])
        count = chance.randint(1, max(1, len(view) - 1))
        counts = (count, len(view) - count)
        sizes = counts if "by" not in options and chance.random() < 0.3 else fractions
        parts = ms.views.split(view, dict(zip("abc", sizes, strict=False)), seed=seed, **options)
    return parts, groups if options.get("by") is groups else None


def divided_somehow(chance: random.Random, nested: Nested) -> tuple[tuple[Any, ...], np.ndarray | None]:
    """A division that is possible: most samples may be one, or all groups in one part."""
    for _ in range(20):
        try:
            return divided(chance, nested.view)
        except ValueError:  # such as: counts of samples that come twice, or nothing left for a part
            continue
    return (), None


def samples_of(chance: random.Random, view: Any) -> set[int]:
    """The samples that a run over a view comes across from a random step on, as its source reads them."""
    ordering, length = chance.choice(ORDERINGS), len(view)
    recurs = isinstance(ordering, Shuffle) and ordering.recurs
    size = chance.randint(1, length)
    batching = Batching(size, chance.choice(["pad", "drop"] if recurs else ["pad", "drop", "wrap"]), length)
    plan = Plan(length, ordering, (batching,), view.selection)
    words = np.array([chance.randrange(1 << 32) for _ in range(2)], np.uint32)
    steps = chance.randrange(3 * batching.length) + np.arange(batching.length + 1)
    positions, rows = plan.at(np, words, steps)
    indices = plan.indices(np, words, rows[-1].epoch, positions)[rows[-1].mask]
    return set(view.source.read(np.unique(indices).astype(np.int64))["x"].tolist())


def leaks_of(number: int) -> list[str]:
    """What is wrong with the case that belongs to a number."""
    chance = random.Random(number)
    kind = chance.choice(KINDS)
    nested = dataclasses.replace(nested_views.source_of(chance, kind), view=source(kind))
    nested = some_views(chance, nested, 3)
    parts, groups = divided_somehow(chance, nested)
    others = ms.views.split(other_source(), {name: 1 / len(parts) for name in "abcd"[: len(parts)]}) if parts else ()
    wrong, seen = [], []
    if groups is not None and parts:
        inside = [set(groups[part.selection.tables[0]].tolist()) for part in parts]
        wrong += [f"group {group} in two parts" for a, b in itertools.combinations(inside, 2) for group in a & b]
    for part, other in zip(parts, others, strict=True):
        view = dataclasses.replace(nested, view=part, at=lambda words, epoch: [])
        if chance.random() < 0.3:  # parts may be divided again
            smaller, _ = divided_somehow(chance, view)
            view = dataclasses.replace(view, view=chance.choice(smaller) if smaller else part)
        if chance.random() < 0.3:
            view = dataclasses.replace(view, view=ms.views.concat(view.view, other))
        view = some_views(chance, view, 3)
        if chance.random() < 0.2:
            weights = [chance.random() + 0.01 for _ in range(len(view.view))]
            view = dataclasses.replace(view, view=ms.views.weighted(view.view, weights))
        seen.append(samples_of(chance, view.view))
    for (one, first), (two, second) in itertools.combinations(enumerate(seen), 2):
        wrong += [f"sample {index} in parts {one} and {two}" for index in sorted(first & second)]
    return [f"case {number}: {what}" for what in wrong]


def outcome_of(count: int, seed: int) -> chaos.Outcome:
    """The outcome of some cases, in a process of their own."""
    command = [sys.executable, "-m", "soak.split_leaks", str(count), str(seed)]
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
    if run.returncode:
        return chaos.Outcome(NAME, count, failures=[run.stderr[-8000:]])
    return chaos.Outcome(**json.loads(run.stdout.splitlines()[-1]))


def main(count: str, seed: str) -> None:
    outcome = chaos.Outcome(NAME)
    for number in range(int(count) * int(seed), int(count) * (int(seed) + 1)):
        outcome.add(leaks_of(number))
    print(json.dumps(dataclasses.asdict(outcome)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
