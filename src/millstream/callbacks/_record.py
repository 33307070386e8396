"""A record of a run: what it is, what it logs and what its time goes to, for `millstream report`."""

import collections
import dataclasses
import itertools
import json
import os
import platform
import time
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import millstream
from millstream.callbacks._media_file import MediaFile
from millstream.callbacks._memory_use import memory_use
from millstream.callbacks._provenance import GitQuestion, provenance
from millstream.callbacks._run_config import plain_config
from millstream.callbacks._throughput import compile_seconds
from millstream.callbacks._writer import Row, Sink, Writer
from millstream.callbacks.log_file import MEDIA_FILE, RECORD, SAMPLES_OF, LogFile, encode_line
from millstream.files.safe_path import NotPlainFile
from millstream.loader.loader import DataLoader
from millstream.loader.mixed import MixedLoader
from millstream.loader.source_counts import planned_sources
from millstream.loader.train_stream import TrainStream
from millstream.loops import Overview, overview
from millstream.loops.elapsed import Elapsed
from millstream.loops.loop_state import LoopState
from millstream.loops.schedules import EpochBegins, EpochEnds, OrFinal
from millstream.loops.signatures import Every
from millstream.pipeline.compose import SeekablePipeline
from millstream.pipeline.state import IterableState, LoaderState
from millstream.text.errors import describe_value, require_int, require_path, require_text

_MOST_ROWS = 200  # of a table of arrays; a larger tree is shown by its branches
_CALLER = "record"
_FINEST, _COARSEST = 0.1, 10.0  # seconds over which the use of time is measured
_WINDOWS = 200  # as many as that in a run that is not very short or long
_MOST_SAMPLES = 64
_PLANNED = 100  # stretches of a run whose mixture is shown as it was planned


def _describe_run(loop_state: LoopState, loaders: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """A run as its record begins, at the moment it does.

    Args:
        loop_state: Of the loop.
        loaders: Further loaders by their names.
        said: What its user says of it: config and note.
    """
    data = {} if loop_state.dataset is None else {loop_state.name: loop_state.dataset}
    skips = loop_state.skips
    return {
        "loop": loop_state.name,
        "date": time.time(),
        "from_step": loop_state.elapsed.steps,
        **said,
        **provenance(),
        "versions": _versions(),
        "state": _table(loop_state.state),
        "loaders": {name: _pipeline(loader) for name, loader in {**data, **loaders}.items()},
        "tasks": [[_when(task.schedule), task.name] for task in loop_state.tasks],
        "stop": None if loop_state.stops is None else repr(loop_state.stops),
        "mixture": _planned_mixture(loop_state),
        "skip": [[*each, step] for each, (step, _) in zip(skips.ranges, skips.gaps, strict=True)],
    }


def _versions() -> dict[str, str]:
    kinds = [f"{device.platform} ({device.device_kind})" for device in jax.devices()]
    return {
        "millstream": millstream.__version__,
        "JAX": jax.__version__,
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "platform": platform.platform(),
        "devices": ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)),
        "processes": str(jax.process_count()),
    }


def _table(state: Any) -> dict[str, Any]:
    """The arrays of a state, by branches where there are many."""
    shown = _shown(state)
    rows = [
        [row.path, row.arrays, None if row.shape is None else list(row.shape), row.dtype, row.count, row.nbytes]
        for row in shown.rows[:_MOST_ROWS]
    ]
    return {"rows": rows, "arrays": shown.arrays, "count": shown.count, "nbytes": shown.nbytes}


def _shown(state: Any) -> Overview:
    table = overview(state)
    for depth in range(6, 0, -1):
        if len(table.rows) <= _MOST_ROWS:
            break
        table = overview(state, depth=depth)
    return table


def _pipeline(loader: Any) -> dict[str, Any]:
    """The stages of a loader; of other data, what they are."""
    if isinstance(loader, DataLoader | MixedLoader | TrainStream):  # others have an `explain` that says something else
        return loader.explain().as_dict()
    return {"stages": [], "plan": {"data": type(loader).__name__}}


def _planned_mixture(loop_state: LoopState) -> dict[str, Any] | None:
    """How many samples of each source of a mixture the plan has from step to step; None if there is no mixture.

    Steps are those of the data, up to the last one; or to the end of an epoch, if nobody knows the last.
    """
    loader, first = loop_state.dataset, loop_state.elapsed.steps
    if not isinstance(loader, DataLoader) or not isinstance(loader.pipeline, SeekablePipeline):
        return None
    stop = None if loop_state.ends_at is None else loop_state.ends_at.units.get("steps")
    last = max(int(stop), first + 1) if stop is not None else first + loader.steps_per_epoch
    ends = np.unique(np.linspace(first, last, _PLANNED + 1).astype(np.int64)).tolist()
    found = planned_sources(loader.pipeline, [range(*pair) for pair in itertools.pairwise(ends)])
    if found is None:
        return None
    names, counts = found
    return {"sources": list(names), "steps": ends[1:], "samples": counts.tolist()}


