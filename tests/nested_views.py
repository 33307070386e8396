"""Random views of random sources, each beside what lists and loops make of it: the oracle of all laws of views."""

import collections
import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import millstream as ms
from millstream.plan import order
from millstream.plan.keys import fold, named_key

SAMPLES = 29
JOINED_AT = 11
WORD = (1 << 64) - 1


def fields(numbers) -> dict[str, np.ndarray]:
    """Samples that know their number."""
    x = np.asarray(list(numbers), np.int32)
    return {"x": x, "y": x % 4}


def sample(index: int) -> dict[str, Any]:
    return {"x": np.int32(index), "y": np.int32(index % 4)}


class Own:
    """A source that a user has written, with the least that it needs."""

    arrays = None

    def __init__(self, ordering: Any) -> None:
        self.ordering = ordering

    def __len__(self) -> int:
        return SAMPLES

    def spec(self) -> Any:
        return {name: jax.ShapeDtypeStruct((), np.int32) for name in ("x", "y")}

    def read(self, indices: Any, out: Any = None) -> Any:
        found = fields(np.asarray(indices))
        if out is None:
            return found
        for name, leaf in found.items():
            out[name][...] = leaf
        return out


def _arrays(first: int, last: int, ordering: Any) -> Any:
    return ms.ArraySampleSource(fields(range(first, last)), ordering)


def _dataset(first: int, last: int, ordering: Any) -> Any:
    return ms.DatasetSource([sample(index) for index in range(first, last)], ordering)


# Sample i of each of them is i, whatever it is read from.
SOURCES: dict[str, Callable[[Any], Any]] = {
    "arrays": lambda ordering: _arrays(0, SAMPLES, ordering),
    "arrays on the host": lambda ordering: ms.HostArraySource(fields(range(SAMPLES)), ordering),
    "a dataset": lambda ordering: _dataset(0, SAMPLES, ordering),
    "a function": lambda ordering: ms.DiskSampleSource(SAMPLES, sample, ordering=ordering),
    "a user's own": Own,
    "joined arrays": lambda ordering: ms.views.concat(
        _arrays(0, JOINED_AT, ordering), _arrays(JOINED_AT, SAMPLES, ordering)
    ),
    "joined": lambda ordering: ms.views.concat(_arrays(0, JOINED_AT, ordering), _dataset(JOINED_AT, SAMPLES, ordering)),
    "side by side": lambda ordering: ms.views.zip(
        {name: ms.ArraySampleSource(leaf, ordering) for name, leaf in fields(range(SAMPLES)).items()}
    ),
    "side by side, on the host": lambda ordering: ms.views.zip(
        {name: ms.HostArraySource(leaf, ordering) for name, leaf in fields(range(SAMPLES)).items()}
    ),
}


@dataclasses.dataclass
class Nested:
    """A view, and what is in it.

    Attributes:
        view: The view.
        at: From the key of a run and an epoch to the samples at all positions.
        identity: From a sample to the number that stands for it in splits.
        seeds: Of the splits that it is a part of.
        drawn: Whether samples are drawn anew every epoch.
    """

    view: Any
    at: Callable[[np.ndarray, int], list[int]]
    identity: Callable[[int], int]
    seeds: tuple[int, ...] = ()
    drawn: bool = False

    @property
    def samples(self) -> list[int]:
        """The samples at all positions, if they are the same every epoch."""
        assert not self.drawn
        return self.at(np.zeros(2, np.uint32), 0)

    def through(self, view: Any, change: Callable[[list[int]], list[int]], *seeds: int) -> "Nested":
        """What a view of it is, if that makes one list of another."""
        return dataclasses.replace(
            self, view=view, at=lambda words, epoch: change(self.at(words, epoch)), seeds=(*self.seeds, *seeds)
        )

    def epoch(self, words: np.ndarray, epoch: int) -> list[int]:
        """The samples of an epoch in the order in which they come."""
        known = self.at(words, epoch)
        if self.view.ordering == "sequential":
            return known
        key = order.epoch_key(np, words, np.uint32(epoch))
        return [known[int(order.shuffled(np, np.uint32(place), len(known), key))] for place in range(len(known))]


