"""Several sources as one: one after the other, or side by side."""

import builtins
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millstream.plan.mixture import Numbering
from millstream.plan.ordering import Ordering
from millstream.plan.selection import Selection, listed
from millstream.reading.blocks import block_sizes
from millstream.reading.contracts import IndexedSource
from millstream.reading.host_source import Beside, HostSource, SampleReader, as_host_source, item_of, read_like
from millstream.reading.samples import ObjectSpec, SampleSpec, spec_of
from millstream.reading.view import View, source_length, source_name
from millstream.sources.array import ArraySampleSource
from millstream.text.errors import describe_value, require_bool, table
from millstream.views._measure import require_listable, require_source

_PART = np.uint64(48)  # an identity is the number of a source and 48 bits of an index in it


def concat(*sources: IndexedSource, ordering: Ordering | None = None) -> ArraySampleSource | HostSource | View:
    """The samples of several sources, one source after the other.

    Arrays in memory are copied into one; files and other sources stay where they are.

    Example:
        >>> one, two = (ms.ArraySampleSource({"x": np.arange(n)}) for n in (3, 2))
        >>> len(ms.views.concat(one, two))
        5

    Args:
        *sources: Sources or views whose samples have the same structure, shapes and dtypes; they may have any where a
            function on the host makes them equal.
        ordering: "shuffle", "sequential" or a `Shuffle`; by default that of the first source.
    """
    if not sources:
        raise ValueError("concat needs at least one source. Got none.")
    for source in sources:
        require_source("concat", source)
    its_ordering: Any = ordering or sources[0].ordering  # which the plan checks
    return joined("concat", sources, its_ordering)


def joined(caller: str, sources: Sequence[IndexedSource], ordering: Ordering) -> ArraySampleSource | HostSource | View:
    """Sources and views, one after the other; see `concat`."""
    bases = list({id(base): base for base in map(base_of, sources)}.values())
    base = _chained(caller, bases, ordering)
    if len(bases) == len(sources) and base.ordering == ordering and not any(isinstance(s, View) for s in sources):
        return base
    starts = dict(builtins.zip(map(id, bases), np.cumsum([0, *map(len, bases)]).tolist(), strict=False))
    indices = np.concatenate([starts[id(base_of(source))] + located(source) for source in sources])
    divided = (source.selection.seeds for source in sources if isinstance(source, View))
    seeds = max(divided, key=len, default=())
    return View(base, Selection().after(*listed(indices, len(base), seeds=seeds)), ordering)


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


def identities(caller: str, source: IndexedSource, positions: np.ndarray | None = None) -> np.ndarray:
    """A number per sample, equal for those that must not be divided, that stays when samples are appended; uint64.

    Args:
        caller: The caller's name, for errors.
        source: The samples.
        positions: Which of them; None for all.
    """
    if isinstance(source, View) and source.selection.is_keyed:
        raise TypeError(f"{caller}: {source!r} differs from epoch to epoch. Divide its source, and weight the parts.")
    if positions is None:
        require_listable(caller, source)
        positions = np.arange(len(source))
    base, indices = base_of(source), source.locate(positions) if isinstance(source, View) else positions
    of_its_own = getattr(base, "identities", None)
    if of_its_own is not None:  # its samples are made of those of another source
        return of_its_own(caller, indices, identities)
    starts = getattr(base, "part_starts", None)
    if starts is None:
        return indices.astype(np.uint64)
    part = np.searchsorted(starts, indices, side="right") - 1
    return (part.astype(np.uint64) << _PART) | (indices - starts[part]).astype(np.uint64)


def base_of(source: IndexedSource) -> IndexedSource:
    """What a view selects from; a source itself."""
    return source.source if isinstance(source, View) else source


def joined_below(
    caller: str, sources: Mapping[str, IndexedSource], field: str | None
) -> tuple[IndexedSource, list[int]]:
    """What lies below some sources and views as one source, and the index that the samples of each begin at.

    Args:
        caller: The caller's name, for errors.
        sources: The sources, by name.
        field: Of every sample, where the number of its source is put; None to leave it out.
    """
    bases = {name: base_of(source) for name, source in sources.items()}
    names = {id(base): name for name, base in reversed(bases.items())}  # of several that are one, the first
    distinct = list({id(base): base for base in bases.values()}.values())
    base = _chained(caller, distinct, "sequential", [repr(names[id(one)]) for one in distinct])
    starts = dict(builtins.zip(map(id, distinct), np.cumsum([0, *map(len, distinct)]).tolist(), strict=False))
    rows = [starts[id(one)] for one in bases.values()]
    if field is None:
        return base, rows
    firsts = np.cumsum([0, *map(len, bases.values())]).tolist()
    return _Numbered(caller, base, Numbering(tuple(firsts[:-1]), tuple(rows)), firsts[-1], field), firsts[:-1]


