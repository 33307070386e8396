"""Parts of a source that share no sample, whatever happens to the source before or to the parts afterwards.

Which part a sample belongs to is decided by a hash of what it is: its index in the source that all views start from, or
the group it belongs to. So a sample that comes twice is in one part, and stays there when samples are appended. Parts
can be divided again, also with the same seed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from millstream.files.plan_folder import PlanFolder, Plans, folder_of
from millstream.plan.selection import index_dtype, listed
from millstream.reading.contracts import IndexedSource
from millstream.reading.executor import Executor, require_executor
from millstream.reading.view import View, view_of
from millstream.text.errors import describe_value, require_int, require_mapping, whole_number
from millstream.views._measure import Property, kept_tables, require_source, values_of
from millstream.views.joins import identities


def split(
    source: IndexedSource,
    parts: Mapping[str, float],
    *,
    by: Property | None = None,
    stratify: Property | None = None,
    seed: int = 0,
    executor: Executor | None = None,
    plans: Plans = None,
) -> tuple[View, ...]:
    """Views that divide the samples of a source, one for each name, in the order of the names.

    Fractions are thresholds of a hash, so that a sample stays in its part when others are appended, and parts are about
    as large as they say. Counts and `stratify` divide exactly, the samples that there are.

    Example:
        >>> source = ms.ArraySampleSource({"x": np.arange(1000)})
        >>> train, test = ms.views.split(source, {"train": 0.9, "test": 0.1})
        >>> len(train) + len(test)
        1000

    Args:
        source: A source or a view.
        parts: Fractions that add up to 1, or counts that add up to the number of samples, by name.
        by: Keep samples together that have this in common: the name of a field, a function of a sample, or an array
            with a value per sample.
        stratify: Give every part its fraction of each class: labels, in one of these three forms.
        seed: A different number is a different division.
        executor: Where samples are looked at, if they have to be.
        plans: Where the division is kept: a folder, or `ms.views.plans(folder)`; by default in memory.
    """
    require_source("split", source)
    require_mapping("split", "parts", parts, "a dict such as {'train': 0.9, 'test': 0.1}")
    shares = _shares(parts, len(source))
    _check("split", by, stratify, seed, executor)
    folder = folder_of("split", plans)

    def divide() -> list[np.ndarray]:
        hashes, classes = _hashes("split", source, by, stratify, seed, executor, folder)
        if classes is not None:
            member = _by_class(hashes, classes, _sizes(shares, len(source)))
        elif shares.dtype.kind == "f":
            bounds = (np.cumsum(shares)[:-1] * 2.0**64).clip(0, np.nextafter(2.0**64, 0)).astype(np.uint64)
            member = np.searchsorted(bounds, hashes, side="right")
        else:
            _require_unique("split by counts", hashes, by)
            member = np.empty(len(hashes), np.int64)
            member[np.argsort(hashes, kind="stable")] = np.repeat(np.arange(len(shares)), shares)
        chosen = [np.flatnonzero(member == number) for number in range(len(parts))]
        for name, positions in zip(parts, chosen, strict=True):
            if not len(positions):
                found = f"{len(source):,} samples" if by is None else f"{len(np.unique(hashes)):,} groups"
                raise ValueError(
                    f"split leaves nothing for {name!r}: there are {found}. Choose a different seed, fractions, or "
                    "counts."
                )
        return chosen

    return tuple(_views("split", source, folder, seed, (by, stratify, shares), list(parts), divide))


def folds(
    source: IndexedSource,
    count: int,
    *,
    by: Property | None = None,
    stratify: Property | None = None,
    seed: int = 0,
    executor: Executor | None = None,
    plans: Plans = None,
) -> list[tuple[View, View]]:
    """Cross-validation: `count` pairs of a view to train on and one to test on; every sample is in one test view.

    Example:
        >>> source = ms.ArraySampleSource({"x": np.arange(10)})
        >>> [(len(train), len(test)) for train, test in ms.views.folds(source, 5)]
        [(8, 2), (8, 2), (8, 2), (8, 2), (8, 2)]

    Args:
        source: A source or a view.
        count: How many folds, at least 2.
        by: As in `split`. Folds are then about equally large.
        stratify: As in `split`.
        seed: A different number is a different division.
        executor: Where samples are looked at, if they have to be.
        plans: Where the folds are kept: a folder, or `ms.views.plans(folder)`; by default in memory.
    """
    require_source("folds", source)
    require_int("folds", "count", count, least=2)
    if count > len(source):
        raise ValueError(f"folds cannot make {count:,} folds: there are only {len(source):,} samples.")
    _check("folds", by, stratify, seed, executor)
    folder = folder_of("folds", plans)

    def divide() -> list[np.ndarray]:
        hashes, classes = _hashes("folds", source, by, stratify, seed, executor, folder)
        if classes is not None:
            member = _by_class(hashes, classes, _sizes(np.full(count, 1.0 / count), len(source)))
        else:
            member = _by_size(hashes, count)
        tests = [np.flatnonzero(member == number) for number in range(count)]
        if not all(map(len, tests)):
            what = "groups" if by is not None else "samples"
            raise ValueError(f"folds cannot make {count:,} folds: there are only {len(np.unique(hashes)):,} {what}.")
        return [*(np.flatnonzero(member != number) for number in range(count)), *tests]

    names = [f"{kind}-{number}" for kind in ("train", "test") for number in range(count)]
    both = _views("folds", source, folder, seed, (by, stratify, count), names, divide)
    return list(zip(both[:count], both[count:], strict=True))


def _views(
    caller: str,
    source: IndexedSource,
    folder: PlanFolder | None,
    seed: int,
    arguments: Sequence[Any],
    names: Sequence[str],
    divide: Callable[[], Sequence[np.ndarray]],
) -> list[View]:
    """The views of the positions that a division gives, from their tables in plan files if there is a folder."""
    length = len(source)
    if folder is None:
        return [view_of(source, *listed(positions, length, seeds=(seed,))) for positions in divide()]
    arguments = (seed, *arguments)
    made = kept_tables(
        caller, source, folder, arguments, names, lambda: [chosen.astype(index_dtype(length)) for chosen in divide()]
    )
    return [view_of(source, *listed(table, length, digest, (seed,))) for table, digest in made]


def _check(caller: str, by: Property | None, stratify: Property | None, seed: int, executor: Executor | None) -> None:
    """Refuse arguments that `split` and `folds` have in common."""
    require_executor(caller, executor)
    whole_number(caller, "seed", seed, least=0, most=(1 << 63) - 1)
    if by is not None and stratify is not None:
        raise ValueError(f"{caller} takes by= or stratify=, not both: whole groups cannot be divided by class exactly.")


def _shares(parts: Mapping[str, float], length: int) -> np.ndarray:
    """Fractions as floats, or counts as integers."""
    if len(parts) < 2:
        raise ValueError(f"split needs at least two parts. Got {describe_value(dict(parts))}.")
    given = list(parts.values())
    numbers = [value for value in given if isinstance(value, int | float | np.number) and not isinstance(value, bool)]
    if len(numbers) < len(given) or not all(np.isfinite(number) and number > 0 for number in numbers):
        raise ValueError(f"split needs fractions or counts above zero. Got {describe_value(dict(parts))}.")
    if all(isinstance(number, int | np.integer) for number in numbers):
        counts = np.array(numbers, np.int64)
        if counts.sum() != length:
            raise ValueError(f"split needs counts that add up to {length:,} samples. Got {counts.sum():,}.")
        return counts
    shares = np.array(numbers, np.float64)
    if abs(shares.sum() - 1.0) > 1e-9:
        raise ValueError(
            f"split needs fractions that add up to 1. Got {' + '.join(f'{share:g}' for share in shares)} = "
            f"{shares.sum():g}. Name the rest too; a part that is not used costs nothing."
        )
    return shares


def _hashes(
    caller: str,
    source: IndexedSource,
    by: Property | None,
    stratify: Property | None,
    seed: int,
    executor: Executor | None,
    folder: PlanFolder | None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """A hash per sample, equal for samples that belong together, and the classes of a stratified division."""
    together = identities(caller, source) if by is None else values_of(caller, "by", source, by, executor, folder)
    hashes = mixed(together, seed)
    divided = source.selection.seeds if isinstance(source, View) else ()
    for _ in range(divided.count(seed)):  # a part has only those hashes that made it a part
        hashes = mixed(hashes, seed)
    if stratify is None:
        return hashes, None
    _require_unique(f"{caller} with stratify=", hashes, None)
    classes = values_of(caller, "stratify", source, stratify, executor, folder)
    return hashes, np.unique(classes, return_inverse=True)[1]


def _require_unique(caller: str, hashes: np.ndarray, by: Property | None) -> None:
    if by is not None:
        raise ValueError(f"{caller} cannot keep groups together. Give fractions.")
    if len(np.unique(hashes)) < len(hashes):
        raise ValueError(f"{caller} needs samples that come once. Divide the source before it is repeated.")


def _sizes(shares: np.ndarray, length: int) -> np.ndarray:
    """How many samples each part has: counts as they are, fractions of the length rounded so that they add up."""
    if shares.dtype.kind == "i":
        return shares
    ends = np.rint(np.cumsum(shares) * length).astype(np.int64)
    ends[-1] = length
    return np.diff(ends, prepend=0)


def _by_class(hashes: np.ndarray, classes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The part of every sample: parts of exactly these sizes, in which every class has its share, rounded."""
    # Parts take turns as evenly as their sizes allow, and classes are dealt out one after the other.
    places = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes.tolist()])
    turns = np.repeat(np.arange(len(sizes)), sizes)[np.argsort(places, kind="stable")]
    member = np.empty(len(hashes), np.int64)
    member[np.lexsort((hashes, classes))] = turns
    return member


def _by_size(hashes: np.ndarray, count: int) -> np.ndarray:
    """The fold of every sample: groups of equal hash together, the largest first, each into the smallest fold."""
    groups, which, sizes = np.unique(hashes, return_inverse=True, return_counts=True)
    if len(groups) == len(hashes):  # the usual case, without a loop
        return which % count
    fold_of, filled = np.empty(len(groups), np.int64), np.zeros(count, np.int64)
    for group in np.argsort(-sizes, kind="stable").tolist():
        fold_of[group] = smallest = int(np.argmin(filled))
        filled[smallest] += sizes[group]
    return fold_of[which]


@np.errstate(over="ignore")
def mixed(numbers: np.ndarray, seed: int) -> np.ndarray:
    """A 64-bit hash of 64-bit numbers: SplitMix64's finaliser (Steele, Lea and Flood, 2014), twice, with the seed."""
    found = numbers.astype(np.uint64) + np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15)
    for _ in range(2):
        found = found + np.uint64(0x9E3779B97F4A7C15)
        found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found = found ^ (found >> np.uint64(31))
    return found
