"""Several sources as one: one after the other, or side by side."""

import builtins
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millstream.plan.ordering import Ordering
from millstream.plan.selection import Selection, listed
from millstream.reading.contracts import IndexedSource
from millstream.reading.derived_sources import item_of
from millstream.reading.host_source import HostSource, SampleReader, as_host_source, read_like
from millstream.reading.samples import ObjectSpec, SampleSpec, spec_of
from millstream.reading.view import View
from millstream.sources.array import ArraySampleSource
from millstream.text.errors import require_bool, table
from millstream.views._measure import require_source

_PART = np.uint64(48)  # an identity is the number of a source and 48 bits of an index in it


def concat(*sources: IndexedSource, ordering: Ordering | None = None) -> ArraySampleSource | HostSource | View:
    """The samples of several sources, one source after the other.

    Arrays in memory are copied into one; files and other sources stay where they are.

    Example:
        >>> one, two = (ms.ArraySampleSource({"x": np.arange(n)}) for n in (3, 2))
        >>> len(ms.views.concat(one, two))
        5

    Args:
        *sources: Sources or views whose samples have the same structure, shapes and dtypes.
        ordering: "shuffle", "sequential" or a `Shuffle`; by default that of the first source.
    """
    if not sources:
        raise ValueError("concat needs at least one source. Got none.")
    for source in sources:
        require_source("concat", source)
    its_ordering: Any = ordering or sources[0].ordering  # which the plan checks
    bases = list({id(base): base for base in map(_base, sources)}.values())
    joined = _chained(bases, its_ordering)
    if len(bases) == len(sources) and joined.ordering == its_ordering and not any(isinstance(s, View) for s in sources):
        return joined
    starts = dict(builtins.zip(map(id, bases), np.cumsum([0, *map(len, bases)]).tolist(), strict=False))
    indices = np.concatenate([starts[id(_base(source))] + located(source) for source in sources])
    divided = (source.selection.seeds for source in sources if isinstance(source, View))
    seeds = max(divided, key=len, default=())
    return View(joined, Selection().after(*listed(indices, len(joined), seeds=seeds)), its_ordering)


def zip(
    *sources: IndexedSource | Mapping[str, IndexedSource], shortest: bool = False, ordering: Ordering | None = None
) -> ArraySampleSource | HostSource:
    """Samples of several sources side by side: sample i holds sample i of each.

    Example:
        >>> images, labels = ms.ArraySampleSource(np.zeros((3, 8, 8))), ms.ArraySampleSource(np.arange(3))
        >>> sorted(ms.views.zip({"image": images, "label": labels}).spec())
        ['image', 'label']

    Args:
        *sources: Sources or views, whose samples make a tuple; or one dict of them, whose samples make a dict.
        shortest: Whether sources may have different lengths, of which the shortest counts.
        ordering: "shuffle", "sequential" or a `Shuffle`; by default that of the first source.
    """
    named = sources[0] if len(sources) == 1 and isinstance(sources[0], Mapping) else None
    names = None if named is None else list(named)
    parts: list[IndexedSource] = list(sources if named is None else named.values())  # pyright: ignore
    if not parts:
        raise ValueError("zip needs at least one source. Got none.")
    for part in parts:
        require_source("zip", part)
    require_bool("zip", "shortest", shortest)
    lengths = [len(part) for part in parts]
    if len(set(lengths)) > 1 and not shortest:
        shown = names or [f"source {number}" for number in range(len(parts))]
        rows = builtins.zip(shown, (f"{length:,} samples" for length in lengths), strict=True)
        raise ValueError(f"zip needs sources of equal length. Got:\n{table(rows)}\nPass shortest=True, or slice them.")
    its_ordering: Any = ordering or parts[0].ordering  # which the plan checks
    arrays = [part for part in parts if isinstance(part, ArraySampleSource)]
    if len(arrays) == len(parts):
        import jax

        data = [jax.tree.map(lambda leaf: leaf[: min(lengths)], part.data) for part in arrays]
        return ArraySampleSource(_together(names, data), its_ordering)
    return ZippedSource(parts, names, min(lengths), its_ordering)


def located(source: IndexedSource) -> np.ndarray:
    """The index of every sample in the source that all views start from."""
    positions = np.arange(len(source))
    return source.locate(positions) if isinstance(source, View) else positions


def identities(caller: str, source: IndexedSource) -> np.ndarray:
    """A number per sample that stays the same when samples are appended to its source, as uint64."""
    if isinstance(source, View) and source.selection.is_keyed:
        raise TypeError(f"{caller}: {source!r} differs from epoch to epoch. Divide its source, and weight the parts.")
    base, indices = _base(source), located(source)
    starts = getattr(base, "part_starts", None)
    if starts is None:
        return indices.astype(np.uint64)
    part = np.searchsorted(starts, indices, side="right") - 1
    return (part.astype(np.uint64) << _PART) | (indices - starts[part]).astype(np.uint64)


def _base(source: IndexedSource) -> IndexedSource:
    return source.source if isinstance(source, View) else source


def _together(names: list[str] | None, parts: Sequence[Any]) -> Any:
    return tuple(parts) if names is None else dict(builtins.zip(names, parts, strict=True))


def _chained(bases: list[IndexedSource], ordering: Ordering) -> Any:
    """Sources without views, one after the other."""
    if len(bases) == 1:
        return bases[0]
    if all(isinstance(base, ArraySampleSource) for base in bases):
        return JoinedArrays(bases, ordering)  # pyright: ignore[reportArgumentType]
    return JoinedSource(bases, ordering)


