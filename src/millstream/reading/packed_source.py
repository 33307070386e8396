"""Rows of documents, read on the host: those of a batch together, each document once. It loads no JAX."""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from millstream.plan.keys import fold
from millstream.plan.packing import PackedRows
from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.dtypes import can_become, exactly, kept_dtype, narrowed
from millstream.reading.host_source import HostSource, as_host_source, read_like
from millstream.reading.padding import as_leaf
from millstream.reading.samples import TRIED, SampleSpec, spec_of
from millstream.reading.span_copy import SpanCopy, WantedPieces
from millstream.reading.stats import timed
from millstream.text.errors import describe_leaf, describe_value

Unscored = Literal["first", "last", "none"]
_DTYPE, _AXES = operator.attrgetter("dtype"), operator.attrgetter("ndim")


@dataclasses.dataclass(frozen=True)
class RowLeaves:
    """What a row has.

    Attributes:
        names: The leaves of documents that are packed.
        eos: What each of them has after the end of a document; None for nothing.
        fill: What each of them has after the last document of a row.
        segments: The leaf that numbers the segments; None for none.
        positions: The leaf that counts the tokens of each; None for none.
        loss_mask: The leaf that says which tokens count; None for none.
        unscored: Which token of a segment does not count.
    """

    names: tuple[str, ...]
    eos: Mapping[str, Any] | None
    fill: Mapping[str, Any]
    segments: str | None
    positions: str | None
    loss_mask: str | None
    unscored: Unscored


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A leaf that is packed: its place among those of a row, padding for a whole row, and the end of a document."""

    name: str
    place: int
    fill: np.ndarray
    eos: np.ndarray | None


class PackedSource(HostSource):
    """The rows that a plan makes of the documents of a source.

    Args:
        inner: The source, or a view.
        rows: The plan.
        length: Tokens of a row.
        leaves: What a row has.
    """

    def __init__(self, inner: IndexedSource, rows: PackedRows, length: int, leaves: RowLeaves) -> None:
        self._inner = host = as_host_source(inner)
        self._rows, self._length, self._name = rows, length, "pack"
        self._unscored, self._ramp = leaves.unscored, np.arange(length, dtype=np.int32)
        self.ordering = host.ordering
        read_like(self, [host])
        # Planning some rows costs as much as planning a batch, which pays only if documents take long to read.
        self.reads_together = host.reads_together or not self.calls_users
        kinds = self._kinds(leaves.names)
        tree: dict[str, Any] = {
            name: np.broadcast_to(np.zeros((), kept_dtype(kind.dtype)), (length, *kind.shape[1:]))
            for name, kind in kinds.items()
        }
        added = {leaves.segments: np.int32, leaves.positions: np.int32, leaves.loss_mask: np.bool_}
        tree |= {
            name: np.broadcast_to(np.zeros((), dtype), (length,)) for name, dtype in added.items() if name is not None
        }
        self.sample_spec = spec = spec_of(self._name, tree)
        places: dict[str | None, int] = spec.template
        self._leaves = [self._leaf(name, places[name], leaves) for name in leaves.names]
        self._segments, self._positions, self._mask = (
            places.get(name) for name in (leaves.segments, leaves.positions, leaves.loss_mask)
        )
        self._has_eos = leaves.eos is not None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def plan(self) -> tuple[PackedRows, int]:
        """The rows as they are planned, and how many tokens each has room for."""
        return self._rows, self._length

    def expect(self, indices: np.ndarray | None) -> None:
        if indices is None:
            return self._inner.expect(None)
        documents = self._rows.pieces(indices).documents
        if self.reads_together:  # a document that is cut is read once for all rows of a batch
            documents = documents[np.sort(np.unique(documents, return_index=True)[1])]
        self._inner.expect(documents)

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        if not len(indices):
            return
        wanted = self._wanted(indices)
        if keys is not None or not self._copy_spans(wanted, out):
            self._join_documents(wanted, out, keys)
        self._describe(wanted, out)

    def _wanted(self, rows: np.ndarray) -> WantedPieces:
        pieces = self._rows.pieces(rows)
        sizes, lasts, are_last = pieces.counts.copy(), pieces.lasts, pieces.are_last
        sizes[lasts] = self._length - pieces.places[lasts]
        counts = pieces.counts - are_last if self._has_eos else pieces.counts
        stops = pieces.starts + pieces.counts - self._has_eos
        most = np.where(are_last, stops, np.iinfo(np.int64).max)
        return WantedPieces(pieces, counts, sizes, stops + ~are_last, most)

    def _copy_spans(self, wanted: WantedPieces, out: Sequence[np.ndarray]) -> bool:
        """Write the packed leaves from the arrays that documents are slices of, without an object for each of them.

        Returns:
            Whether that was possible. If not, documents are read and joined, which names one that is wrong.
        """
        pieces, names = wanted.pieces, [leaf.name for leaf in self._leaves]
        targets = [out[leaf.place] for leaf in self._leaves]
        copies = [SpanCopy(name, target, wanted) for name, target in zip(names, targets, strict=True)]
        with timed("reading"):
            for part in self._inner.find_spans(names, pieces.documents):
                if part is None or not all(copy.copy(part[0], one) for copy, one in zip(copies, part[1], strict=True)):
                    return False
        if not all(copy.finish() for copy in copies):
            return False
        if self._has_eos:
            rows, ends = pieces.rows[pieces.are_last], (pieces.places + wanted.counts)[pieces.are_last]
            for leaf, target in zip(self._leaves, targets, strict=True):
                target[rows, ends] = leaf.eos
        self._pad(wanted, targets, [leaf.fill[0] for leaf in self._leaves])
        return True

    def _join_documents(self, wanted: WantedPieces, out: Sequence[np.ndarray], keys: np.ndarray | None) -> None:
        """Write the packed leaves from documents that are read together, each once."""
        pieces = wanted.pieces
        documents, which = pieces.documents, np.arange(len(pieces.documents))
        if keys is None:
            if not pieces.are_last.all() or pieces.starts.any():  # a document may be in several rows
                documents, which = np.unique(pieces.documents, return_inverse=True)
        else:  # a piece has a key of its own, by its row and its number there
            keys = np.stack(fold(np, (keys[pieces.rows, 0], keys[pieces.rows, 1]), pieces.numbers), axis=-1)
        with timed("reading"):
            samples = self._read_documents(documents, keys)
        for leaf in self._leaves:
            target = out[leaf.place]
            arrays = self._arrays(leaf.name, documents, samples, target.shape[2:], target.dtype)
            lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))[which]
            self._require_planned(leaf.name, wanted, lengths)
            self._write(leaf, wanted, list(map(arrays.__getitem__, which.tolist())), lengths, target)

    def _read_documents(self, documents: np.ndarray, keys: np.ndarray | None) -> list[PyTree]:
        inner = self._inner
        if not inner.whole_samples and isinstance(inner.sample_spec, SampleSpec):
            return inner.read_samples(documents, keys)[0]
        objects = np.empty(len(documents), object)  # as they are: nothing changes them, so that none is copied
        inner.read_rows(documents, [objects], keys)
        return objects.tolist()

    def _require_planned(self, name: str, wanted: WantedPieces, lengths: np.ndarray) -> None:
        """Refuse documents that do not have the lengths that rows are planned for.

        Args:
            name: The leaf whose lengths they are.
            wanted: The pieces of them.
            lengths: The length of the document of each piece.
        """
        wrong = wanted.differ(lengths)
        if wrong.any():
            at, pieces = int(np.argmax(wrong)), wanted.pieces
            least = wanted.least[at]
            planned = f"{least:,}" if pieces.are_last[at] else f"more than {least - 1 + self._has_eos:,}"
            raise ValueError(
                f"pack: sample {pieces.documents[at]}[{name!r}] has length {lengths[at]:,}, and {planned} was planned "
                "for it. Packed leaves of a sample need one length, which is the one in lengths=, and the same every "
                "time."
            )

    def _write(
        self,
        leaf: _Leaf,
        wanted: WantedPieces,
        parts: list[np.ndarray],
        lengths: np.ndarray,
        target: np.ndarray,
    ) -> None:
        """Write one leaf of whole rows: pieces, ends of documents and padding, joined by one call.

        Args:
            leaf: Which.
            wanted: The pieces.
            parts: The document of each; those that are not wanted whole are cut.
            lengths: Its length.
            target: The leaf in the batch.
        """
        pieces, counts = wanted.pieces, wanted.counts
        # Most documents are whole: to cut those too would take as long as to copy them.
        cut = np.flatnonzero(counts != lengths)
        stops = pieces.starts[cut] + counts[cut]
        for at, start, stop in zip(cut.tolist(), pieces.starts[cut].tolist(), stops.tolist(), strict=True):
            parts[at] = parts[at][start:stop]
        joined, before, eos, padding = [], 0, leaf.eos, wanted.sizes - pieces.counts
        ends = pieces.are_last if eos is not None else np.zeros_like(pieces.are_last)
        after = np.flatnonzero(ends | (padding > 0))
        for at, is_end, empty in zip(after.tolist(), ends[after].tolist(), padding[after].tolist(), strict=True):
            joined += parts[before : at + 1]
            before = at + 1
            if is_end:
                joined.append(eos)
            if empty:
                joined.append(leaf.fill[:empty])
        joined += parts[before:]
        shape = (-1, *target.shape[2:])
        if target.flags.c_contiguous:
            np.concatenate(joined, out=target.reshape(shape))
        else:  # memory that lies apart cannot be seen as one row
            target[...] = np.concatenate(joined).reshape(target.shape)

    def _describe(self, wanted: WantedPieces, out: Sequence[np.ndarray]) -> None:
        """Write what rows say about their tokens."""

        def spread(numbers: np.ndarray) -> np.ndarray:
            """A number of every piece at each of its tokens, and in the padding after it."""
            return np.repeat(numbers.astype(np.int32), wanted.sizes).reshape(-1, self._length)

        pieces = wanted.pieces
        rows, places = pieces.rows, pieces.places
        added = [out[leaf] for leaf in (self._segments, self._positions, self._mask) if leaf is not None]
        if self._segments is not None:
            out[self._segments][...] = spread(pieces.numbers + 1)
        if self._positions is not None:
            np.subtract(self._ramp, spread(places), out=out[self._positions])
        if self._mask is not None:
            mask = out[self._mask]
            mask[...] = True
            if self._unscored == "first":
                mask[rows, places] = False
            elif self._unscored == "last":
                mask[rows, places + pieces.counts - 1] = False
        self._pad(wanted, added, [0] * len(added))

    def _pad(self, wanted: WantedPieces, leaves: Sequence[np.ndarray], fills: Sequence[Any]) -> None:
        """Write the padding of some leaves."""
        pieces = wanted.pieces
        padded = np.flatnonzero(wanted.sizes != pieces.counts)
        ends = pieces.places[padded] + pieces.counts[padded]
        for row, end in zip(pieces.rows[padded].tolist(), ends.tolist(), strict=True):
            for leaf, fill in zip(leaves, fills, strict=True):
                leaf[row, end:] = fill

    def _arrays(
        self, name: str, documents: np.ndarray, samples: list[PyTree], shape: tuple[int, ...], dtype: np.dtype
    ) -> list[np.ndarray]:
        """A leaf of every document, in the dtype of its row, which most documents have."""
        numbers = documents.tolist()
        try:
            values = [sample[name] for sample in samples]
        except (KeyError, IndexError, TypeError):  # one by one, to say which of them it is
            values = [self._value(name, number, sample) for number, sample in zip(numbers, samples, strict=True)]
        axes = 1 + len(shape)
        if _are_alike(values, axes, shape, dtype):
            return values
        return [
            value
            if type(value) is np.ndarray and value.dtype == dtype and value.ndim == axes and value.shape[1:] == shape
            else self._array(name, number, value, shape, dtype)
            for number, value in zip(numbers, values, strict=True)
        ]

    def _array(self, name: str, number: int, value: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        what = f"pack: sample {number}[{name!r}]"
        array = as_leaf(what, value)
        if not array.size and array.ndim == 1:
            return np.empty((0, *shape), dtype)  # a list without items has no dtype of its own
        if array.shape[1:] != shape or not can_become(array.dtype, dtype):
            raise ValueError(
                f"{what} does not match the spec.\n  found: {describe_leaf(array)}\n"
                f"  spec:  shape ({', '.join(['any', *map(str, shape)])}), {dtype}\n"
                "Documents are packed along their first axis. Return the same dtype and other axes every time."
            )
        return narrowed(what, array, dtype)

    def _value(self, name: str, number: int, sample: Any) -> Any:
        try:
            return sample[name]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"pack: sample {number} has no leaf {name!r}. Got {describe_value(sample)}.") from None

    def _kinds(self, names: tuple[str, ...]) -> dict[str, np.ndarray]:
        """What each leaf is like in the first of a few documents where it is not an empty list, which has no dtype."""
        found: dict[str, np.ndarray] = {}
        errors: list[Exception] = []
        key = np.zeros(2, np.uint32) if self.keyed else None
        for number in self._rows.some_documents(TRIED):
            try:
                sample, _ = self._inner.read_sample(number, key)
            except Exception as error:  # which is reported when it is read for a batch, if others can be read
                errors.append(error)
                continue
            for name in names:
                value = self._value(name, number, sample)
                array = as_leaf(f"pack: sample {number}[{name!r}]", value)
                if name not in found and (array.size or hasattr(value, "dtype")):
                    found[name] = array
            if len(found) == len(names):
                return found
        if errors:
            raise errors[0]
        missing = next(name for name in names if name not in found)
        raise ValueError(
            f"pack: {missing!r} is an empty list in the first samples. Return it as an array with a dtype, such as "
            "np.asarray(tokens, np.int32)."
        )

    def _leaf(self, name: str, place: int, leaves: RowLeaves) -> _Leaf:
        spec = self.sample_spec
        shape, dtype = spec.shapes[place], spec.dtypes[place]

        def repeated(argument: str, value: Any, count: int) -> np.ndarray:
            kept = exactly(value, dtype)
            if kept is None:
                raise ValueError(f"pack has {argument}={value!r} for {name!r}, which is {dtype}, and cannot hold it.")
            return np.broadcast_to(kept, (count, *shape[1:]))

        eos = None if leaves.eos is None else repeated("eos", leaves.eos[name], 1)
        return _Leaf(name, place, repeated("fill", leaves.fill[name], self._length), eos)


def _are_alike(values: list[Any], axes: int, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether all are arrays of one kind; asked of all at once, which takes a third of asking one by one."""
    return (
        set(map(type, values)) == {np.ndarray}
        and set(map(_DTYPE, values)) == {dtype}
        and set(map(_AXES, values)) == {axes}
        and (axes == 1 or {value.shape[1:] for value in values} == {shape})
    )
