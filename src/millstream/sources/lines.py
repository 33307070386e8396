"""Lines of text files, and JSON in lines: any line is found at once, by an index that is made once."""

import json
from collections.abc import Callable, Iterator

import numpy as np

from millstream.files.data_files import File, open_files
from millstream.files.file_index import chunks, file_index
from millstream.files.paths import Paths, find_files
from millstream.files.plan_folder import Plans, folder_of
from millstream.files.unpacked import unpacked
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.sources.array import check_reading
from millstream.sources.record_files import RecordFiles, RecordSource

_NEWLINE, _RETURN = 10, 13
_BOM = b"\xef\xbb\xbf"
_PACKINGS = ("", ".gz", ".zst")


class TextLinesSource(RecordSource):
    r"""The lines of text files, as `str` without their line ends; empty ones too.

    Files are looked through once, when the source is built; then any line is read by its place. Files packed with gzip
    or zstd are unpacked once, into the folder `plans`.

    Example:
        >>> import pathlib
        >>> _ = pathlib.Path("poem.txt").write_text("the mill\nthe stream\n")
        >>> source = ms.sources.TextLinesSource("poem.txt")
        >>> len(source), source[1]
        (2, 'the stream')
        >>> letters = source.map(lambda line: {"letters": np.int32(len(line))})

    Args:
        paths: A file, a folder, a pattern such as "data/*.txt.gz", an address, or a list of such; in UTF-8.
        plans: Where the places of lines and unpacked files are kept: a folder, or `ms.views.plans(folder)`; by default
            in memory. Packed files need it.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    def __init__(
        self, paths: Paths, *, plans: Plans = None, ordering: Ordering = "shuffle", prefetch_size: int = 64
    ) -> None:
        check_reading("TextLinesSource", ordering, prefetch_size)
        opened = _opened("TextLinesSource", paths, (".txt",), _line_bounds, plans)
        super().__init__(*opened, ordering, prefetch_size)

    def _sample(self, index: int, record: bytes) -> str:
        return _text(self._records, index, record.removesuffix(b"\n").removesuffix(b"\r"))


class JsonlSource(RecordSource):
    r"""The lines of JSON Lines files (`.jsonl`, `.ndjson`), each read as JSON; empty ones are passed over.

    Samples are what JSON says: dicts, lists, numbers, text. Files are looked through once, when the source is built;
    then any line is read by its place. Files packed with gzip or zstd are unpacked once, into the folder `plans`.

    Example:
        >>> import pathlib
        >>> _ = pathlib.Path("corn.jsonl").write_text('{"text": "oats", "ids": [3]}\n{"text": "rye", "ids": [1, 2]}\n')
        >>> source = ms.sources.JsonlSource("corn.jsonl", ordering="sequential")
        >>> len(source), source[1]["text"]
        (2, 'rye')
        >>> padded = [source.map(lambda line: {"ids": line["ids"]}), ms.PadTransform({"ids": 0}, length=3)]
        >>> loader = ms.DataLoader([*padded, ms.BatchTransform(2)])
        >>> batch, mask = next(loader.iterate(loader.init_state(jax.random.key(0))))
        >>> batch["ids"].tolist()
        [[3, 0, 0], [1, 2, 0]]

    Args:
        paths: A file, a folder, a pattern such as "data/*.jsonl.zst", an address, or a list of such; in UTF-8.
        plans: Where the places of lines and unpacked files are kept: a folder, or `ms.views.plans(folder)`; by default
            in memory. Packed files need it.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    def __init__(
        self, paths: Paths, *, plans: Plans = None, ordering: Ordering = "shuffle", prefetch_size: int = 64
    ) -> None:
        check_reading("JsonlSource", ordering, prefetch_size)
        opened = _opened("JsonlSource", paths, (".jsonl", ".ndjson"), _filled_bounds, plans)
        super().__init__(*opened, ordering, prefetch_size)

    def _sample(self, index: int, record: bytes) -> PyTree:
        text = _text(self._records, index, record)
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            name = _named(self._records, index)
            raise ValueError(f"{name}, character {error.pos + 1}: {error.msg}. Write it as JSON.") from None
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, lists in lists in lists
            raise ValueError(f"{_named(self._records, index)} cannot be read as JSON: {error}.") from None


Scan = Callable[[File], Iterator[tuple[int, np.ndarray]]]


def _opened(
    caller: str, paths: Paths, kinds: tuple[str, ...], scan: Scan, plans: Plans
) -> tuple[RecordFiles, list[File]]:
    """The lines of files, and the files."""
    folder, endings = folder_of(caller, plans), [kind + packing for kind in kinds for packing in _PACKINGS]
    files = open_files(caller, find_files(caller, paths, endings))
    plain = [unpacked(caller, file, folder) for file in files]
    bounds = [file_index(caller, file, "lines", scan(file), folder) for file in plain]
    records = RecordFiles(caller, plain, bounds, [file.name for file in files])
    if not len(records):
        raise ValueError(f"{caller} needs at least one line with something in it. {files[0].name} has none.")
    return records, files


def _line_bounds(file: File) -> Iterator[tuple[int, np.ndarray]]:
    """Where every line begins, and where the last one ends."""
    yield 0, np.zeros(1, np.int64)
    last = 0
    for at, data in chunks(file):
        starts = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + at + 1
        last = starts[-1] if len(starts) else last
        yield at + len(data), starts
    if last < file.size:
        yield file.size, np.array([file.size])


def _filled_bounds(file: File) -> Iterator[tuple[int, np.ndarray]]:
    """Where every line begins that is not empty, and where the last one ends. Empty ones belong to the one before."""
    start, before = 0, b"\0"  # of the current line; the byte before what is looked at
    for at, data in chunks(file):
        found = np.frombuffer(before + data, np.uint8)
        newlines = np.flatnonzero(found[1:] == _NEWLINE)
        before = data[-1:]
        if len(newlines):
            ends = newlines + at
            starts = np.append(start, ends[:-1] + 1)
            lengths = ends - starts
            empty = (lengths == 0) | ((lengths == 1) & (found[newlines] == _RETURN))
            start = int(ends[-1]) + 1
            yield at + len(data), starts[~empty]
    yield file.size, np.unique([start, file.size])


def _text(records: RecordFiles, index: int, record: bytes) -> str:
    if record.startswith(_BOM) and records.place(index)[2] == 0:
        record = record.removeprefix(_BOM)
    try:
        return record.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{_named(records, index)}, byte {error.start + 1} is not text in UTF-8: {error.reason}."
        ) from None


def _named(records: RecordFiles, index: int) -> str:
    """The file of a line and the number that editors give it."""
    name, _, start = records.place(index)
    before = (data[: start - at] for at, data in chunks(records.file(index)) if at < start)
    return f"{name}, line {1 + sum(data.count(_NEWLINE) for data in before)}"