def _part_starts(bases: Sequence[IndexedSource]) -> np.ndarray:
    """Where each source begins that is not joined itself: joining a and b and then c is joining the three."""
    starts = np.cumsum([0, *map(len, bases[:-1])])
    inner = (getattr(base, "part_starts", np.zeros(1, np.int64)) for base in bases)
    return np.concatenate([start + own for start, own in builtins.zip(starts, inner, strict=True)])


def _require_equal(parts: Sequence[IndexedSource], specs: list[Any]) -> None:
    differing = [number for number, spec in enumerate(specs) if spec != specs[0]]
    if differing:
        shown = [
            (f"source {number}, {type(parts[number]).__name__}", _described(specs[number]))
            for number in (0, differing[0])
        ]
        raise ValueError(f"concat needs sources with equal samples. Got:\n{table(shown)}\nMake them alike first.")


def _described(spec: SampleSpec | ObjectSpec) -> str:
    if isinstance(spec, ObjectSpec):
        return f"Python objects ({spec.found})"
    leaves = builtins.zip(spec.names, spec.dtypes, spec.shapes, strict=True)
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, dtype, shape in leaves)


class JoinedArrays(ArraySampleSource):
    """Arrays of several sources as one."""

    def __init__(self, bases: Sequence[ArraySampleSource], ordering: Ordering) -> None:
        import jax

        _require_equal(bases, [spec_of("concat", base.spec()) for base in bases])
        data = jax.tree.map(
            lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *(b.data for b in bases)
        )
        for leaf in jax.tree.leaves(data):
            leaf.flags.writeable = False  # nobody else has it, so it need not be copied again
        super().__init__(data, ordering)
        object.__setattr__(self, "part_starts", _part_starts(bases))


class JoinedSource(SampleReader):
    """Sources that are read on the host, one after the other: sample by sample if all of them are."""

    ordering: Ordering

    def __init__(self, bases: Sequence[IndexedSource], ordering: Ordering) -> None:
        self._parts = [as_host_source(base) for base in bases]
        _require_equal(bases, [_comparable(part.sample_spec) for part in self._parts])
        self._starts = np.cumsum([0, *map(len, bases[:-1])])
        self.part_starts = _part_starts(bases)
        self._length = sum(map(len, bases))
        self.ordering = ordering
        self.whole_samples = all(part.whole_samples for part in self._parts)
        self.sample_spec = self._parts[0].sample_spec
        self.reads_samples = all(isinstance(part, SampleReader) and part.reads_samples for part in self._parts)
        read_like(self, self._parts)

    def __len__(self) -> int:
        return self._length

    def item(self, index: int) -> Any:
        """The item as its source was given it."""
        part, local = self._at(index)
        return item_of(part, local)

    def _at(self, index: int) -> tuple[HostSource, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._parts[number], index - int(self._starts[number])

    def read_row(self, index: int, out: Sequence[np.ndarray], row: int, key: np.ndarray | None) -> Any:
        part, local = self._at(index)
        if isinstance(part, SampleReader) and part.reads_samples:
            return part.read_row(local, out, row, key)
        part.read_rows(np.array([local]), [leaf[row : row + 1] for leaf in out], None if key is None else key[None])

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        which = np.searchsorted(self._starts, indices, side="right") - 1
        for number in np.unique(which).tolist():
            rows = np.flatnonzero(which == number)
            part, local = self._parts[number], indices[rows] - self._starts[number]
            its_keys = None if keys is None else keys[rows]
            if len(rows) == len(indices):
                return part.read_rows(local, out, its_keys)
            found = [np.empty((len(rows), *leaf.shape[1:]), leaf.dtype) for leaf in out]
            part.read_rows(local, found, its_keys)
            for leaf, read in builtins.zip(out, found, strict=True):
                leaf[rows] = read


def _comparable(spec: SampleSpec | ObjectSpec) -> SampleSpec | str:
    return "objects" if isinstance(spec, ObjectSpec) else spec


class ZippedSource(HostSource):
    """Sources that are read on the host, side by side."""

    ordering: Ordering

    def __init__(
        self, parts: Sequence[IndexedSource], names: list[str] | None, length: int, ordering: Ordering
    ) -> None:
        self._parts = [as_host_source(part) for part in parts]
        self._length = length
        specs = [
            _require_arrays(f"source {number}" if names is None else names[number], part.sample_spec)
            for number, part in enumerate(self._parts)
        ]
        self.ordering = ordering
        self.sample_spec = spec = spec_of("zip", _together(names, [part.tree() for part in specs]))
        counts = [len(part.shapes) for part in specs]
        numbers = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
        numbered = [part.unflatten(own.tolist()) for part, own in builtins.zip(specs, numbers, strict=True)]
        places = np.argsort(spec.flatten("zip", _together(names, numbered)))
        self._places = [places[own].tolist() for own in numbers]  # of the leaves of each part
        read_like(self, self._parts)

    def __len__(self) -> int:
        return self._length

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        for part, places in builtins.zip(self._parts, self._places, strict=True):
            part.read_rows(indices, [out[place] for place in places], keys)


def _require_arrays(name: str, spec: SampleSpec | ObjectSpec) -> SampleSpec:
    if isinstance(spec, ObjectSpec):
        raise TypeError(f"zip needs samples that are arrays. Those of {name} are Python objects ({spec.found}).")
    return spec
