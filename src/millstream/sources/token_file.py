"""Files of token numbers, mapped into memory: nanoGPT, llm.c, Megatron, OLMo."""

import contextlib
import dataclasses
import functools
import io
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from millstream.files.data_files import File, LocalFile, expect, forget, is_remote, open_file
from millstream.files.file_index import chunks, file_index
from millstream.files.paths import Path, Paths, find_files
from millstream.files.plan_folder import PlanFolder, Plans, folder_of
from millstream.plan.ordering import Ordering
from millstream.reading.dtypes import narrowed, require_dtype
from millstream.reading.host_source import FoundSpans, HostSource
from millstream.reading.samples import spec_of
from millstream.sources.array import check_reading
from millstream.sources.file_rows import RangedRows, map_rows, take_rows
from millstream.sources.npy import read_npy_header
from millstream.text.errors import noted, table, whole_number
from millstream.text.summaries import never_raising

_CALLER = "TokenFileSource"
_MAPPED = 256  # files: a map needs a descriptor as long as it is there, and 1,024 is a usual limit
_LLM_C = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}  # by magic number and version
_LLM_C_BYTES = 1024
_NPY = b"\x93NUMPY"
_MEGATRON = b"MMIDIDX\0\0"
_MEGATRON_HEAD = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating numbers


class TokenFileSource(HostSource):
    """The documents of token files: `{"tokens": array}`, as long as each is. Files stay on disk and are mapped.

    What a file is, is found in the file. Megatron's `.bin` has an `.idx` beside it, which says where documents begin.
    `.npy` files of one axis and those of llm.c have a header. All others are nothing but tokens, as nanoGPT and OLMo
    write them, and need a `dtype`.

    `lengths` are known without reading, so that `ms.views.buckets` and the like plan at once. `tokens` has all tokens
    in a row, for windows of them.

    Example:
        >>> np.array([5, 6, 0, 7, 0], np.uint16).tofile("train.bin")
        >>> source = ms.sources.TokenFileSource("train.bin", np.uint16, end_token=0)
        >>> source.lengths.tolist(), source[1]["tokens"].tolist()
        ([3, 2], [7, 0])
        >>> crops = ms.views.windows(source.tokens, 4, stride=1)
        >>> len(crops), crops[1]["tokens"].tolist()
        (2, [6, 0, 7, 0])

    Args:
        paths: A file, a folder, a pattern such as "data/*.bin", an address, or a list of such.
        dtype: Of the tokens of files that do not say it: np.uint16 for most vocabularies of nanoGPT, np.uint32 for
            larger ones.
        end_token: The token that ends a document, and belongs to it. By default a file is one document, but for
            Megatron's.
        start_token: In place of it, the token that begins a document.
        plans: Where the places of documents are kept, if they had to be looked for: a folder, or
            `ms.views.plans(folder)`; by default in memory.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    whole_samples = True
    divides_blocks = True

    def __init__(
        self,
        paths: Paths,
        dtype: DTypeLike | None = None,
        *,
        end_token: int | None = None,
        start_token: int | None = None,
        plans: Plans = None,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        check_reading(_CALLER, ordering, prefetch_size)
        split = _Split.of(end_token, start_token)
        given = None if dtype is None else _whole_numbers(require_dtype(_CALLER, "dtype", dtype))
        folder = folder_of(_CALLER, plans)
        found = find_files(_CALLER, paths, (".bin", ".npy"))
        opened = [_open(path, given, split) for path in found]
        _require_alike(opened)
        bounds = [one.documents(split, folder) for one in opened]
        if split is not None and all(len(part) == 2 for part in bounds):
            _require_found(opened, split)
        self._files = _TokenFiles([one.part for one in opened])
        firsts = self._files.firsts
        # Of a single file they stay where they are, which may be a plan file.
        joined = [part[:-1] + first for part, first in zip(bounds, firsts, strict=False)]
        self._bounds = bounds[0] if len(bounds) == 1 else np.concatenate([*joined, firsts[-1:]])
        self.stamps = [file.stamp for one in opened for file in one.files]
        self.blocks = np.array([len(part) - 1 for part in bounds])
        self.ordering: Ordering = ordering
        self.prefetch_size = prefetch_size
        self.looks_ahead = self.reads_together = self._files.looks_ahead
        self.sample_spec = _spec(self._files.dtype, int(self._bounds[1] - self._bounds[0]))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens each document has."""
        return np.diff(self._bounds)

    @functools.cached_property
    def tokens(self) -> HostSource:
        """All tokens of all files in a row, as a source with one token per sample, for `ms.views.windows`.

        Windows inside documents: `ms.views.windows(source.tokens, 1024, counts=source.lengths)`.
        """
        return _TokenRow(self._files, self.stamps, self.ordering, self.prefetch_size)

    def expect(self, indices: np.ndarray | None) -> None:
        if indices is None:
            return self._files.forget()
        self._files.expect(self._bounds[indices], self._bounds[indices + 1])

    def expect_blocks(self, indices: np.ndarray, bounds: np.ndarray) -> None:
        around = np.stack([self._bounds[bounds[:, 0]], self._bounds[bounds[:, 1] + 1]], axis=1)
        self._files.expect(self._bounds[indices], self._bounds[indices + 1], around)

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        documents = self._files.spans(indices, self._bounds[indices], self._bounds[indices + 1])
        for row, (index, tokens) in enumerate(zip(indices.tolist(), documents, strict=True)):
            self.sample_spec.write(_CALLER, out, row, index, {"tokens": tokens})

    def find_spans(self, names: Sequence[str], indices: np.ndarray) -> Iterator[FoundSpans | None]:
        return self._files.find_spans(indices, self._bounds[indices], self._bounds[indices + 1])