def _together(names: list[str] | None, parts: Sequence[Any]) -> Any:
    return tuple(parts) if names is None else dict(builtins.zip(names, parts, strict=True))


def _chained(caller: str, bases: list[IndexedSource], ordering: Ordering, names: Sequence[str] | None = None) -> Any:
    """Sources without views, one after the other; their names are for errors."""
    if len(bases) == 1:
        return bases[0]
    names = [f"source {number}" for number in range(len(bases))] if names is None else names
    if all(isinstance(base, ArraySampleSource) for base in bases):
        return JoinedArrays(caller, bases, ordering, names)  # pyright: ignore[reportArgumentType]
    return JoinedSource(caller, bases, ordering, names)


def _part_starts(bases: Sequence[IndexedSource]) -> np.ndarray:
    """Where each source begins that is not joined itself: joining a and b and then c is joining the three."""
    starts = np.cumsum([0, *map(len, bases[:-1])])
    inner = (getattr(base, "part_starts", None) for base in bases)
    parts = builtins.zip(starts, inner, strict=True)
    return np.concatenate([start + (np.zeros(1, np.int64) if own is None else own) for start, own in parts])


def _require_equal(caller: str, parts: Sequence[IndexedSource], specs: list[Any], names: Sequence[str]) -> None:
    differing = [number for number, spec in enumerate(specs) if spec != specs[0]]
    if differing:
        shown = [
            (f"{names[number]}, {type(parts[number]).__name__}", _described(specs[number]))
            for number in (0, differing[0])
        ]
        raise ValueError(f"{caller} needs sources with equal samples. Got:\n{table(shown)}\nMake them alike first.")


def _described(spec: SampleSpec | ObjectSpec) -> str:
    if isinstance(spec, ObjectSpec):
        return f"Python objects ({spec.found})"
    leaves = builtins.zip(spec.names, spec.dtypes, spec.shapes, strict=True)
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, dtype, shape in leaves)


