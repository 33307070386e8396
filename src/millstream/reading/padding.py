"""A source whose samples are padded to one length, or to the length of their bucket. It loads no JAX by itself."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.dtypes import can_become, check_array, exactly, kept_dtype, narrowed
from millstream.reading.host_source import HostSource, SampleReader, as_host_source, item_of
from millstream.reading.samples import NotAnArray, SampleSpec, first_sample, spec_of
from millstream.reading.stats import timed
from millstream.text.errors import describe_leaf, describe_value, noted

Side = Literal["right", "left"]
TooLong = Literal["raise", "cut end", "cut start"]
_DTYPE = "Return it as an array with a dtype, such as np.asarray(ids, np.int32)."


@dataclasses.dataclass(frozen=True)
class PaddedLeaf:
    """How one leaf is padded.

    Attributes:
        name: Its key in the sample.
        fill: What it is padded with.
        length: What it is padded to; None for the length of the bucket.
        mask: The key of the leaf that says which places are real; None for none.
        positions: The key of the leaf that counts the real places from 0; None for none.
    """

    name: str
    fill: Any
    length: int | None
    mask: str | None
    positions: str | None


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a padded leaf and what is added to it stand among the leaves of a sample."""

    leaf: PaddedLeaf
    fill: np.ndarray
    own: int
    mask: int | None
    positions: int | None