def _when(schedule: Any) -> str:
    if schedule is None:
        return "every step"
    if isinstance(schedule, OrFinal):
        return _when(schedule.schedule)
    if isinstance(schedule, EpochBegins | EpochEnds):
        return "beginning of an epoch" if isinstance(schedule, EpochBegins) else "end of an epoch"
    return repr(schedule)


class Line(Row):
    """Something else than what was logged: its `values` are the rest of its line."""


class _RecordFile(Sink):
    """A file with a line for each row, and lines of other kinds where they belong among them.

    Every line has `steps`, and no line has fewer than the one before it, so that a resumed run can cut what it will
    write again.

    Attributes:
        lines: Lines to be written as soon as all rows of their steps are; added by the loop, taken by the thread.
    """

    caller = _CALLER
    separator = "."
    takes_media = True

    def __init__(
        self, directory: Any, overwrite: bool, loaders: Mapping[str, Any], said: Mapping[str, Any], samples: int
    ) -> None:
        folder = require_path(_CALLER, "the path of a folder", directory).expanduser()
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"{_CALLER} needs the path of a folder. {folder} is a file.")
        for name in (RECORD, MEDIA_FILE):
            if (folder / name).is_symlink():
                raise NotPlainFile(
                    f"{_CALLER}: {folder / name} is a link, and what it leads to is left alone. Delete it, or give a "
                    "different folder."
                )
        self.place = directory
        self._file = LogFile(_CALLER, folder / RECORD, True, _step_of)
        self._media = MediaFile(_CALLER, folder / MEDIA_FILE)
        self._overwrite = overwrite
        self._loaders = loaders
        self._said = said
        self._samples = samples
        self._first_batch: Any = None  # until its samples are written
        self._git = GitQuestion()
        self._newest = 0  # the step of the last line
        self._description: dict[str, Any] = {}  # of the run; written whenever one begins or resumes
        self.lines: collections.deque[Line] = collections.deque()
        self._is_whole = True  # not so if a write has failed: there may be half a line, and rows are missing

    def begin(self, loop_state: LoopState) -> None:
        self._description = _describe_run(loop_state, self._loaders, self._said)
        self._last = _counts(loop_state)
        self._due = 0.0  # the first window is that in which programs are compiled and workers start

    def watch(self, loop_state: LoopState) -> bool:
        if self._wants_samples:
            self._wants_samples, self._first_batch = False, _first_batch(loop_state)
        if time.perf_counter() < self._due:
            return False
        self._measure(loop_state)
        return True  # rows would take their lines along, but there may not be any for long

    def finish(self, loop_state: LoopState) -> None:
        self._measure(loop_state)
        reason = "it broke off with an error" if loop_state.failed else loop_state.reason
        self._add(loop_state.elapsed, {"ended": reason, "date": time.time()})

    def _measure(self, loop_state: LoopState) -> None:
        """Write what the time since the last measurement was used for."""
        now, last, elapsed = _counts(loop_state), self._last, loop_state.elapsed
        self._last = now
        self._due = now["seconds"] + min(max(elapsed.time / _WINDOWS, _FINEST), _COARSEST)
        # A source of a mixture that the loop has taken since then has no number there.
        spent = {name: round(now[name] - last.get(name, 0), 6) for name in now}
        self._add(elapsed, {"spent": spent | memory_use()})

    def _add(self, elapsed: Elapsed, content: Any) -> None:
        line = Line(elapsed.steps, elapsed.samples, elapsed.epochs, elapsed.time, elapsed.date, content)
        self.lines.append(line)

    def open(self, step: int) -> int:
        if step == 0 and self._file.size() and not self._overwrite:
            self._set_apart()
        self._newest = newest = self._file.open(step)
        self._media.open(step)
        self._wants_samples = self._samples > 0 and not self._media.size()
        self._is_whole = True
        # It has the step of the row before it: rows that an earlier process did not come to write still follow.
        self._file.write(encode_line({"steps": newest, "run": self._description}))
        self._git.ask()
        return newest

    def _set_apart(self) -> None:
        path, number = self._file.path, 1
        while (apart := path.with_name(f"record-{number}.jsonl")).exists():
            number += 1
        os.rename(path, apart)
        self._media.set_apart(f"-{number}")
        warnings.warn(
            f"{_CALLER}: {path} was the record of an earlier run, which is now {apart.name}. To resume a run, give "
            "its loop resume=; to replace it, give record overwrite=True.",
            stacklevel=2,
        )

    def write(self, rows: list[Row]) -> None:
        self._write_samples()
        texts = self._commit_line()
        for row in rows:
            while self.lines and self.lines[0].step < row.step:
                self._newest = self.lines[0].step
                texts.append(_line(self.lines.popleft()))
            if row.values:
                self._newest = row.step
                texts.append(_line(row))
            if row.media:
                self._media.write(row.step, row.media)
        self._is_whole = False
        self._file.write(b"".join(texts))
        self._is_whole = True

    def _write_samples(self) -> None:
        held, self._first_batch = self._first_batch, None
        if held is not None:
            batch, mask = held
            self._media.write_samples(batch, mask, self._samples)

    def _commit_line(self, *, wait: bool = False) -> list[bytes]:
        """What git has answered, if it has."""
        answer = self._git.answer(wait=wait)
        return [] if answer is None else [encode_line({"steps": self._newest, "code": answer})]

    def close(self) -> None:
        try:
            if self._is_whole:
                self._write_samples()
                self._file.write(b"".join([*self._commit_line(wait=True), *map(_line, self.lines)]))
        finally:
            self.lines.clear()
            self._git.end()
            self._media.close()
            self._file.close()


