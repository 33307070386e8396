"""Sources whose samples are read on the host: the base, and how any indexed source becomes one."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from millstream.files.changed import FileStamp
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.dtypes import narrowed
from millstream.reading.samples import ObjectSpec, SampleSpec, own_copy, spec_of
from millstream.reading.view import Subscriptable, View, source_name
from millstream.text.summaries import never_raising

# What travels with the rows of a batch, by row, as plain values by name; None for nothing.
Beside = dict[int, dict[str, PyTree]] | None

# A leaf of some samples in one array: the array, and where along its first axis each of them begins and ends.
Spans = tuple[np.ndarray, np.ndarray, np.ndarray]
# Which of the samples that were asked for, and the spans of each leaf.
FoundSpans = tuple[np.ndarray | slice, Sequence[Spans]]


class HostSource(Subscriptable):
    """An indexed source without arrays. A subclass has a length, `sample_spec` and `read_rows`; the rest follows.

    Example:
        >>> class Squares(ms.sources.HostSource):
        ...     ordering = "sequential"
        ...     sample_spec = ms.sources.spec_of("Squares", {"x": np.float32(0)})
        ...     def __len__(self):
        ...         return 10
        ...     def read_rows(self, indices, out, keys=None):
        ...         out[0][...] = indices**2
        >>> Squares().read(np.array([3, 4]))
        {'x': array([ 9., 16.], dtype=float32)}

    Attributes:
        ordering: "shuffle", "sequential" or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
        readers: How many threads share the reading of a batch.
        sample_spec: The structure of a sample, or that it is a Python object.
        first_sample: The sample that the spec was found by: the first that can be read.
        keyed: Whether reading wants a key for every sample.
        whole_batches: Whether a batch must be read by one call.
        reads_together: Whether rows are best read by one call, by one thread.
        calls_users: Whether reading rows calls a function of the user's, which may take any time.
        reads_samples: Whether it has a `read_row` for single samples.
        whole_samples: Whether it reads whole samples and writes them by `sample_spec.write`. Functions on the host then
            get samples of any shape, as they are.
        stamps: Name, size, and time or version of each file that samples are read from, if that is known. A plan file
            of `ms.views` is not used for other ones.
        blocks: How many samples each block that they are stored in has, in order: row groups, shards. None if there are
            none. `Shuffle("blocks")` reads them almost in sequence.
        divides_blocks: Whether a part of a block can be read without the rest, so that few large ones may be divided.
        cache_bytes: How much of its blocks it keeps in memory, so that those in use are not read again; None if none or
            not known. A block shuffle has half of that in use by default.
        functions: Those of the user's that samples go through, first to last.
        looks_ahead: Whether it makes use of `expect`.
    """

    ordering: Ordering
    prefetch_size: int = 64
    readers: int = 1
    sample_spec: SampleSpec | ObjectSpec
    first_sample: int = 0
    keyed: bool = False
    whole_batches: bool = False
    reads_together: bool = False
    calls_users: bool = False
    reads_samples: bool = False
    whole_samples: bool = False
    stamps: Sequence[FileStamp] = ()
    blocks: Sequence[int] | np.ndarray | None = None
    divides_blocks: bool = False
    cache_bytes: int | None = None
    functions: Sequence[Callable[..., object]] = ()
    looks_ahead: bool = False

    arrays = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "read_rows" in vars(cls) and "find_spans" not in vars(cls):
            cls.find_spans = HostSource.find_spans  # its base would find what the base reads

    def __len__(self) -> int:
        raise NotImplementedError

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> Beside:
        """Write the samples at `indices` into the rows of `out`, one array per leaf of the spec.

        Args:
            indices: Which samples.
            out: One array per leaf; its rows may hold anything. The dtypes are those of a batch, or, for a function on
                the host, those of the source.
            keys: Two uint32 words per sample, if the source is `keyed` and this is not a validation run.

        Returns:
            Plain values that travel with the batch, as a dict for each row that has some; None if there are none.
        """
        raise NotImplementedError

    def expect(self, indices: np.ndarray | None) -> None:
        """Prepare for samples that will be read next, in this order, after those of earlier calls.

        A source of files on other machines fetches them ahead. It is a hint: what is read does not depend on it.

        Args:
            indices: Which samples; None if those that were expected will not be read.
        """

    def expect_blocks(self, indices: np.ndarray, bounds: np.ndarray) -> None:
        """As `expect`, for samples whose neighbours are all read soon, too: those of a block shuffle.

        Args:
            indices: Which samples.
            bounds: The first and the last sample of the block of each, (samples, 2).
        """
        self.expect(indices)

    def expect_runs(self, starts: np.ndarray, length: int) -> None:
        """As `expect`, for what `read_runs` will read: `length` samples from each of `starts` on."""
        self.expect((starts[:, None] + np.arange(length)).ravel())

    def read_runs(self, starts: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        """Write the samples from each of `starts` on into a row of `out`: as many as its second axis is long.

        Windows are read by it. A source whose samples lie one after the other may do it faster than by `read_rows`.
        """
        indices = starts[:, None] + np.arange(out[0].shape[1])
        self.read_rows(indices.ravel(), [leaf.reshape(-1, *leaf.shape[2:]) for leaf in out], keys)

    def find_spans(self, names: Sequence[str], indices: np.ndarray) -> Iterator[FoundSpans | None]:
        """Find where leaves of samples lie, if each is a slice of an array: packed rows are copied from there.

        Args:
            names: Leaves of the samples, which are dicts.
            indices: Which samples; some may be asked for several times.

        Yields:
            Which of `indices` lie in the same arrays (a slice stands for all), and for each leaf that array, and where
            each begins and ends in it. They are copied before the next. None if some are not found this way: all are
            then read by `read_rows`.
        """
        yield None

    def spec(self) -> PyTree:
        """The shape and dtype of one sample; None if it is a Python object."""
        return self.sample_spec.tree()

    def read(self, indices: np.ndarray, out: PyTree | None = None) -> PyTree:
        """The samples at `indices`, stacked, as NumPy arrays, into `out` if it is given; or a list of objects."""
        return self.read_keyed(indices, None, out)

    def read_keyed(self, indices: np.ndarray, keys: np.ndarray | None, out: PyTree | None = None) -> PyTree:
        """As `read`, with a key for every sample."""
        spec = self.sample_spec
        if isinstance(spec, ObjectSpec):
            return self._read_objects(indices, keys)
        if out is None:
            out = spec.unflatten(spec.empty(len(indices)))
        self.read_rows(indices, spec.flatten("out", out), keys)
        return out

    @property
    def bucket_specs(self) -> "tuple[SampleSpec | ObjectSpec, ...]":
        """The structure of a sample in each bucket of the plan; only padding makes them differ."""
        return (self.sample_spec,)

    def of_bucket(self, number: int) -> "HostSource":
        """The source as one bucket of the plan has it."""
        return self

    def read_samples(self, indices: np.ndarray, keys: np.ndarray | None) -> tuple[list[PyTree], Beside]:
        """Samples one by one, as functions on the host get them, and what travels with them."""
        if self.whole_samples or isinstance(spec := self.sample_spec, ObjectSpec):
            objects = np.empty(len(indices), object)
            beside = self.read_rows(indices, [objects], keys)
            return [own_copy(sample) for sample in objects.tolist()], beside
        leaves = spec.empty(len(indices), given=True)
        beside = self.read_rows(indices, leaves, keys)
        return spec.samples(leaves), beside

    def _read_objects(self, indices: np.ndarray, keys: np.ndarray | None) -> list[Any]:
        objects = np.empty(len(indices), object)
        self.read_rows(indices, [objects], keys)
        return objects.tolist()

    def read_sample(self, index: int, key: np.ndarray | None) -> tuple[PyTree, PyTree]:
        """One sample as functions on the host get it, and what its reading returned beside it."""
        keys = None if key is None else key[None]
        if self.whole_samples or isinstance(spec := self.sample_spec, ObjectSpec):
            objects = np.empty(1, object)
            extra = self._read_one(index, [objects], keys)
            return own_copy(objects[0]), extra
        out = spec.empty(1, given=True)
        extra = self._read_one(index, out, keys)
        return spec.unflatten([leaf[0] for leaf in out]), extra

    def _read_one(self, index: int, out: Sequence[np.ndarray], keys: np.ndarray | None) -> PyTree:
        beside = self.read_rows(np.array([index]), out, keys)
        return beside.get(0) if isinstance(beside, dict) else None

    @never_raising
    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} samples, {self.sample_spec})"


class SampleReader(HostSource):
    """A host source that reads sample by sample, so that faults and delays can be told to the very sample."""

    reads_samples = True

    def read_row(self, index: int, out: Sequence[np.ndarray], row: int, key: np.ndarray | None) -> PyTree:
        """Write one sample into one row; what it returns travels with the batch as plain values."""
        raise NotImplementedError

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> Beside:
        beside = {}
        for row, index in enumerate(indices.tolist()):
            extra = self.read_row(index, out, row, None if keys is None else keys[row])
            if extra is not None:
                beside[row] = extra
        return beside

    def _read_one(self, index: int, out: Sequence[np.ndarray], keys: np.ndarray | None) -> PyTree:
        return self.read_row(index, out, 0, None if keys is None else keys[0])


class ArrayRows:
    """The rows of NumPy arrays, in memory or mapped."""

    stamps: Sequence[FileStamp] = ()  # mapped arrays have their files

    def __init__(self, caller: str, data: PyTree, spec: SampleSpec) -> None:
        self.spec = spec
        self._caller = caller
        self._leaves = [np.asarray(leaf) for leaf in spec.flatten(caller, data)]

    def __len__(self) -> int:
        return len(self._leaves[0])

    @property
    def data(self) -> PyTree:
        """The arrays, as a tree."""
        return self.spec.unflatten(self._leaves)

    def take(self, indices: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """Write the rows at `indices` into `out`, one array per leaf."""
        for leaf, target in zip(self._leaves, out, strict=True):
            take_rows(self._caller, leaf, indices, target)


def take_rows(caller: str, array: np.ndarray, indices: np.ndarray, out: np.ndarray) -> None:
    """Write the rows of an array at `indices`, which must be in range, into `out`, in the dtype that it has."""
    if array.dtype == out.dtype:
        np.take(array, indices, axis=0, out=out, mode="clip")  # "raise" would go through a buffer
    else:
        out[...] = narrowed(caller, np.take(array, indices, axis=0), out.dtype)


class Rows(Protocol):
    """Rows that lie in arrays or files."""

    @property
    def spec(self) -> SampleSpec | ObjectSpec:
        """The structure of a row."""
        ...

    @property
    def stamps(self) -> Sequence[FileStamp]:
        """Of the files they are read from, if that is known."""
        ...

    def __len__(self) -> int: ...

    @property
    def data(self) -> PyTree:
        """The arrays, or what takes their place, as a tree."""
        ...

    def take(self, indices: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """Write the rows at `indices` into `out`, one array per leaf."""
        ...


class RowSource(HostSource):
    """A host source whose samples are rows of arrays or files; all it does is what its rows do."""

    def __init__(self, rows: Rows, ordering: Ordering, prefetch_size: int = 64) -> None:
        self.array_rows, self.stamps = rows, rows.stamps
        self.sample_spec, self.ordering, self.prefetch_size = rows.spec, ordering, prefetch_size
        if getattr(rows, "looks_ahead", False):
            self.looks_ahead = self.reads_together = True  # neighbours are one request, and others go out at once

    def __len__(self) -> int:
        return len(self.array_rows)

    @property
    def data(self) -> PyTree:
        """The arrays, as a tree."""
        return self.array_rows.data

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        self.array_rows.take(indices, out)

    def expect(self, indices: np.ndarray | None) -> None:
        if self.looks_ahead:
            self.array_rows.expect(indices)  # pyright: ignore[reportAttributeAccessIssue]


class _Gathered(RowSource):
    """A source of arrays, read on the host under its own name."""

    def __init__(self, name: str, rows: ArrayRows, ordering: Ordering) -> None:
        super().__init__(rows, ordering)
        self._name = name

    @never_raising
    def __repr__(self) -> str:
        return f"{self._name}({len(self):,} samples, {self.sample_spec})"


def read_like(source: HostSource, inner: Sequence[HostSource]) -> None:
    """Have a source over others read as the most demanding of them needs it."""
    source.prefetch_size = max(part.prefetch_size for part in inner)
    source.readers = max(part.readers for part in inner)
    source.keyed = any(part.keyed for part in inner)
    source.calls_users = any(part.calls_users or part.reads_samples for part in inner)
    source.stamps = [stamp for part in inner for stamp in part.stamps]
    source.functions = [function for part in inner for function in part.functions]
    source.looks_ahead = any(part.looks_ahead for part in inner)
    source.cache_bytes = min((part.cache_bytes for part in inner if part.cache_bytes is not None), default=None)


class _Selected(HostSource):
    """The samples of a view, read through its source."""

    def __init__(self, view: View) -> None:
        self._inner = inner = as_host_source(view.source)
        self._view = View(inner, view.selection, view.ordering)  # worker processes have no use for JAX's arrays
        self._name = source_name(view.source)
        ordering: Any = view.ordering  # which the plan checks
        self.ordering = ordering
        self.sample_spec, self.whole_samples = inner.sample_spec, inner.whole_samples
        self.reads_together, self.divides_blocks = inner.reads_together, inner.divides_blocks
        read_like(self, [inner])
        view.locate(np.zeros(0, np.int64))  # refuses a view that needs a key

    def __len__(self) -> int:
        return len(self._view)

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> Beside:
        return self._inner.read_rows(self._view.locate(indices), out, keys)

    def find_spans(self, names: Sequence[str], indices: np.ndarray) -> Iterator[FoundSpans | None]:
        return self._inner.find_spans(names, self._view.locate(indices))

    def expect(self, indices: np.ndarray | None) -> None:
        self._inner.expect(None if indices is None else self._view.locate(indices))


class _Adapted(HostSource):
    """A user's own indexed source, read through its `read`."""

    calls_users = True

    def __init__(self, source: IndexedSource) -> None:
        self._source = source
        self._caller = type(source).__name__
        self._spec = spec_of(self._caller, source.spec())
        ordering: Any = source.ordering  # which the plan checks
        self.ordering = ordering
        self.sample_spec = self._spec
        self.stamps = getattr(source, "stamps", ())
        self.blocks = getattr(source, "blocks", None)
        self.cache_bytes = getattr(source, "cache_bytes", None)

    def __len__(self) -> int:
        return len(self._source)

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        self._spec.write_rows(f"{self._caller}.read", out, self._source.read(indices))

    def __repr__(self) -> str:
        return repr(self._source)


def as_host_source(source: IndexedSource) -> HostSource:
    """Any indexed source as one that is read on the host."""
    if isinstance(source, HostSource):
        return source
    if isinstance(source, View):
        return _Selected(source)
    if hasattr(source, "on_host"):
        return source.on_host  # pyright: ignore[reportAttributeAccessIssue]
    if source.arrays is None:
        return _Adapted(source)
    import jax

    name = type(source).__name__
    data = jax.tree.map(np.asarray, getattr(source, "data", source.arrays))  # on a CPU this shares the memory
    spec = spec_of(name, jax.tree.map(lambda leaf: leaf[0], data))
    ordering: Any = source.ordering  # which the plan checks
    return _Gathered(name, ArrayRows(name, data, spec), ordering)


def item_of(source: IndexedSource, index: int) -> Any:
    """What a source has at an index, as it was given it, or, failing that, as it reads it."""
    if hasattr(source, "item"):
        return source.item(index)  # pyright: ignore[reportAttributeAccessIssue]
    return as_host_source(source).read_sample(index, None)[0]
