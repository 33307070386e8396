"""Writing the samples of a shard: Arrow IPC, Parquet, `.npy`, Megatron's `.bin` and `.idx`, ArrayRecord.

What is written depends on the samples alone, down to the last byte. It loads no JAX: worker processes write.
"""

import contextlib
import itertools
import pathlib
import re
import struct
from collections.abc import Iterator, Sequence
from typing import IO, Any, Protocol

import numpy as np

from millstream.files.arrow_memory import array_of, bytes_array_of, ends_of
from millstream.files.atomic import written
from millstream.preparation.sample_form import BYTES, TEXT, Leaf, SampleForm
from millstream.text.errors import needs

FORMATS = ("arrow", "npy", "parquet", "megatron", "array_record")
_BLOCK = 1 << 20  # bytes of a record batch or row group: what reading a sample from another machine fetches
_BLOCK_ROWS = 1 << 16
_MAGIC, _PARQUET_MAGIC = 8, 4  # bytes of an Arrow IPC file before its schema, of a Parquet file before its data
_MEGATRON_CODES = {"|u1": 1, "|i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}


def check_form(caller: str, kind: str, form: SampleForm) -> None:
    """Refuse samples that a format cannot hold."""
    numbers = all(leaf.is_numbers for leaf in form.leaves)
    one = form.leaves[0] if len(form.leaves) == 1 else None
    tokens = one is not None and one.axes == 1 and one.of in _MEGATRON_CODES
    good = {
        "npy": numbers,
        "megatron": tokens,
        "array_record": one is not None and one.of == BYTES and one.axes == 0,
    }
    rules = {
        "npy": "numbers and arrays of one shape",
        "megatron": "one leaf, an array with one axis of " + ", ".join(np.dtype(code).name for code in _MEGATRON_CODES),
        "array_record": "one leaf, bytes: serialize them in the function",
    }
    if not good.get(kind, True):
        found = ", ".join(f"sample{leaf.path}: {leaf.words()}" for leaf in form.leaves)
        raise TypeError(f"{caller} with format={kind!r} needs samples of {rules[kind]}. Got {found}.")


def file_names(kind: str, form: SampleForm, number: int) -> list[str]:
    """The names of the files of a shard."""
    suffixes = {"megatron": ["bin", "idx"]}.get(kind, [kind])
    if kind == "npy":
        words = [re.sub(r"[^A-Za-z0-9_-]+", "-", leaf.name)[:40] for leaf in form.leaves]
        suffixes = [f"{word if words.count(word) == 1 else f'{place}-{word}'}.npy" for place, word in enumerate(words)]
    return [f"{number:05d}.{suffix}" for suffix in suffixes]


class ShardWriter(Protocol):
    """The files of a shard while they are written.

    Attributes:
        rows: How many samples each block has.
        ends: Where each block ends in its file, from the end of the one before it on, if it can be read alone.
        start: Where the first block begins.
    """

    rows: list[int]
    ends: list[int]
    start: int

    def add(self, values: Sequence[Any]) -> None:
        """Append a sample, by leaf. Arrays are copied: a function may use their memory again."""
        ...

    def finish(self) -> None:
        """Write what is left."""
        ...


@contextlib.contextmanager
def open_writer(kind: str, folder: pathlib.Path, names: Sequence[str], form: SampleForm) -> Iterator[ShardWriter]:
    """The writer of a shard, whose files get their names at the end of the block and vanish if it fails.

    The disk is not waited for: checksums tell what a power cut has taken, and all is flushed before the index is there.

    Args:
        kind: The format.
        folder: Where the files go.
        names: Their names.
        form: Of the samples.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(written(folder / name, alone=False, durable=False)) for name in names]
        writer: ShardWriter
        if kind == "npy":
            writer = _NpyWriter(files, form)
        elif kind == "megatron":
            writer = _MegatronWriter(files, form)
        elif kind == "array_record":
            writer = _ArrayRecordWriter(files)
        else:
            writer = _TableWriter(kind, files[0], form)
        yield writer
        writer.finish()


def require_packages(caller: str, kind: str) -> None:
    """Say how to install what a format needs, before anything is done."""
    if kind in ("arrow", "parquet"):
        with needs(f"{caller} with format={kind!r}", "pyarrow", "parquet"):
            import pyarrow  # noqa: F401
    if kind == "array_record":
        with needs(f"{caller} with format={kind!r}", "array_record", "array_record"):
            import array_record.python.array_record_module  # noqa: F401


class _TableWriter:
    """Record batches of Arrow, or row groups of Parquet: each a block."""

    def __init__(self, kind: str, file: IO[bytes], form: SampleForm) -> None:
        self.rows: list[int] = []
        self.ends: list[int] = []
        self._kind, self._file = kind, file
        self._schema, self._leaves = arrow_schema(form.leaves), form.leaves
        self._footers: list[Any] = []
        if kind == "arrow":
            import pyarrow as pa

            self._writer: Any = pa.ipc.new_file(file, self._schema)
        else:
            import pyarrow.parquet as pq

            options = {"write_page_checksum": True, "metadata_collector": self._footers}
            self._writer = pq.ParquetWriter(file, self._schema, **options)
        self.start = _MAGIC + self._schema.serialize().size if kind == "arrow" else _PARQUET_MAGIC
        self._begin()

    def _begin(self) -> None:
        self._columns = [_Column(leaf) for leaf in self._leaves]
        self._nbytes = self._count = 0

    def add(self, values: Sequence[Any]) -> None:
        for column, value in zip(self._columns, values, strict=True):
            self._nbytes += column.add(value)
        self._count += 1
        if self._nbytes >= _BLOCK or self._count == _BLOCK_ROWS:
            self._write()

    def _write(self) -> None:
        import pyarrow as pa

        batch = pa.record_batch([column.array() for column in self._columns], schema=self._schema)
        if self._kind == "arrow":
            self._writer.write_batch(batch)
            self.ends.append(self._file.tell())
        else:
            self._writer.write_batch(batch, row_group_size=self._count)
        self.rows.append(self._count)
        self._begin()

    def finish(self) -> None:
        if self._count:
            self._write()
        self._writer.close()
        for footer in self._footers:
            self.ends += [_group_end(footer.row_group(number)) for number in range(footer.num_row_groups)]


def _group_end(group: Any) -> int:
    """Where the last column of a row group ends."""
    columns = [group.column(number) for number in range(group.num_columns)]
    firsts = [min(filter(None, (one.data_page_offset, one.dictionary_page_offset))) for one in columns]
    return max(first + column.total_compressed_size for first, column in zip(firsts, columns, strict=True))


class _Column:
    """The values of a leaf in a block."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._values: list[Any] = []
        self._data = bytearray()  # of arrays, one after the other
        self._shapes: list[tuple[int, ...]] = []

    def add(self, value: Any) -> int:
        """Append a value; its bytes."""
        leaf = self._leaf
        if leaf.is_numbers and leaf.axes:
            self._data += np.ascontiguousarray(value).data.cast("B") if value.size else b""
            self._shapes.append(value.shape)
            return value.nbytes + 8
        self._values.append(value)
        if leaf.is_numbers:
            return value.nbytes
        return 8 + (sum(map(len, value)) + 8 * len(value) if leaf.axes else len(value))

    def array(self) -> Any:
        """As an array of Arrow."""
        import pyarrow as pa

        leaf, kind = self._leaf, arrow_type(self._leaf)
        if not leaf.is_numbers:
            return self._texts(kind)
        if not leaf.axes:
            return array_of(np.array(self._values, leaf.dtype))
        shapes = np.array(self._shapes, np.int64)
        sizes = np.prod(shapes, axis=1, dtype=np.int64)
        numbers = array_of(np.frombuffer(self._data, leaf.dtype))
        lists = pa.ListArray.from_arrays(array_of(self._ends(sizes, "an array", "numbers")), numbers)
        if leaf.axes == 1:
            return lists
        sizes = pa.FixedSizeListArray.from_arrays(array_of(shapes.ravel().astype(np.int32)), leaf.axes)
        return pa.StructArray.from_arrays([lists, sizes], fields=list(kind))

    def _texts(self, kind: Any) -> Any:
        """Text or bytes, or lists of them."""
        import pyarrow as pa

        values = list(itertools.chain.from_iterable(self._values)) if self._leaf.axes else self._values
        found = [value.encode() for value in values] if self._leaf.of == TEXT else values
        ends = self._ends([len(value) for value in found], "a value", "bytes")
        inner = bytes_array_of(found, ends, kind.value_type if self._leaf.axes else kind)
        if not self._leaf.axes:
            return inner
        counts = [len(value) for value in self._values]
        return pa.ListArray.from_arrays(array_of(self._ends(counts, "a list", "values")), inner)

    def _ends(self, sizes: Any, what: str, of: str) -> np.ndarray:
        """Where values with these sizes begin and end."""
        try:
            return ends_of(sizes)
        except OverflowError:
            raise ValueError(
                f"a sample has {what} of {max(sizes):,} {of} in sample{self._leaf.path}, and a list of Arrow holds "
                "fewer than 2,147,483,648. Have the function return it in several samples."
            ) from None


def arrow_type(leaf: Leaf) -> Any:
    """The type of a leaf's column. Arrays of several axes are their numbers and their shape."""
    import pyarrow as pa

    if leaf.of == TEXT:
        inner = pa.string()
    else:
        inner = pa.binary() if leaf.of == BYTES else pa.from_numpy_dtype(leaf.dtype)
    if leaf.axes > 1:
        return pa.struct([("data", pa.list_(inner)), ("shape", pa.list_(pa.int32(), leaf.axes))])
    return pa.list_(inner) if leaf.axes else inner


def arrow_schema(leaves: Sequence[Leaf]) -> Any:
    """The schema of samples with these leaves."""
    import pyarrow as pa

    return pa.schema([pa.field(leaf.name, arrow_type(leaf)) for leaf in leaves])


class _NpyWriter:
    """An `.npy` file for each leaf. Its header, which says how many rows there are, is written last."""

    def __init__(self, files: Sequence[IO[bytes]], form: SampleForm) -> None:
        self.rows = [0]
        self.ends: list[int] = []
        self.start = 0
        self._files, self._leaves = files, form.leaves
        for file, leaf in zip(files, form.leaves, strict=True):
            file.write(bytes(len(npy_header(leaf, 0))))

    def add(self, values: Sequence[Any]) -> None:
        for file, value in zip(self._files, values, strict=True):
            file.write(value.tobytes())
        self.rows[0] += 1

    def finish(self) -> None:
        for file, leaf in zip(self._files, self._leaves, strict=True):
            file.seek(0)
            file.write(npy_header(leaf, self.rows[0]))


def npy_header(leaf: Leaf, rows: int) -> bytes:
    """The header of an `.npy` with that many rows of a leaf; it is as long for any number of them."""
    shapes = [", ".join(map(str, (count, *(leaf.shape or ())))) + "," for count in (rows, 1 << 62)]
    said, longest = (f"{{'descr': {leaf.of!r}, 'fortran_order': False, 'shape': ({shape}), }}" for shape in shapes)
    size = -(-(10 + len(longest) + 1) // 64) * 64 - 10
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", size) + said.encode().ljust(size - 1) + b"\n"


class _MegatronWriter:
    """Megatron's pair of files: the tokens of all documents, and how many each has."""

    def __init__(self, files: Sequence[IO[bytes]], form: SampleForm) -> None:
        self.rows = [0]
        self.ends: list[int] = []
        self.start = 0
        self._tokens, self._index = files
        self._dtype = form.leaves[0].dtype
        self._lengths: list[int] = []

    def add(self, values: Sequence[Any]) -> None:
        self._tokens.write(values[0].tobytes())
        self._lengths.append(len(values[0]))
        self.rows[0] += 1

    def finish(self) -> None:
        count, code = len(self._lengths), _MEGATRON_CODES[self._dtype.str]
        lengths = np.array(self._lengths, "<i4")
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._index.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, count, count + 1))
        self._index.write(lengths.tobytes())
        self._index.write((ends[:-1] * self._dtype.itemsize).astype("<i8").tobytes())
        self._index.write(np.arange(count + 1, dtype="<i8").tobytes())


class _ArrayRecordWriter:
    """A record for each sample."""

    def __init__(self, files: Sequence[IO[bytes]]) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        self.rows = [0]
        self.ends: list[int] = []
        self.start = 0
        self._writer = ArrayRecordWriter(files[0].name, "group_size:1")

    def add(self, values: Sequence[Any]) -> None:
        self._writer.write(values[0])
        self.rows[0] += 1

    def finish(self) -> None:
        self._writer.close()