class _TokenRow(HostSource):
    """The tokens of files, each a sample."""

    shown_as = f"{_CALLER}.tokens"
    divides_blocks = True

    def __init__(self, files: "_TokenFiles", stamps: Sequence[Any], ordering: Ordering, prefetch_size: int) -> None:
        self._files, self.stamps, self._caller = files, stamps, _CALLER
        self.blocks = np.diff(files.firsts)
        self.ordering: Ordering = ordering
        self.prefetch_size = prefetch_size
        self.looks_ahead = self.reads_together = files.looks_ahead
        self.sample_spec = _spec(files.dtype)

    def __len__(self) -> int:
        return int(self._files.firsts[-1])

    def expect(self, indices: np.ndarray | None) -> None:
        if indices is None:
            return self._files.forget()
        self._files.expect(*_runs(indices))

    def expect_runs(self, starts: np.ndarray, length: int) -> None:
        self._files.expect(starts, starts + length)

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        self._files.take(indices, out[0])

    def read_runs(self, starts: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        self._files.take_runs(starts, out[0])

    @never_raising
    def __repr__(self) -> str:
        return f"{self.shown_as}({len(self):,} samples, {self.sample_spec})"


def _spec(dtype: np.dtype, *shape: int) -> Any:
    import jax

    return spec_of(_CALLER, {"tokens": jax.ShapeDtypeStruct(shape, dtype)})


@dataclasses.dataclass(frozen=True)
class _Part:
    """The tokens of a file, which a copy in another process opens again."""

    file: File
    stored: np.dtype
    count: int
    offset: int = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("mapped", "ranged")}

    @functools.cached_property
    def mapped(self) -> np.ndarray | RangedRows:
        """The tokens, mapped; those of another machine in ranges."""
        return map_rows(self.file, self.stored, (self.count,), self.offset)

    @functools.cached_property
    def ranged(self) -> RangedRows:
        """The tokens, read in ranges."""
        return RangedRows(self.file, self.stored, (self.count,), self.offset)


