"""Preparing data: any samples through a function into shards with an index."""

import contextlib
import dataclasses
import errno
import hashlib
import os
import pathlib
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, overload

import numpy as np

from millstream.files import plain
from millstream.files.atomic import written
from millstream.files.changed import FileStamp
from millstream.files.data_files import is_remote
from millstream.files.urls import shown
from millstream.loader.loader import DataLoader
from millstream.pipeline.pipeline import Pipeline
from millstream.preparation.duplicates import first_occurrences
from millstream.preparation.index import VERSION
from millstream.preparation.prepared_source import PreparedSource
from millstream.preparation.runners import made_by_executor, made_by_ray, made_here
from millstream.preparation.sample_form import SampleForm, find_form
from millstream.preparation.shard_files import FORMATS, check_form, require_packages
from millstream.preparation.shards import WORK, HashMaker, Inputs, RangeMaker, ShardMaker, Unique
from millstream.preparation.work_folder import WorkFolder
from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.executor import Executor, require_executor
from millstream.reading.fingerprint import identity
from millstream.reading.host_source import as_host_source
from millstream.reading.interrupts import interruptible
from millstream.reading.made_of import seen_value
from millstream.reading.processes import Processes
from millstream.reading.view import View
from millstream.reading.workers.nursery import get_ready
from millstream.text.bar_line import ProgressLine
from millstream.text.errors import (
    describe_value,
    noted,
    require_callable,
    require_choice,
    require_path,
    require_text,
    whole_number,
)

_CALLER = "prepare"
_SHARDS = 64  # many enough to share, and little is lost with one
_LEAST, _MOST = 1 << 8, 1 << 16  # samples of a shard
_NAMED = 8  # files
_FIX = "Give what stands for it, and change that when it changes: prepare(..., version='1')."
Format = Literal["arrow", "npy", "parquet", "megatron", "array_record"]


Prepared = IndexedSource | Pipeline | DataLoader | Sequence[IndexedSource | Callable[[Pipeline], Pipeline]]