class JoinedArrays(ArraySampleSource):
    """Arrays of several sources as one."""

    def __init__(
        self, caller: str, bases: Sequence[ArraySampleSource], ordering: Ordering, names: Sequence[str]
    ) -> None:
        import jax

        _require_equal(caller, bases, [spec_of(caller, base.spec()) for base in bases], names)
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
    whole_samples = True

    def __init__(self, caller: str, bases: Sequence[IndexedSource], ordering: Ordering, names: Sequence[str]) -> None:
        self._parts = [as_host_source(base) for base in bases]
        specs = [part.sample_spec for part in self._parts]
        # Whole samples are checked where a batch is made.
        if not all(part.whole_samples or isinstance(part.sample_spec, ObjectSpec) for part in self._parts):
            _require_equal(caller, bases, specs, names)
        self._starts = np.cumsum([0, *map(len, bases[:-1])])
        self.part_starts = _part_starts(bases)
        self._length = sum(map(len, bases))
        self.ordering = ordering
        self.sample_spec = spec = next((spec for spec in specs if isinstance(spec, ObjectSpec)), specs[0])
        self._alike = [own == spec for own in specs]
        # A source that does not say its blocks is one: files that are joined are blocks.
        blocks = ((block_sizes(part), len(part)) for part in self._parts)
        self.blocks = np.concatenate([[length] if own is None else own for own, length in blocks])
        self.divides_blocks = all(part.divides_blocks or part.blocks is None for part in self._parts)
        self.reads_samples = all(isinstance(part, SampleReader) and part.reads_samples for part in self._parts)
        read_like(self, self._parts)

    def __len__(self) -> int:
        return self._length

    def item(self, index: int) -> Any:
        """The item as its source was given it."""
        part, local = self._at(index)[1:]
        return item_of(part, local)

    def expect(self, indices: np.ndarray | None) -> None:
        if indices is None:
            for part in self._parts:
                part.expect(None)
            return
        numbers = np.searchsorted(self._starts, indices, side="right") - 1
        for number in np.unique(numbers).tolist():
            self._parts[number].expect(indices[numbers == number] - self._starts[number])

    def expect_blocks(self, indices: np.ndarray, bounds: np.ndarray) -> None:
        numbers = np.searchsorted(self._starts, indices, side="right") - 1
        for number in np.unique(numbers).tolist():
            own, start, part = numbers == number, self._starts[number], self._parts[number]
            within = np.clip(bounds[own] - start, 0, len(part) - 1)
            part.expect_blocks(indices[own] - start, within)

    def _at(self, index: int) -> tuple[int, HostSource, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return number, self._parts[number], index - int(self._starts[number])

    def read_row(self, index: int, out: Sequence[np.ndarray], row: int, key: np.ndarray | None) -> Any:
        number, part, local = self._at(index)
        if out[0].dtype.hasobject or not self._alike[number]:
            sample, extra = part.read_sample(local, key)
            self.sample_spec.write("concat", out, row, index, sample)
            return extra
        if isinstance(part, SampleReader) and part.reads_samples:
            return part.read_row(local, out, row, key)
        keys = None if key is None else key[None]
        return (part.read_rows(np.array([local]), [leaf[row : row + 1] for leaf in out], keys) or {}).get(0)

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> Beside:
        # Part by part into memory of its own, and then all at once to where they belong: one call for each leaf.
        order, beside = indices.argsort(kind="stable"), {}
        ordered, found = indices.take(order), [np.empty_like(leaf) for leaf in out]
        ends = [0, *ordered.searchsorted(self._starts[1:]).tolist(), len(indices)]
        for number, (first, end) in enumerate(itertools.pairwise(ends)):
            if first == end:
                continue
            part, start = self._parts[number], self._starts[number]
            alike = self._alike[number] and not out[0].dtype.hasobject
            if alike and end - first == len(indices):
                return part.read_rows(indices - start, out, keys)
            local, its_keys = ordered[first:end] - start, None if keys is None else keys[order[first:end]]
            if alike:
                its_own = part.read_rows(local, [leaf[first:end] for leaf in found], its_keys)
            else:
                samples, its_own = part.read_samples(local, its_keys)
                for row, sample in enumerate(samples, first):
                    self.sample_spec.write("concat", found, row, int(ordered[row]), sample)
            if its_own:
                beside.update({int(order[first + row]): extra for row, extra in its_own.items()})
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        for leaf, read in builtins.zip(out, found, strict=True):
            read.take(places, axis=0, out=leaf, mode="clip")  # which asks least
        return beside


class _Numbered:
    """Sources one after the other, whose samples have the number of their source in a field."""

    def __init__(self, caller: str, base: IndexedSource, numbering: Numbering, length: int, field: str) -> None:
        self._base, self._numbering, self._length, self._field = base, numbering, length, field
        self.ordering: Ordering | str = base.ordering
        self.shown_as, self.shown_length = source_name(base), source_length(base)
        spec = base.spec()
        if spec is not None and type(spec) is not dict:
            raise TypeError(
                f"{caller} adds the field {field!r} to samples, so they need to be dicts. Got {describe_value(spec)}. "
                "Name the array: {'x': array}."
            )
        if spec is not None and field in spec:
            raise ValueError(f"{caller} would overwrite the field {field!r} of the samples. Pass a different name.")
        self.on_host: HostSource = NumberedSource(caller, self.shown_as, as_host_source(base), numbering, length, field)

    def __len__(self) -> int:
        return self._length

    def spec(self) -> Any:
        """The shape and dtype of one sample."""
        return self.on_host.spec()

    def read(self, indices: np.ndarray, out: Any = None) -> Any:
        """The samples at `indices`, stacked, as NumPy arrays."""
        return self.on_host.read(indices, out)

    @functools.cached_property
    def arrays(self) -> Any:
        """The same, gathered in a program; None if they are read on the host."""
        if self._base.arrays is None or self._length >= 1 << 32:
            return None
        from millstream.pipeline.rows import NumberedArrays

        return NumberedArrays(self._base.arrays, self._numbering, self._field)


class NumberedSource(SampleReader):
    """The same, read on the host."""

    def __init__(
        self, caller: str, name: str, inner: HostSource, numbering: Numbering, length: int, field: str
    ) -> None:
        self._view, self._name = caller, name  # that adds the field, and that has the samples
        self._inner, self._numbering, self._length, self._field = inner, numbering, length, field
        self.ordering = inner.ordering
        read_like(self, [inner])
        self.reads_samples, self.whole_samples = inner.reads_samples, inner.whole_samples
        self.reads_together = inner.reads_together
        self.sample_spec, spec = inner.sample_spec, inner.sample_spec
        if isinstance(spec, SampleSpec):
            count = len(spec.shapes)
            leaves = [np.empty(shape, dtype) for shape, dtype in builtins.zip(spec.shapes, spec.given, strict=True)]
            self.sample_spec = spec_of(caller, {**spec.unflatten(leaves), field: np.int32(0)})
            numbers = {**spec.unflatten(list(range(count))), field: count}
            self._places = np.argsort(self.sample_spec.flatten(caller, numbers)).tolist()  # of the leaves, then of it

    def __len__(self) -> int:
        return self._length

    def item(self, index: int) -> Any:
        """The item as its source was given it."""
        return item_of(self._inner, self._numbering.of(index)[1])

    def read_row(self, index: int, out: Sequence[np.ndarray], row: int, key: np.ndarray | None) -> Any:
        assert isinstance(self._inner, SampleReader)
        number, local = self._numbering.of(index)
        extra = self._inner.read_row(local, self._leaves(out), row, key)
        self._write_number(index, out, row, number)
        return extra

    def expect(self, indices: np.ndarray | None) -> None:
        self._inner.expect(None if indices is None else self._numbering.rows_at(indices))

    def _read_one(self, index: int, out: Sequence[np.ndarray], keys: np.ndarray | None) -> Any:
        return (self.read_rows(np.array([index]), out, keys) or {}).get(0)

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> Beside:
        numbers, local = self._numbering.at(np, indices)
        beside = self._inner.read_rows(local, self._leaves(out), keys)
        if not out[0].dtype.hasobject:
            out[self._places[-1]][...] = numbers
            return beside
        for row, number in enumerate(numbers.tolist()):
            self._write_number(int(indices[row]), out, row, number)
        return beside

    def _leaves(self, out: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Those that the source below writes."""
        return out if out[0].dtype.hasobject else [out[place] for place in self._places[:-1]]

    def _write_number(self, index: int, out: Sequence[np.ndarray], row: int, number: int) -> None:
        if not out[0].dtype.hasobject:
            out[self._places[-1]][row] = number
            return
        sample = out[0][row]
        if type(sample) is not dict:
            raise TypeError(
                f"{self._view} adds the field {self._field!r} to samples, so they need to be dicts. Sample {index} "
                f"is {describe_value(sample)}. Make it one: source.map(lambda sample: {{'x': sample}})."
            )
        if self._field in sample:
            raise ValueError(
                f"{self._view} would overwrite the field {self._field!r} of sample {index}. Pass a different name."
            )
        out[0][row] = {**sample, self._field: np.int32(number)}


class ZippedSource(HostSource):
    """Sources that are read on the host, side by side."""

    ordering: Ordering
    whole_samples = True

    def __init__(
        self, parts: Sequence[IndexedSource], names: list[str] | None, length: int, ordering: Ordering
    ) -> None:
        self._parts = [as_host_source(part) for part in parts]
        self._names = names
        self._length = length
        self.ordering = ordering
        read_like(self, self._parts)
        specs = [part.sample_spec for part in self._parts]
        objects = next((spec for spec in specs if isinstance(spec, ObjectSpec)), None)
        if objects is not None:
            self.sample_spec = ObjectSpec(objects.found)
            return
        arrays = [spec for spec in specs if isinstance(spec, SampleSpec)]
        self.sample_spec = spec = spec_of("zip", _together(names, [part.tree() for part in arrays]))
        counts = [len(part.shapes) for part in arrays]
        numbers = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
        numbered = [part.unflatten(own.tolist()) for part, own in builtins.zip(arrays, numbers, strict=True)]
        places = np.argsort(spec.flatten("zip", _together(names, numbered)))
        self._places = [places[own].tolist() for own in numbers]  # of the leaves of each part

    def __len__(self) -> int:
        return self._length

    def expect(self, indices: np.ndarray | None) -> None:
        for part in self._parts:
            part.expect(indices)

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> Beside:
        beside: dict[int, Any] = {}
        if out[0].dtype.hasobject:
            columns = []
            for part in self._parts:
                samples, its_own = part.read_samples(indices, keys)
                columns.append(samples)
                _add(beside, its_own)
            for row, sample in enumerate(builtins.zip(*columns, strict=True)):
                out[0][row] = _together(self._names, sample)
            return beside
        for part, places in builtins.zip(self._parts, self._places, strict=True):
            _add(beside, part.read_rows(indices, [out[place] for place in places], keys))
        return beside


def _add(beside: dict[int, Any], its_own: Beside) -> None:
    for row, extra in (its_own or {}).items():
        beside[row] = {**beside.get(row, {}), **extra}