class PaddedSource(SampleReader):
    """Every sample of a source, with some of its leaves padded along their first axis.

    Args:
        inner: The source.
        leaves: What is padded, and how.
        side: Where the padding goes.
        too_long: What becomes of a leaf that is longer than its length.
        lengths: Those of the buckets; empty if there are none.
        first: The samples whose structure stands for all.
    """

    whole_samples = True

    def __init__(
        self,
        inner: IndexedSource,
        leaves: Sequence[PaddedLeaf],
        side: Side,
        too_long: TooLong,
        lengths: tuple[int, ...],
        first: Sequence[int],
    ) -> None:
        self._inner = as_host_source(inner)
        self._name = "PadTransform"
        self._side, self._too_long = side, too_long
        self.keyed = self._inner.keyed
        self.ordering = self._inner.ordering
        self.prefetch_size, self.readers = self._inner.prefetch_size, self._inner.readers
        self.looks_ahead = self._inner.looks_ahead
        key = np.zeros(2, np.uint32) if self.keyed else None
        self.first_sample, (sample, _) = first_sample(lambda index: self._inner.read_sample(index, key), first)
        self._require_leaves(self.first_sample, sample, leaves)
        shown = {leaf.name: self._shown(leaf, sample, first, key) for leaf in leaves}
        self._specs = tuple(self._spec(sample, leaves, shown, length) for length in lengths or (None,))
        self.sample_spec = spec = self._specs[-1]
        self._places = [_place(spec, leaf) for leaf in leaves]
        # A mask that a sample brings along is made anew.
        self._own_keys = {key for leaf in leaves for key in (leaf.name, leaf.mask, leaf.positions)}
        rest = self._rest(sample)
        self._rest_spec = spec_of(self._name, rest) if rest else None
        own = {place for one in self._places for place in (one.own, one.mask, one.positions)}
        self._rest_places = [place for place in range(len(spec.shapes)) if place not in own]

    def __len__(self) -> int:
        return len(self._inner)

    def expect(self, indices: np.ndarray | None) -> None:
        self._inner.expect(indices)

    def expect_blocks(self, indices: np.ndarray, bounds: np.ndarray) -> None:
        self._inner.expect_blocks(indices, bounds)

    @property
    def bucket_specs(self) -> tuple[SampleSpec, ...]:
        """The structure of a sample in each bucket of the plan."""
        return self._specs

    def of_bucket(self, number: int) -> HostSource:
        """The source as one bucket of the plan has it."""
        bucket = copy.copy(self)
        bucket._specs = (self._specs[number],)
        bucket.sample_spec = self._specs[number]
        return bucket

    def read_row(self, index: int, out: Sequence[np.ndarray], row: int, key: np.ndarray | None) -> Any:
        with timed("reading"):
            sample, extra = self._inner.read_sample(index, key)
        with timed(self._name):
            if not out[0].dtype.hasobject:
                self._write(index, sample, [leaf[row] for leaf in out], out, row)
                return extra
            spec = self._specs[-1]
            leaves = spec.empty(1)
            self._write(index, sample, [leaf[0] for leaf in leaves], leaves, 0)
            out[0][row] = spec.unflatten([leaf[0] for leaf in leaves])
        return extra

    def _write(self, index: int, sample: Any, targets: list[np.ndarray], out: Sequence[np.ndarray], row: int) -> None:
        """Write a sample into one row, which the targets are the leaves of."""
        for place in self._places:
            target = targets[place.own]
            array = self._array(index, sample, place.leaf.name, target)
            count, room = len(array), len(target)
            start = room - count if self._side == "left" else 0
            target[:start], target[start + count :] = place.fill, place.fill
            target[start : start + count] = array
            if place.mask is not None:
                mask = targets[place.mask]
                mask[...] = False
                mask[start : start + count] = True
            if place.positions is not None:
                positions = targets[place.positions]
                positions[...] = 0
                positions[start : start + count] = np.arange(count)
        if self._rest_spec is not None:
            rest = [out[place] for place in self._rest_places]
            self._rest_spec.write(self._name, rest, row, index, self._rest(sample))

    def _rest(self, sample: dict[str, Any]) -> dict[str, Any]:
        """What is not padded."""
        return {key: value for key, value in sample.items() if key not in self._own_keys}

    def _array(self, index: int, sample: Any, name: str, target: np.ndarray) -> np.ndarray:
        """A leaf as an array that fits into its row."""
        try:
            value = sample[name]
        except (KeyError, IndexError, TypeError):
            raise ValueError(
                f"{self._name}: sample {index} has no leaf {name!r}. Got {describe_value(sample)}."
            ) from None
        is_array = type(value) is np.ndarray and value.dtype == target.dtype and value.ndim == target.ndim
        if is_array and len(value) <= len(target) and value.shape[1:] == target.shape[1:]:
            return value  # the usual case, without a text
        what = f"{self._name}: sample {index}[{name!r}]"
        array, room = as_leaf(what, value), len(target)
        if len(array) > room:
            if self._too_long == "raise":
                raise ValueError(
                    f"{what} has length {len(array):,}, and is padded to {room:,}. Pass a larger length, or "
                    "too_long='cut end' to PadTransform. If it is in a bucket, the lengths that buckets was given are "
                    "wrong."
                )
            array = array[:room] if self._too_long == "cut end" else array[len(array) - room :]
        if not array.size and array.ndim == 1:
            return np.empty((0, *target.shape[1:]), target.dtype)  # a list without items has no dtype of its own
        if array.shape[1:] != target.shape[1:] or not can_become(array.dtype, target.dtype):
            raise ValueError(
                f"{what} does not match the spec.\n  found: {describe_leaf(array)}\n"
                f"  spec:  shape (any, {', '.join(map(str, target.shape[1:]))}), {target.dtype}\n"
                "Only the first axis is padded. Return the same dtype and other axes every time."
            )
        return narrowed(what, array, target.dtype)

    def _require_leaves(self, index: int, sample: Any, leaves: Sequence[PaddedLeaf]) -> None:
        if not isinstance(sample, dict):
            raise TypeError(
                f"{self._name} needs samples that are dicts. Sample {index} is {describe_value(sample)}. Name its "
                "parts first, such as ms.HostMapTransform(lambda sample: {'ids': sample[0], 'label': sample[1]})."
            )
        missing = [leaf.name for leaf in leaves if leaf.name not in sample]
        if missing:
            raise ValueError(
                f"{self._name}: sample {index} has no leaf {missing[0]!r}. Its leaves: {', '.join(map(str, sample))}."
            )

    def _shown(self, leaf: PaddedLeaf, known: Any, first: Sequence[int], key: np.ndarray | None) -> np.ndarray:
        """What a leaf is like in the first sample where it is not empty: an empty list has no dtype."""
        found = None
        for index in first:
            try:
                sample = known if index == self.first_sample else self._inner.read_sample(index, key)[0]
            except Exception:  # which is reported when it is read for a batch
                continue
            array = as_leaf(f"{self._name}: sample {index}[{leaf.name!r}]", sample[leaf.name])
            if array.size or hasattr(sample[leaf.name], "dtype"):
                return array
            found = index
        raise ValueError(f"{self._name}: {leaf.name!r} is an empty list in the first samples, as in {found}. {_DTYPE}")

    def _spec(
        self, sample: dict[str, Any], leaves: Sequence[PaddedLeaf], shown: dict[str, np.ndarray], bucket: int | None
    ) -> SampleSpec:
        tree: dict[str, PyTree] = dict(sample)
        for leaf in leaves:
            length = bucket if leaf.length is None else leaf.length
            if length is None:
                raise ValueError(
                    f"{self._name} needs length=, since no buckets say how long a batch is. Pass length=512, or put "
                    "ms.views.buckets(source, ...) first."
                )
            array = shown[leaf.name]
            dtype = kept_dtype(array.dtype)
            tree[leaf.name] = np.broadcast_to(np.zeros((), dtype), (length, *array.shape[1:]))
            if leaf.mask is not None:
                tree[leaf.mask] = np.broadcast_to(np.zeros((), bool), (length,))
            if leaf.positions is not None:
                tree[leaf.positions] = np.broadcast_to(np.zeros((), np.int32), (length,))
        try:
            return spec_of(self._name, tree)
        except NotAnArray as error:
            raise noted(error, "Leave it out, or make it a number, in a HostMapTransform before.")  # noqa: B904

    def item(self, index: int) -> Any:
        """The item as the source was given it."""
        return item_of(self._inner, index)

    def shown_spec(self) -> None:
        """None: to know it, a sample would be read."""

    def __repr__(self) -> str:
        return f"{self._inner!r} -> {self._name}"


def as_leaf(what: str, value: Any) -> np.ndarray:
    """A leaf that has a length, as an array."""
    check_array(what, value)
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.array(None)
    if array.ndim == 0 or array.dtype.hasobject or array.dtype.kind in "USOM":
        raise ValueError(f"{what} needs to be an array or a list of numbers. Got {describe_value(value)}.")
    return array


def _place(spec: SampleSpec, leaf: PaddedLeaf) -> _Place:
    number = spec.template[leaf.name]
    dtype = spec.dtypes[number]
    fill = exactly(leaf.fill, dtype)
    if fill is None:
        raise ValueError(f"PadTransform pads {leaf.name!r}, which is {dtype}, with {leaf.fill!r}, which is not.")
    mask = None if leaf.mask is None else spec.template[leaf.mask]
    return _Place(leaf, fill, number, mask, None if leaf.positions is None else spec.template[leaf.positions])