class _TokenFiles:
    """The tokens of files, numbered through.

    Attributes:
        firsts: The number of the first token of each file, and how many there are in all.
        dtype: Of all tokens.
    """

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts
        self._maps = len(parts) <= _MAPPED
        self.firsts = np.cumsum([0, *(part.count for part in parts)], dtype=np.int64)
        self.dtype = parts[0].stored.newbyteorder("=")

    @property
    def looks_ahead(self) -> bool:
        """Whether some of the files are on other machines."""
        return not all(isinstance(part.file, LocalFile) for part in self._parts)

    def expect(self, starts: np.ndarray, ends: np.ndarray, around: np.ndarray | None = None) -> None:
        """Prepare for the tokens between some, which will be read in this order.

        Args:
            starts: The first token of each document or window.
            ends: The one after its last.
            around: For each, such a pair around it, if all that lies between the two is read soon.
        """
        if not self.looks_ahead:
            return
        filled = np.flatnonzero(ends > starts)
        numbers = np.searchsorted(self.firsts, starts[filled], side="right") - 1
        wide = None if around is None else self._bytes(numbers, *around[filled].T)
        expect([part.file for part in self._parts], numbers, self._bytes(numbers, starts[filled], ends[filled]), wide)

    def forget(self) -> None:
        """Expect nothing."""
        forget([part.file for part in self._parts])

    def _bytes(self, numbers: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Start and size of tokens in their files, of which those in other files are left out, (spans, 2)."""
        first, last = self.firsts[numbers], self.firsts[numbers + 1]
        begins = np.clip(starts, first, last)
        sizes = np.array([part.stored.itemsize for part in self._parts])[numbers]
        offsets = np.array([part.offset for part in self._parts])[numbers]
        return np.stack([offsets + (begins - first) * sizes, (np.clip(ends, first, last) - begins) * sizes], axis=1)

    def spans(self, indices: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
        """The tokens between some, none of which are in two files. Those of a mapped file are not copied."""
        found = [np.zeros(0, self.dtype)] * len(starts)
        filled = np.flatnonzero(ends > starts)
        for rows, first, part in self._by_file(starts[filled]):
            rows = filled[rows]
            begins, stops = (starts[rows] - first).tolist(), (ends[rows] - first).tolist()
            with _unchanged(part, indices[rows]):
                tokens = self._rows(part)
                if isinstance(tokens, np.ndarray):
                    pieces = (tokens[begin:stop] for begin, stop in zip(begins, stops, strict=True))
                else:
                    pieces = _read_spans(tokens, begins, stops)
                for row, piece in zip(rows.tolist(), pieces, strict=True):
                    found[row] = piece
        return found

    def find_spans(self, indices: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Iterator[FoundSpans | None]:
        """The same in the files that are mapped; None for others."""
        if len(self._parts) == 1:
            files: Any = [(slice(None), 0, self._parts[0])]
        else:  # where an empty document lies after the last token, any file will do
            files = self._by_file(np.minimum(starts, self.firsts[-1] - 1))
        for rows, first, part in files:
            with _unchanged(part, indices[rows]):
                tokens = self._rows(part)
                if not isinstance(tokens, np.ndarray):
                    yield None
                    return
                yield rows, [(tokens, starts[rows] - first, ends[rows] - first)]

    def take(self, indices: np.ndarray, out: np.ndarray) -> None:
        """Write the tokens at `indices` into `out`."""
        for rows, first, part in self._by_file(indices):
            local = indices[rows] - first
            with _unchanged(part, indices[rows]):
                tokens = self._rows(part)
                if isinstance(tokens, np.ndarray) and len(rows) == len(out):
                    take_rows(_CALLER, tokens, local, out)
                elif isinstance(tokens, np.ndarray):
                    out[rows] = narrowed(_CALLER, tokens[local], out.dtype)
                else:
                    begins, stops = _runs(local)
                    pieces = _read_spans(tokens, begins.tolist(), stops.tolist())
                    out[rows] = narrowed(_CALLER, np.concatenate(list(pieces)), out.dtype)

    def take_runs(self, starts: np.ndarray, out: np.ndarray) -> None:
        """Write the tokens from each of `starts` on into a row of `out`."""
        length = out.shape[1]
        if len(self._parts) == 1:  # all of them end in it
            with _unchanged(self._parts[0], starts):
                out[...] = narrowed(_CALLER, self._windows(self._parts[0], starts, length), out.dtype)
            return
        for rows, first, part in self._by_file(starts):
            begins = starts[rows] - first
            inside = begins + length <= part.count
            if inside.any():
                with _unchanged(part, starts[rows]):
                    found = self._windows(part, begins[inside], length)
                out[rows[inside]] = narrowed(_CALLER, found, out.dtype)
            for row in rows[~inside].tolist():  # from one file into the next
                self.take(starts[row] + np.arange(length), out[row])

    def _windows(self, part: _Part, begins: np.ndarray, length: int) -> np.ndarray:
        tokens = self._rows(part)
        if isinstance(tokens, np.ndarray):
            # One call copies all of them. `sliding_window_view` makes the same, and takes longer than the copying.
            shape, strides = (len(tokens) - length + 1, length), 2 * tokens.strides
            return np.ndarray(shape, tokens.dtype, tokens, strides=strides)[begins]
        return np.stack(list(_read_spans(tokens, begins.tolist(), (begins + length).tolist())))

    def _rows(self, part: _Part) -> np.ndarray | RangedRows:
        return part.mapped if self._maps else part.ranged

    def _by_file(self, tokens: np.ndarray) -> Iterator[tuple[np.ndarray, int, _Part]]:
        """Each file that some tokens are in: which of them, the number of its first one, and the file."""
        numbers = np.searchsorted(self.firsts, tokens, side="right") - 1
        for number in np.flatnonzero(np.bincount(numbers)).tolist():  # np.unique would sort all tokens of windows
            yield np.flatnonzero(numbers == number), int(self.firsts[number]), self._parts[number]


@contextlib.contextmanager
def _unchanged(part: _Part, indices: np.ndarray) -> Iterator[None]:
    """Around reading samples of a file, which must not change; an error names the first of them."""
    try:
        if isinstance(part.file, LocalFile):
            part.file.check()  # before it, too: to read what was cut off a mapped file would end the process
        yield
        if isinstance(part.file, LocalFile):
            part.file.check()
    except OSError as error:
        raise noted(error, f"This came from {_CALLER} at sample {indices[0]}.")  # noqa: B904


def _runs(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where runs of neighbours begin and end: a window is one, and is read at once."""
    if not len(tokens):
        return tokens, tokens
    breaks = np.flatnonzero(np.diff(tokens) != 1) + 1
    return tokens[np.append(0, breaks)], tokens[np.append(breaks, len(tokens)) - 1] + 1


def _read_spans(tokens: RangedRows, begins: Sequence[int], stops: Sequence[int]) -> Iterator[np.ndarray]:
    size = tokens.stored.itemsize
    ranges = [(tokens.offset + begin * size, (stop - begin) * size) for begin, stop in zip(begins, stops, strict=True)]
    for data in tokens.file.read_ranges(ranges):
        yield np.frombuffer(data, tokens.stored).astype(tokens.dtype, copy=False)


@dataclasses.dataclass(frozen=True)
class _Split:
    """The token that documents are told apart by.

    Attributes:
        name: Of the argument.
        token: Its number.
        ends: Whether it ends a document; otherwise it begins one.
    """

    name: str
    token: int
    ends: bool

    @classmethod
    def of(cls, end_token: Any, start_token: Any) -> "_Split | None":
        if end_token is not None and start_token is not None:
            raise ValueError(f"{_CALLER} takes end_token= or start_token=, not both: each says where documents begin.")
        for name, token in (("end_token", end_token), ("start_token", start_token)):
            if token is not None:
                return cls(name, whole_number(_CALLER, name, token, least=0, most=(1 << 63) - 1), name == "end_token")
        return None


@dataclasses.dataclass(frozen=True)
class _Opened:
    """A file of tokens, and where its documents begin.

    Attributes:
        part: Its tokens.
        files: It, and its index.
        known: Where documents begin and the last one ends, if the file says so.
    """

    part: _Part
    files: list[File]
    known: np.ndarray | None = None

    def documents(self, split: _Split | None, folder: PlanFolder | None) -> np.ndarray:
        """Where documents begin and the last one ends."""
        part = self.part
        if self.known is not None:
            return self.known
        if split is None:
            return np.array([0, part.count])
        limits = np.iinfo(part.stored)
        if split.token > limits.max:
            raise ValueError(
                f"{_CALLER} needs {split.name} to be one of the tokens of {part.file.name}, which are {part.stored}. "
                f"Got {split.token}."
            )
        kind = f"{part.stored.str} from byte {part.offset}, {split.name} {split.token}"
        return file_index(_CALLER, part.file, kind, _bounds(part, split), folder)


def _bounds(part: _Part, split: _Split) -> Iterator[tuple[int, np.ndarray]]:
    """Where documents begin, and how many tokens there are."""
    yield part.offset, np.zeros(1, np.int64)
    for at, data in chunks(part.file, part.offset):
        first = (at - part.offset) // part.stored.itemsize + int(split.ends)
        found = np.flatnonzero(np.frombuffer(data, part.stored) == split.token) + first
        yield at + len(data), found[(found > 0) & (found < part.count)]
    yield part.file.size, np.array([part.count])


def _open(path: Path, given: np.dtype | None, split: _Split | None) -> _Opened:
    tokens, index = _pair(path)
    file = open_file(_CALLER, tokens)
    if index is not None:
        return _open_megatron(file, open_file(_CALLER, index), given, split)
    head = file.read_at(0, min(_LLM_C_BYTES, file.size))
    stored, offset, count = given, 0, None
    if head.startswith(_NPY):
        header = read_npy_header(file.name, io.BytesIO(file.read_at(0, min(16 << 10, file.size))))
        if len(header.shape) != 1:
            raise ValueError(f"{_CALLER} needs arrays of one axis. {file.name} has shape {header.shape}.")
        stored, offset, count = _whole_numbers(header.dtype, file.name), header.length, header.shape[0]
    elif len(head) == _LLM_C_BYTES and (numbers := struct.unpack_from("<3i", head))[:2] in _LLM_C:
        stored, offset, count = _LLM_C[numbers[:2]], _LLM_C_BYTES, numbers[2]
    if stored is None:
        raise ValueError(
            f"{_CALLER} needs dtype= for {file.name}, which does not say what its tokens are. Pass dtype=np.uint16, or "
            "np.uint32 for a vocabulary of more than 65,536."
        )
    _require_dtype(file, stored, given)
    _require_size(file, stored, offset, count)
    return _Opened(_Part(file, stored, (file.size - offset) // stored.itemsize, offset), [file])


def _pair(path: Path) -> tuple[str, str | None]:
    """The file of tokens, and Megatron's index of it, if there is one."""
    text = os.fspath(path)
    stem, kind = os.path.splitext(text)
    if kind == ".idx":
        return f"{stem}.bin", text
    if kind == ".bin" and not is_remote(text) and os.path.exists(f"{stem}.idx"):
        return text, f"{stem}.idx"
    return text, None


def _open_megatron(file: File, index: File, given: np.dtype | None, split: _Split | None) -> _Opened:
    if split is not None:
        raise ValueError(
            f"{_CALLER} takes the documents of {file.name} from {index.name}. Leave {split.name}= out, or move the "
            ".idx away."
        )
    stored, bounds = _megatron_documents(index)
    _require_dtype(file, stored, given)
    _require_size(file, stored, 0, int(bounds[-1]))
    return _Opened(_Part(file, stored, int(bounds[-1])), [file, index], bounds)


def _megatron_documents(index: File) -> tuple[np.dtype, np.ndarray]:
    """The dtype of tokens, and where documents begin and the last one ends, in tokens."""
    head = index.read_at(0, min(_MEGATRON_HEAD.size, index.size))
    if len(head) < _MEGATRON_HEAD.size or not head.startswith(_MEGATRON):
        raise ValueError(
            f"{_CALLER} takes {index.name} for Megatron's index of the .bin beside it. Such an index starts with "
            f"{_MEGATRON!r}, and this with {head[:9]!r}. Get it again, or move it away if it is something else."
        )
    _, version, code, sequences, documents = _MEGATRON_HEAD.unpack(head)
    if version != 1 or code not in _MEGATRON_DTYPES:
        known = ", ".join(f"{number} ({dtype})" for number, dtype in _MEGATRON_DTYPES.items())
        raise _damaged(index, f"it is of version {version}, dtype {code}; known are version 1, dtypes {known}")
    places = np.cumsum([len(head), 4 * sequences, 8 * sequences, 8 * documents], dtype=object).tolist()
    if index.size != places[-1]:
        raise _damaged(
            index,
            f"its {sequences} sequences and {documents} ends of documents need {places[-1]} bytes, and {index.size} "
            "are there",
        )
    stored = np.dtype(_MEGATRON_DTYPES[code])
    sizes, pointers, ends = (
        np.frombuffer(index.read_at(start, end - start), dtype)
        for start, end, dtype in zip(places[:-1], places[1:], ("<i4", "<i8", "<i8"), strict=True)
    )
    bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    wrong = np.flatnonzero((sizes < 0) | (pointers != bounds[:-1] * stored.itemsize))
    if len(wrong):
        at = wrong[0]
        raise _damaged(
            index,
            f"sequence {at} has {sizes[at]} tokens at byte {pointers[at]}, and the one before it ends at byte "
            f"{bounds[at] * stored.itemsize}",
        )
    if documents < 2 or ends[0] != 0 or ends[-1] != sequences or (np.diff(ends) < 0).any():
        raise _damaged(index, f"its {documents} ends of documents do not rise from 0 to {sequences} sequences")
    return stored, bounds[ends]


def _damaged(file: File, found: str) -> ValueError:
    return ValueError(f"{_CALLER} cannot read {file.name}: {found}. The file is cut short or damaged; get it again.")


def _whole_numbers(dtype: np.dtype, name: str = "dtype") -> np.dtype:
    if dtype.kind not in "iu":
        raise TypeError(f"{_CALLER} needs tokens that are whole numbers, such as np.uint16. Got {dtype} from {name}.")
    return dtype


def _require_dtype(file: File, stored: np.dtype, given: np.dtype | None) -> None:
    if given is not None and given != stored:
        raise ValueError(f"{_CALLER}: {file.name} says that its tokens are {stored}, and dtype= that they are {given}.")


def _require_size(file: File, stored: np.dtype, offset: int, count: int | None) -> None:
    """Refuse a file that has no tokens, or other ones than it says."""
    there = file.size - offset
    if count is not None and there != count * stored.itemsize:
        raise _damaged(file, f"{count} tokens of {stored} need {count * stored.itemsize} bytes, and {there} are there")
    if there % stored.itemsize:
        raise _damaged(file, f"its {there} bytes are not a whole number of tokens of {stored}")
    if not there:
        raise ValueError(f"{_CALLER} needs at least one token. {file.name} has none.")


def _require_alike(opened: Sequence[_Opened]) -> None:
    pairs = [one.part.file.name for one in opened if one.known is not None]
    if len(set(pairs)) < len(pairs):
        twice = next(name for name in pairs if pairs.count(name) > 1)
        raise ValueError(f"{_CALLER} was given {twice} twice. An .idx stands for its .bin: give one of them.")
    kinds = {one.part.stored.newbyteorder("="): one.part.file.name for one in reversed(opened)}
    if len(kinds) > 1:
        found = table((name, str(dtype)) for dtype, name in kinds.items())
        raise ValueError(f"{_CALLER} needs tokens of one dtype. Got:\n{found}\nBuild a source for each.")


def _require_found(opened: Sequence[_Opened], split: _Split) -> None:
    """Refuse a token that is nowhere, in files of one document each: it is that of another vocabulary."""
    for part in [one.part for one in opened]:
        size = part.stored.itemsize
        at = part.offset + (part.count - 1 if split.ends else 0) * size
        if np.frombuffer(part.file.read_at(at, size), part.stored)[0] == split.token:
            return
    raise ValueError(f"{_CALLER} finds {split.name}={split.token} in none of the files. Is it of this vocabulary?")