# What a view does to a source, and what that does to a list. Each is given chance and a nested view.


def sliced(chance: random.Random, nested: Nested) -> Nested:
    cuts = itertools.product([None, 0, 3, -7], [None, 9, 60, -2], [1, 2, -1, -3])
    cut = chance.choice([cut for cut in itertools.starmap(slice, cuts) if range(len(nested.view))[cut]])
    return nested.through(subscript(nested.view, cut), lambda known: known[cut])


def listed(chance: random.Random, nested: Nested, count: int | None = None) -> Nested:
    length = len(nested.view)
    picks = [chance.randrange(-length, length) for _ in range(count or chance.randint(1, 12))]
    return nested.through(subscript(nested.view, picks), lambda known: [known[pick] for pick in picks])


def masked(chance: random.Random, nested: Nested) -> Nested:
    mask = [chance.random() < 0.7 for _ in range(len(nested.view))]
    mask[chance.randrange(len(mask))] = True
    return nested.through(
        ms.views.select(nested.view, np.array(mask)), lambda known: list(itertools.compress(known, mask))
    )


def repeated(chance: random.Random, nested: Nested) -> Nested:
    times = chance.randint(1, 3)
    return nested.through(ms.views.repeat(nested.view, times), lambda known: known * times)


def filtered(chance: random.Random, nested: Nested) -> Nested:
    rest = chance.choice(nested.samples) % 3
    view = ms.views.select(nested.view, lambda sample: sample["x"] % 3 == rest)
    return nested.through(view, lambda known: [index for index in known if index % 3 == rest])


def doubled_back(chance: random.Random, nested: Nested) -> Nested:
    view = nested.view
    return nested.through(
        ms.views.concat(view, subscript(view, slice(None, None, -1)), subscript(view, slice(3))),
        lambda known: [*known, *known[::-1], *known[:3]],
    )


def part_of_split(chance: random.Random, nested: Nested) -> Nested:
    fractions = chance.choice([(0.5, 0.5), (0.8, 0.2), (0.3, 0.3, 0.4)])
    bounds = [int(bound * 2.0**64) for bound in itertools.accumulate(fractions)][:-1]
    seed, members = chance.randrange(2), []
    while set(members) != set(range(len(fractions))):
        if seed > 50:
            return nested  # one sample, however often it is repeated, is in one part
        seed += 1
        members = [sum(bound <= number for bound in bounds) for number in hashes_of(nested, seed)]
    views = ms.views.split(nested.view, dict(zip("abc", fractions, strict=False)), seed=seed)
    number = chance.randrange(len(fractions))
    kept = [member == number for member in members]
    return nested.through(views[number], lambda known: list(itertools.compress(known, kept)), seed)


def part_of_folds(chance: random.Random, nested: Nested) -> Nested:
    seed, count = chance.randrange(2), chance.randint(2, 4)
    hashes = hashes_of(nested, seed)
    sizes = collections.Counter(hashes)
    if len(sizes) < count:
        return nested
    fold_of: dict[int, int] = {}
    if len(sizes) == len(hashes):
        fold_of = {number: rank % count for rank, number in enumerate(sorted(sizes))}
    else:
        filled = [0] * count
        for number in sorted(sizes, key=lambda number: (-sizes[number], number)):
            fold_of[number] = filled.index(min(filled))
            filled[fold_of[number]] += sizes[number]
    tested, is_test = chance.randrange(count), chance.random() < 0.5
    kept = [(fold_of[number] == tested) == is_test for number in hashes]
    view = ms.views.folds(nested.view, count, seed=seed)[tested][is_test]
    return nested.through(view, lambda known: list(itertools.compress(known, kept)), seed)


def hashes_of(nested: Nested, seed: int) -> list[int]:
    """SplitMix64's finaliser of what stands for each sample, once more for every split with the same seed before."""
    return [hashed(nested.identity(index), seed, 1 + nested.seeds.count(seed)) for index in nested.samples]