def _step_of(line: bytes) -> int:
    return int(json.loads(line)["steps"])


def _first_batch(loop_state: LoopState) -> tuple[Any, Any] | None:
    """The batch of the step that was done, and its mask; drawn once more, if a fused program has used it up."""
    loader, batch = loop_state.dataset, loop_state.batch
    if batch is None:
        state = loop_state.data_state
        is_seekable = isinstance(state, LoaderState) and not isinstance(state, IterableState)
        if not isinstance(loader, DataLoader) or not is_seekable or jax.process_count() > 1:
            return None
        batch, _, mask = loader.next_batch(dataclasses.replace(state, step=jnp.zeros_like(state.step)))
        return batch, mask
    is_pair = isinstance(loader, DataLoader | MixedLoader | TrainStream) and type(batch) is tuple and len(batch) == 2
    return batch if is_pair else (batch, None)


def _line(row: Row) -> bytes:
    content = row.values if isinstance(row, Line) else {"logged": row.values}
    units = {"steps": row.step, "samples": row.samples, "epochs": row.epochs, "time": round(row.time, 6)}
    return encode_line(units | content)


def _counts(loop_state: LoopState) -> dict[str, float]:
    """What has been counted so far; a loop by hand, which has no dataset, does not say what it waits for."""
    elapsed = loop_state.elapsed
    counts = {"seconds": time.perf_counter(), "steps": elapsed.steps, "samples": elapsed.samples}
    waits = {} if loop_state.dataset is None else dataclasses.asdict(loop_state.waits)
    loader = loop_state.dataset
    sources = loader.stats().sources if isinstance(loader, DataLoader) else {}
    seen = {f"{SAMPLES_OF}{name}": count for name, count in sources.items()}
    return {**counts, "compiling": compile_seconds(), **waits, **seen}


def record(
    directory: str | os.PathLike[str],
    *,
    config: object = None,
    note: str | None = None,
    samples: int = 0,
    every: Every | None = None,
    overwrite: bool = False,
    loaders: Mapping[str, object] | None = None,
) -> Writer:
    """Write down a run while it runs, so that `millstream report` can show it: also one that was killed.

    Example:
        >>> def train_step(state, batch):
        ...     return ms.logs().add_metric("loss", 0.5), state + 1
        >>> record = ms.record("run", config={"rate": 0.1}, note="the first one")
        >>> _ = ms.loop(0, range(3), {ms.every(1): [train_step, record]})
        >>> from millstream.report.page import write_report
        >>> write_report("run").name
        'report.html'

    In `record.jsonl` stand config, note, command line, commit, host, versions and devices, the arrays of the state, the
    stages of the loader, what is done when; then what was logged, memory in use, and what the time was used for:
    waiting for data, tests, compiling, and the steps. Images and histograms are in `media.jsonl`, up to 20 MB of them.
    What looks like a password or token is not written. Rows are written as by `jsonl_logger`, in the background and by
    the first process only. A resumed run continues with the files, and what is done again stands there once. The folder
    may be that of `ms.checkpoint`.

    Args:
        directory: The folder; one run per folder.
        config: What tells this run from others: a dict, which may be nested, a dataclass or an `argparse.Namespace`, of
            numbers, texts, lists and None.
        note: What you want to say about it.
        samples: How many of the first samples of the run to show, as images or in words; at most 64.

    Other Args:
        every: Which rows to write, as for `csv_logger`. Times are measured in any case.
        overwrite: Whether a new run replaces the record of another, which is set apart otherwise.
        loaders: Further loaders whose stages are shown, by name, such as `{"test": test_loader}`. That of the loop is
            known.
    """
    if not isinstance(loaders, Mapping | None):
        raise TypeError(f"record needs loaders as a dict from names to loaders. Got {describe_value(loaders)}.")
    if note is not None:
        require_text(_CALLER, "note", note)
    require_int(_CALLER, "samples", samples, least=0, most=_MOST_SAMPLES)
    said = {"config": plain_config(config), "note": note or ""}
    return Writer(_RecordFile(directory, overwrite, {} if loaders is None else loaders, said, samples), every)