@overload
def prepare(
    source: Prepared,
    directory: str | os.PathLike[str],
    fn: Callable[[PyTree], PyTree | list[PyTree] | None] | None = None,
    *,
    at_once: int | None = None,
    deduplicate: Unique | None = None,
    format: Format | None = None,
    samples_per_shard: int | None = None,
    executor: Executor | None = None,
    ray: str | None = None,
    part: None = None,
    version: str | None = None,
) -> PreparedSource: ...
@overload
def prepare(
    source: Prepared,
    directory: str | os.PathLike[str],
    fn: Callable[[PyTree], PyTree | list[PyTree] | None] | None = None,
    *,
    at_once: int | None = None,
    deduplicate: Unique | None = None,
    format: Format | None = None,
    samples_per_shard: int | None = None,
    executor: Executor | None = None,
    ray: str | None = None,
    part: tuple[int, int] | None,
    version: str | None = None,
) -> PreparedSource | None: ...
def prepare(
    source: Prepared,
    directory: str | os.PathLike[str],
    fn: Callable[[PyTree], PyTree | list[PyTree] | None] | None = None,
    *,
    at_once: int | None = None,
    deduplicate: Unique | None = None,
    format: Format | None = None,
    samples_per_shard: int | None = None,
    executor: Executor | None = None,
    ray: str | None = None,
    part: tuple[int, int] | None = None,
    version: str | None = None,
) -> PreparedSource | None:
    """Write samples into shards once, through a function, for any number of runs to read.

    Shards are files of a format that other programs read, and `index.json` says what is in them. A shard depends on a
    range of the input alone: however the work is divided, the files are the same, byte for byte. A run that was stopped
    or killed is continued by the same call; shards that are finished stay. Samples keep the order of the source,
    whatever its `ordering`; random stages get the numbers of a first epoch.

    Example:
        >>> words = ms.DatasetSource(["oat", "rye", "oat", "barley"], ordering="sequential")
        >>> def spelled(word):
        ...     return {"word": word, "letters": np.frombuffer(word.encode(), np.uint8)} if len(word) < 6 else None
        >>> source = ms.prepare(words, "prepared", spelled, deduplicate=True)
        >>> [sample["word"] for sample in source], source.lengths["letters"].tolist()
        (['oat', 'rye'], [3, 3])

    Args:
        source: A source or a view; or a source with stages on the host, such as `HostMapTransform`, as a list or a
            loader.
        directory: A folder of its own, on this machine or shared with those that help. It is made if it is not there.
        fn: `fn(sample)` returns a sample, None to leave it out, or a list of samples. Samples are numbers, bools,
            arrays of any shape, text, bytes, and lists of these, in dicts and tuples; gaps (None) are refused. Each
            leaf keeps its dtype and its number of axes. Python's own numbers, and lists of them, come back as NumPy has
            them.
        at_once: Call `fn` with a list of up to that many samples, for a list with what it returns for each: faster
            where a library takes many, such as `encode_batch` of tokenizers. None calls it with one sample.
        deduplicate: Keep the first of samples that are equal, before `fn`: in a field, in what a function gives for
            them, or, with True, in everything. They are compared by a hash of 128 bits.
        format: "arrow", the default, for samples of any shape; "npy", an array per leaf, for those of one shape, and
            the default for sources of arrays without a function; "parquet"; "megatron" for documents of tokens;
            "array_record" for samples that are bytes.
        samples_per_shard: How many samples of the input become a shard; by default a 64th of them, from 256 to 65,536.
            A shard is what a killed run loses.
        executor: Where shards are made: `ms.Processes(8)` or `ms.Threads(8)`; by default in the calling thread.
        ray: The address of a Ray cluster whose tasks make shards: "auto" for the one that is there, "local" to start
            one on this machine. All machines need the input and `directory` under the same paths.
        part: `(3, 64)` makes every 64th shard, from number 3 on, for a job array: parts are numbered from 0. The part
            that is finished last writes the index.
        version: Stands for what cannot be seen of `fn` and the source, such as a model that they use.

    Returns:
        The prepared samples, in sequence; None for a part, while others are not finished.
    """
    folder = _folder(directory)
    samples = _samples_of(source)
    if fn is not None:
        require_callable(_CALLER, "fn", fn, "sample" if at_once is None else "samples")
    if at_once is not None:
        at_once = whole_number(_CALLER, "at_once", at_once, least=1)
        if fn is None:
            raise ValueError(f"{_CALLER} takes at_once= with a function: it says how many samples fn gets. Pass fn=.")
    _check_division(executor, ray, part)
    _check_unique(deduplicate)
    if version is not None:
        require_text(_CALLER, "version", version)
    host = as_host_source(samples)
    if format is None:
        format = "arrow" if fn is not None or host.whole_samples else "npy"
    require_choice(_CALLER, "format", format, FORMATS)
    require_packages(_CALLER, format)
    if samples_per_shard is None:
        samples_per_shard = min(max(-(-len(samples) // _SHARDS), _LEAST), _MOST)
    size = whole_number(_CALLER, "samples_per_shard", samples_per_shard, least=1)
    inputs = Inputs(host, fn, size, at_once)
    made_from = _made_from(samples, inputs, format, deduplicate, version)
    job = _Job(WorkFolder(_CALLER, folder, made_from), inputs, format, deduplicate, executor, ray, part or (0, 1))
    return PreparedSource(folder, ordering="sequential") if job.run() else None


class _Job:
    """One run of a preparation."""

    def __init__(
        self,
        folder: WorkFolder,
        inputs: Inputs,
        kind: Format,
        unique: Unique | None,
        executor: Executor | None,
        ray: str | None,
        part: tuple[int, int],
    ) -> None:
        self._folder, self._inputs, self._kind, self._unique = folder, inputs, kind, unique
        self._executor, self._ray, self._part = executor, ray, part

    def run(self) -> bool:
        """Make what is missing of this part; whether all parts are finished."""
        folder, numbers = self._folder, range(self._part[0], self._inputs.count, self._part[1])
        if folder.open():
            return self._discard()
        with folder.lock("{}-of-{}".format(*self._part)) as alone:
            if folder.open():  # while this process waited
                return self._discard()
            try:
                if alone:
                    folder.clean(numbers, self._part)
                if isinstance(self._executor, Processes):  # while this process looks at the first sample
                    get_ready([RangeMaker.__module__, type(self._inputs.source).__module__])
                form = self._form()
                maker = ShardMaker(self._inputs, folder.path, self._kind, form, self._kept())
                self._make(maker, numbers, "shards")
            except BaseException as error:
                if isinstance(error, OSError) and folder.is_finished:  # by another division of the same work
                    return True
                if alone:
                    folder.clean(numbers, self._part)
                raise
            if folder.missing(maker, range(self._inputs.count)):
                return folder.is_finished  # by another process, which has then removed the records
            with folder.lock("finish"):
                if not folder.is_finished:
                    self._finish(maker, form)
        return True

    def _discard(self) -> bool:
        """Remove what is left of a run that was killed after it had written the index."""
        self._folder.discard()
        return True

    def _finish(self, maker: ShardMaker, form: SampleForm) -> None:
        damaged = self._folder.damaged(maker)
        if damaged:
            self._make(maker, damaged, "damaged shards")
            damaged = self._folder.damaged(maker)
        if damaged:
            raise OSError(
                errno.EIO,
                f"{_CALLER}: {', '.join(maker.names(damaged[0]))} cannot be read as it was written, twice. Is the disk "
                f"of {self._folder.path} failing? Give a folder on a different one.",
            )
        self._folder.finish(maker, self._kind, form)

    def _form(self) -> SampleForm:
        """What samples are made of, by the first that is kept."""
        form = self._folder.form()
        if form is None:
            # Only one is needed, and a thousand may take a second.
            one_by_one = dataclasses.replace(self._inputs, at_once=None if self._inputs.at_once is None else 1)
            results = one_by_one.results(np.arange(len(self._inputs.source)))
            form = find_form(self._inputs.name, results, fixed=self._kind == "npy")
            if form is None:
                raise ValueError(
                    f"{self._inputs.name} has kept none of the {len(self._inputs.source):,} samples. There must be one."
                )
            check_form(_CALLER, self._kind, form)
            self._folder.keep_form(form)
        return form

    def _kept(self) -> pathlib.Path | None:
        """The file that says which samples come first of those that are equal."""
        if self._unique is None:
            return None
        path = self._folder.path / WORK / "kept.npy"
        if not path.exists():
            # Those of all parts: they may run one after the other, and what is equal may be in any of them.
            inputs, maker = self._inputs, HashMaker(self._inputs, self._folder.path, self._unique)
            own = range(self._part[0], inputs.count, self._part[1])
            self._make(maker, own, "ranges looked at")
            self._make(maker, range(inputs.count), "ranges looked at")
            hashes = [np.load(maker.path(number), mmap_mode="r") for number in range(inputs.count)]
            with written(path, alone=False) as file:
                np.save(file, first_occurrences(hashes, len(inputs.source)))
        return path

    def _make(self, maker: RangeMaker, numbers: Sequence[int], what: str) -> None:
        """Make those of some ranges that are not made yet."""
        missing = self._folder.missing(maker, numbers)
        if not missing:
            return
        bar = _Bar(what, len(numbers), len(numbers) - len(missing))
        try:
            # Closing it ends its workers.
            with interruptible() as check_interrupt, contextlib.closing(self._made(maker, missing)) as made:
                for _, samples in made:
                    check_interrupt()
                    bar.show(samples)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                left = len(self._folder.missing(maker, numbers))
                note = (
                    f"The disk of {self._folder.path} is full, with {len(numbers) - left:,} of {len(numbers):,} {what}."
                )
                raise noted(error, f"{note} Make room, and prepare again: what is finished stays.")  # noqa: B904
            raise
        finally:
            bar.close()

    def _made(self, maker: RangeMaker, numbers: Sequence[int]) -> Generator[tuple[int, int]]:
        if self._ray is not None:
            return made_by_ray(maker, numbers, self._ray)
        if self._executor is not None:
            return made_by_executor(maker, numbers, self._executor)
        return made_here(maker, numbers)


class _Bar:
    """How far a run is, on a terminal."""

    def __init__(self, what: str, total: int, done: int) -> None:
        self._line, self._what, self._total, self._done = ProgressLine(_CALLER), what, total, done
        self._first, self._samples, self._begun = done, 0, time.monotonic()
        self._line.show(f"{done:,} of {total:,} {what}")

    def show(self, samples: int) -> None:
        """Take note of one more, with that many samples."""
        self._done, self._samples = self._done + 1, self._samples + samples
        seconds = max(time.monotonic() - self._begun, 1e-9)
        left = seconds / (self._done - self._first) * (self._total - self._done)
        self._line.show(
            f"{self._done:,} of {self._total:,} {self._what}, {self._samples / seconds:,.0f} samples per second, "
            f"about {left / 60:,.0f} min left"
        )

    def close(self) -> None:
        self._line.close()


def _folder(directory: Any) -> pathlib.Path:
    folder = require_path(_CALLER, "directory to be the path of a folder", directory).expanduser()
    if is_remote(directory):
        raise ValueError(
            f"{_CALLER} writes to disks of this machine and those it shares. Got the address {shown(directory)}. Copy "
            "the folder there when it is finished; PreparedSource reads it by its address."
        )
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{_CALLER} needs directory to be a folder of its own. {folder} is a file.")
    return folder.absolute()


def _samples_of(source: Any) -> IndexedSource:
    """The samples of a source, a view, or a source and stages on the host."""
    if isinstance(source, list | tuple) and source:
        made = source[0]
        for stage in source[1:]:
            if not callable(stage):
                raise TypeError(f"{_CALLER} takes a source and stages on the host. Got {describe_value(stage)}.")
            made = stage(made)
        source = made
    if isinstance(source, DataLoader):
        source = source.pipeline
    if isinstance(source, Pipeline):
        if source.stages or source.source is None:
            raise TypeError(
                f"{_CALLER} writes samples before they are batched or compiled. Got {describe_value(source.stages[0])} "
                "among the stages; give the source and the stages before it, such as [source, HostMapTransform(fn)]."
            )
        selection = source.plan.selection
        inner = source.source
        source = inner if selection is None else View(inner, selection, inner.ordering)
    if isinstance(source, type) or not isinstance(source, IndexedSource):
        raise TypeError(
            f"{_CALLER} needs a source, such as ms.sources.JsonlSource(path), or a view of one. Got "
            f"{describe_value(source)}. Wrap a dataset with [index] and a length: ms.DatasetSource(it)."
        )
    if isinstance(source, View) and source.selection.is_keyed:
        raise TypeError(
            f"{_CALLER}: {source!r} differs from epoch to epoch. Prepare its source, and make the view after."
        )
    return source


def _check_division(executor: Any, ray: Any, part: Any) -> None:
    require_executor(_CALLER, executor)
    if ray is not None:
        require_text(_CALLER, "ray", ray)
        if executor is not None:
            raise ValueError(f"{_CALLER} takes executor= or ray=, not both: each says where shards are made.")
    if part is None:
        return
    if not isinstance(part, tuple | list) or len(part) != 2:
        raise TypeError(f"{_CALLER} needs part to be a pair such as (3, 64). Got {describe_value(part)}.")
    count = whole_number(_CALLER, "part[1]", part[1], least=1)
    whole_number(_CALLER, "part[0], which counts from 0,", part[0], least=0, most=count - 1)


def _check_unique(unique: Any) -> None:
    if unique is None or unique is True or (isinstance(unique, str) and unique):
        return
    if not callable(unique):
        raise TypeError(
            f"{_CALLER} needs deduplicate to be the name of a field, a function of a sample, or True for all of it. "
            f"Got {describe_value(unique)}."
        )
    require_callable(_CALLER, "deduplicate", unique, "sample")


def _made_from(
    source: IndexedSource, inputs: Inputs, kind: str, unique: Unique | None, version: str | None
) -> dict[str, Any]:
    """What tells this preparation from others, by name: plain values, long ones as a hash."""
    found = dict(identity(source))
    unknown = [name for name, words in found.items() if words is None]
    if unknown and version is None:
        raise TypeError(
            f"{_CALLER} cannot tell whether the samples of {type(source).__name__} are the same when it continues: "
            f"they cannot be read, differ when they are read again, or are objects that have no bytes. {_FIX}"
        )
    kept = f"shards in {inputs.name}"
    seen = lambda value: seen_value(_CALLER, value, version, kept, _FIX)  # noqa: E731
    base = as_host_source(source.source) if isinstance(source, View) else inputs.source
    functions = [seen(fn) for fn in [*base.functions, inputs.fn] if fn is not None]
    facts = {
        "layout": VERSION,
        "format": kind,
        "samples_per_shard": inputs.per_range,
        "at_once": inputs.at_once,
        "functions": functions,
        "deduplicate": seen(unique),
        "version": version,
        **_files(found.pop("files")),
        **found,
    }
    return {name: _short(value) for name, value in facts.items()}


def _files(stamps: Sequence[FileStamp]) -> dict[str, Any]:
    """The files of the input: a fact each, so that an error names the one that changed; of many, one of them all."""
    names = [name for name, *_ in stamps]
    if not 0 < len(set(names)) == len(names) <= _NAMED:
        return {"files": stamps}
    return {f"file {name}": f"{size:,} bytes, {_hash(rest)[:8]}" for name, size, *rest in stamps}


def _short(value: Any) -> Any:
    """A value as it is, if it is short; otherwise a hash of it."""
    if value is None or (isinstance(value, str | int | bool) and len(str(value)) <= 40):
        return value
    return "none" if value in ([], [0]) else _hash(value)


def _hash(value: Any) -> str:
    return hashlib.sha256(plain.encode(value, _CALLER)).hexdigest()[:32]