def hashed(number: int, seed: int, times: int) -> int:
    for _ in range(times):
        number = (number + seed * 0x9E3779B97F4A7C15) & WORD
        for _ in range(2):
            number = (number + 0x9E3779B97F4A7C15) & WORD
            number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & WORD
            number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & WORD
            number ^= number >> 31
    return number


def weighted(chance: random.Random, nested: Nested) -> Nested:
    weights = [chance.choice([0.0, 0.1, 1.0, 2.5, 40.0]) for _ in range(len(nested.view))]
    weights[chance.randrange(len(weights))] = 1.0
    count = chance.choice([None, 1, 13, 150])
    view = ms.views.weighted(nested.view, weights, samples=count)
    return _drawn(nested, view, weights)


def balanced(chance: random.Random, nested: Nested) -> Nested:
    view = ms.views.balanced(nested.view, "y", samples=chance.choice([None, 24]))
    by_class = nested.through(None, lambda known: sorted(known, key=lambda index: index % 4))
    counts = collections.Counter(index % 4 for index in by_class.samples)
    return _drawn(by_class, view, [1.0 / counts[index % 4] for index in by_class.samples])


def _drawn(nested: Nested, view: Any, weights: list[float]) -> Nested:
    numbers = cumulated(weights, len(view))

    def at(words: np.ndarray, epoch: int) -> list[int]:
        offset = int(fold(np, named_key(words, "millstream weighted draws 1"), np.uint32(epoch))[0])
        known = nested.at(words, epoch)
        return [known[first_above(numbers, (draw << 32) | offset)] for draw in range(len(view))]

    return dataclasses.replace(nested, view=view, at=at, drawn=True)


def cumulated(weights: list[float], draws: int) -> list[int]:
    """Cumulated weights, scaled to the number of draws, with 32 bits after the point."""
    sums = list(itertools.accumulate(weights))
    last = max(row for row, weight in enumerate(weights) if weight)
    numbers = [min(int(total * (draws / sums[-1]) * 2.0**32), draws << 32) for total in sums]
    return [number if row < last else draws << 32 for row, number in enumerate(numbers)]


def first_above(numbers: list[int], wanted: int) -> int:
    return next(row for row, number in enumerate(numbers) if number > wanted)


def subscript(source: Any, chosen: Any) -> Any:
    """`source[chosen]`, also of a source that a user has written, which has no brackets."""
    if hasattr(source, "__getitem__"):
        return source[chosen]
    if isinstance(chosen, slice):
        chosen = np.arange(len(source))[chosen]
    return ms.views.select(source, np.asarray(chosen) % len(source))


PLAIN = [sliced, listed, masked, repeated]  # also of draws
FIXED = [*PLAIN, filtered, doubled_back, part_of_split, part_of_folds]
DRAWN = [weighted, balanced]


def source_of(chance: random.Random, kind: str | None = None, ordering: str | None = None) -> Nested:
    """A random source without views."""
    kind = kind or chance.choice(list(SOURCES))
    joined = kind.startswith("joined")
    return Nested(
        SOURCES[kind](ordering or chance.choice(["sequential", "shuffle"])),
        lambda words, epoch: list(range(SAMPLES)),
        lambda index: (1 << 48) | (index - JOINED_AT) if joined and index >= JOINED_AT else index,
    )


def nested_view(seed: int, length: int | None = None, kind: str | None = None) -> Nested:
    """The random view that belongs to a number, with that many samples if it says how many."""
    chance = random.Random(seed)
    nested = source_of(chance, kind)
    for _ in range(chance.randint(0, 4)):
        nested = chance.choice(FIXED)(chance, nested)
        if len(nested.view) > 300:
            nested = listed(chance, nested)
    if chance.random() < 0.5:
        nested = chance.choice(DRAWN)(chance, nested)
        for _ in range(chance.randint(0, 2)):
            nested = chance.choice(PLAIN)(chance, nested)
    return nested if length is None else listed(chance, nested, length)
