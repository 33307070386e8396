"""Which executor, how many workers, how much prefetch: measured on the user's own data."""

import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from millstream.inspect._explain import require_loader
from millstream.inspect._stage_times import READING, SKIPPING, time_stages
from millstream.inspect._tuning import Executor, TimedStage, TriedOptions, TunedOptions, Tuning, executor_code
from millstream.loader.loader import DataLoader
from millstream.pipeline.bucketed import BucketedPipeline
from millstream.pipeline.iterable import IterablePipeline
from millstream.pipeline.phased import PhasedPipeline
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.state import key_words
from millstream.reading.contracts import PyTree
from millstream.reading.executor import InGraph
from millstream.reading.processes import Processes
from millstream.reading.threads import Threads, usable_cores
from millstream.text.bar_line import ProgressLine
from millstream.text.errors import describe_value, require_bool, require_callable, require_positive
from millstream.text.tables import time_text

Step = Callable[[PyTree, jax.Array], PyTree]
Setting = tuple[Executor, int]  # an executor and its prefetch

_STAGES = 0.15  # of the time, for the stages alone
_TURNS = 3  # that every setting gets, if the time suffices
_ROUNDS = 3  # of batches in a turn: one alone says little
_LONGEST_ROUND = 0.1  # of the time: a setting whose batches take longer is not tried
_CLOSE = 0.07  # of the best: a rate nearer to it than this is as good
_CLOSE_IN_GRAPH = 0.25  # a program that makes its batches itself can also run whole epochs, in `scan_epoch`
_DAY = 86_400  # seconds
_LOCKED = 1.25  # two threads that read less than this as much as one hold each other up


def tune(
    loader: DataLoader[PyTree, PyTree],
    key: jax.Array | np.ndarray | None = None,
    *,
    seconds: float = 15.0,
    step: Step | None = None,
    progress: bool = True,
) -> Tuning:
    """Time the stages on these data, try executors and prefetch, and advise the simplest that are as good as any.

    The loader stays as it is: `loader.replace(**loader.tune().options)` is the one that is advised. Samples are
    read and functions of the pipeline are called as often as there is time for; a cache is neither read nor filled.

    Example:
        >>> tuning = ms.inspect.tune(loader, seconds=0.5, progress=False)
        >>> faster = loader.replace(**tuning.options)

    Args:
        loader: The loader.
        key: Whose samples to read; None for those of `jax.random.key(0)`.
        seconds: About how long to take. What is running is waited for.
        step: `step(batch, mask)`, what the loop does with a batch. What counts is then how long the loop waits
            beside it. Without one, batches are drawn as fast as they come.
        progress: Whether to show progress on stderr, if that is a terminal or a notebook.
    """
    _require_tunable(loader, seconds, step, progress)
    words = np.asarray(key_words("tune", jax.random.key(0) if key is None else key))
    with contextlib.closing(ProgressLine("tune", shown=progress)) as line:
        line.say("timing the stages")
        stages, per_sample = time_stages(loader, words, _STAGES * seconds)
        grid = _Grid(loader, words, (1 - _STAGES) * seconds, step, line)
        tried = grid.run(per_sample)
    rates = {(row.executor, row.prefetch): row.samples_per_second for row in tried if row.samples_per_second}
    executor, prefetch = preferred(rates, grid.present, grid.readers)
    options: TunedOptions = {"executor": executor, "prefetch": prefetch}
    known = loader.options
    others = {} if known["on_error"] == "raise" else {"on_error": repr(known["on_error"])}
    others |= {name: name for name in ("cache", "sharding") if known[name] is not None}
    return Tuning(stages, tried, options, _reason(options, grid.present, tried, stages), others)


def _require_tunable(loader: DataLoader, seconds: Any, step: Any, progress: Any) -> None:
    require_loader("tune", loader, built=True)
    require_bool("tune", "progress", progress)
    require_positive("tune", "seconds", seconds)
    if seconds > _DAY:
        raise ValueError(f"tune needs seconds to be at most {_DAY:,}, a day. Got {describe_value(seconds)}.")
    if step is not None:
        require_callable("tune", "step", step)
    pipeline = loader.pipeline
    if isinstance(pipeline, BucketedPipeline):
        raise TypeError(
            "tune compares batches of one shape, and buckets make several. Tune the loader with PadTransform(..., "
            "length=...) and a BatchTransform in place of buckets, and give this one what it finds."
        )
    if isinstance(pipeline, PhasedPipeline):
        raise TypeError(
            "tune compares batches of one shape, and those of this loader change by step. Tune a loader of one "
            "phase, with a BatchTransform of one size, and give this one what it finds: loader.replace(...)."
        )
    if isinstance(pipeline, IterablePipeline):
        raise TypeError(
            "tune has nothing to choose for an IterableSource: one thread draws it, in order. print(loader.stats()) "
            "says what takes the time."
        )
    if not isinstance(pipeline, Pipeline):
        raise TypeError(
            f"tune has nothing to choose for {type(pipeline).__name__}: a stream is computed step by step in one "
            "compiled program, without executor and prefetch."
        )
    if pipeline.placement is not None and not pipeline.placement.is_local:
        raise ValueError(
            "tune ends its turns by the clock, which differs from process to process, and batches over several "
            "processes are made by all of them together. Tune in one process: loader.replace(sharding=None).tune()."
        )


class _UnreadSteps:
    """Steps that no turn has drawn: none must find in a cache what an earlier one has read."""

    def __init__(self, loader: DataLoader, words: np.ndarray) -> None:
        self._loader, self._words = loader, words
        self.first = 0

    def take(self, steps: int) -> Any:
        """The state before that many of them."""
        first = 0 if self.first + steps > self._loader.pipeline.plan.step_limit else self.first
        self.first = first + steps
        return self._loader.init_state(self._words, step=first)


class _Trial:
    """A loader with the options of a setting, and the turns it has had."""

    def __init__(self, loader: DataLoader, setting: Setting, step: Step | None, unread: "_UnreadSteps") -> None:
        self.executor, self.prefetch = setting
        self._unread = unread
        # What is in a cache says nothing about reading, and a trial must not write into it.
        self.loader = loader.replace(executor=self.executor, prefetch=self.prefetch, cache=None)
        self.begun = False  # whether there was a batch
        self._step = step
        self._turns: list[TriedOptions] = []
        # Batches that are read side by side end at about the same time, so that only rounds of them can be compared.
        self._round = _batches_side_by_side(self.loader.pipeline)

    def turn(self, seconds: float) -> None:
        """Draw batches for about this long."""
        before = self.result() if self._turns else self._draw(1, seconds)  # which starts workers, and compiles
        plan = self.loader.pipeline.plan
        rounds = round(seconds * _rate(before) / (self._round * math.prod(plan.axes)))
        self._turns.append(self._draw(max(_ROUNDS, min(rounds, plan.step_limit // self._round)), seconds))

    def _draw(self, rounds: int, seconds: float) -> TriedOptions:
        """Draw rounds of batches, from the first reading to the last; fewer if they take twice the time."""
        steps, samples, waited, cpu = rounds * self._round, 0, 0.0, _cpu_seconds()
        # Nothing after these steps is read, which would disturb the next turn.
        with contextlib.closing(self.loader.iterate(self._unread.take(steps), steps=steps)) as batches:
            begun = time.perf_counter()
            for number in range(1, steps + 1):
                asked = time.perf_counter()
                try:
                    drawn = jax.block_until_ready(next(batches, None))
                except Exception as error:
                    error.add_note(SKIPPING)
                    raise
                waited += time.perf_counter() - asked
                if drawn is not None:  # if it is, the last batches were skipped
                    self.begun = True
                    samples += batches.samples  # before the step, which may take the mask for its own
                    if self._step is not None:
                        jax.block_until_ready(self._step(*drawn))
                if number == 1 and self._step is not None and steps > 1:
                    begun, waited, samples = time.perf_counter(), 0.0, 0  # in a long loop one more wait is nothing
                if time.perf_counter() - begun > 2 * seconds and number % self._round == 0:
                    break
            elapsed = max(time.perf_counter() - begun, 1e-9)
        worked = _cpu_seconds()
        cores = None if cpu is None or worked is None else (worked - cpu) / elapsed
        idle = None if self._step is None else waited / elapsed
        return TriedOptions(self.executor, self.prefetch, samples / elapsed, idle, cores)

    def result(self, note: str = "") -> TriedOptions:
        """The turn with the median rate."""
        return dataclasses.replace(sorted(self._turns, key=_rate)[len(self._turns) // 2], note=note)


def _rate(row: TriedOptions) -> float:
    return row.samples_per_second or 0.0


def _batches_side_by_side(pipeline: Pipeline) -> int:
    """How many batches are read at the same time; 1 where threads share the rows of a batch."""
    host = pipeline.host
    if host is None:
        return 1
    whole = isinstance(host.executor, Processes) or host.source.whole_batches or host.source.reads_together
    return getattr(host.executor, "workers", host.source.readers) if whole else 1


def _cpu_seconds() -> float | None:
    """How long this process and those it has started have been busy, as Linux counts it; None elsewhere."""
    try:
        return time.process_time() + _cpu_seconds_below("self")
    except OSError:
        return None


def _cpu_seconds_below(process: str) -> float:
    """How long the children of a process, and theirs, have been busy."""
    total = 0.0
    for task in pathlib.Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            # The name of the program stands in brackets and may hold anything, blanks too.
            fields = pathlib.Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + _cpu_seconds_below(child)
    return total


class _Grid:
    """Gives the settings turns, one after the other and again, so that other load on the machine affects all alike."""

    def __init__(
        self, loader: DataLoader, words: np.ndarray, seconds: float, step: Step | None, line: ProgressLine
    ) -> None:
        self._loader, self._words, self._seconds, self._step, self._line = loader, words, seconds, step, line
        self._begun, self._unread = time.perf_counter(), _UnreadSteps(loader, words)
        host = loader.pipeline.host
        self.present = InGraph() if host is None else loader.options["executor"]
        self.readers = 1 if host is None else host.source.readers
        self._settings = _settings(loader, self.present)
        self._turn_seconds = seconds / (_TURNS * len(self._settings))

    def run(self, per_sample: float | None) -> list[TriedOptions]:
        """The speed of all settings; last those that were not tried, with the reason."""
        trials, left_out = [], []
        with contextlib.ExitStack() as opened:
            for setting in self._settings:
                kinds = {type(trial.executor) for trial in trials}
                why = self._too_long(setting[0], per_sample)
                if why is None and self._elapsed() > 1 and type(setting[0]) in kinds:
                    why = "the time was over"
                if why is None:
                    outcome = self._first_turn(setting, opened)
                    if isinstance(outcome, _Trial):
                        trials.append(outcome)
                        continue
                    why = outcome
                left_out.append(TriedOptions(*setting, note=f"not tried: {why}"))
            if not trials:
                why = left_out[0].note.removeprefix("not tried: ")
                raise ValueError(f"tune has too little time to try anything: {why}. Give it more: tune(seconds=...).")
            for trial in itertools.chain.from_iterable([trials] * (_TURNS - 1)):
                if self._elapsed() > 1:
                    break
                self._turn(trial)
        own = self.present, self._loader.options["prefetch"]
        results = [trial.result("as it is" if (trial.executor, trial.prefetch) == own else "") for trial in trials]
        return results + left_out

    def _first_turn(self, setting: Setting, opened: contextlib.ExitStack) -> _Trial | str:
        """Give a setting its first turn; or say why worker processes cannot read these data."""
        first, trial = self._unread.first, _Trial(self._loader, setting, self._step, self._unread)
        if isinstance(trial.executor, Processes):  # which take long to start; threads would only keep their buffers
            opened.enter_context(trial.loader)
        try:
            self._turn(trial)
        except Exception as error:
            if trial.begun or not isinstance(trial.executor, Processes) or isinstance(self.present, Processes):
                raise
            with contextlib.closing(self._loader.replace(executor=Threads(1), cache=None)) as here:
                here.next_batch(here.init_state(self._words, step=first))  # raises if it is a sample that is at fault
            first_line = str(error).partition("\n")[0]
            return f"{type(error).__name__}: {first_line}"
        return trial

    def _too_long(self, executor: Executor, per_sample: float | None) -> str | None:
        if per_sample is None:
            return None
        workers = 1 if isinstance(executor, Processes) else _workers(executor, self.readers)
        seconds = math.prod(self._loader.pipeline.plan.axes) * per_sample / workers
        return f"a batch would take about {time_text(seconds)}" if seconds > _LONGEST_ROUND * self._seconds else None

    def _turn(self, trial: _Trial) -> None:
        name = f"{executor_code(trial.executor)}, prefetch={trial.prefetch}"
        self._line.say(f"{name} ({self._elapsed():.0%} of {self._seconds:.3g} s)")
        try:
            trial.turn(self._turn_seconds)
        except Exception as error:
            error.add_note(f"tune was trying {name}.")
            raise

    def _elapsed(self) -> float:
        """The share of the time that is over."""
        return (time.perf_counter() - self._begun) / self._seconds


def _settings(loader: DataLoader, present: Executor) -> list[Setting]:
    """The grid: the loader as it is, executors with its prefetch, all but processes with twice as much."""
    own = loader.options["prefetch"]
    settings = [(executor, _enough(loader.pipeline, executor, own)) for executor in _executors(loader, present)]
    quick = [setting for setting in settings if not isinstance(setting[0], Processes)]
    doubled = [(executor, 2 * prefetch) for executor, prefetch in quick]
    return list(dict.fromkeys([(present, own), *quick, *doubled, *settings]))  # processes take long to start


def _executors(loader: DataLoader, present: Executor) -> list[Executor]:
    if loader.pipeline.source.arrays is not None and loader.options["on_error"] == "raise":
        return [InGraph(), _like(present, Threads, 1)]
    cores = usable_cores()
    processes = [_like(present, Processes, count) for count in sorted({2, max(2, cores // 2), max(2, cores)})]
    if getattr(present, "startup", None) is not None:  # what it prepares is there in workers alone
        return [_like(present, Processes, 1), *processes]
    return [*(_like(present, Threads, count) for count in (1, 2, 4, 8, 16, 32)), *processes]


def _like(present: Executor, kind: type[Any], workers: int) -> Any:
    """This many workers of a kind, with the other fields of the present executor."""
    if isinstance(present, kind):
        return dataclasses.replace(present, workers=workers)  # pyright: ignore[reportArgumentType]
    if isinstance(present, Threads | Processes):
        return kind(workers, ordered=present.ordered, timeout=present.timeout)
    return kind(workers)


def _workers(executor: Executor, readers: int) -> int:
    return readers if executor is None else getattr(executor, "workers", 1)


def _enough(pipeline: Pipeline, executor: Executor, prefetch: int) -> int:
    """This prefetch, or more if it takes more to keep all workers busy."""
    host = pipeline.host
    if host is None or not isinstance(executor, Threads):
        return max(prefetch, 1)
    whole = host.source.whole_batches or host.source.reads_together
    at_once = 1 if whole else math.prod(pipeline.plan.axes)
    return max(prefetch, 1, -(-executor.workers // at_once) - 1)


def preferred(rates: dict[Setting, float], present: Executor, readers: int) -> Setting:
    """The simplest of the settings that are as good as the best, by their samples per second.

    The program itself comes before threads, and threads before processes; fewer workers, the present executor, and less
    prefetch are simpler. Without an executor there are this many readers.
    """

    def is_good(executor: Executor, rate: float) -> bool:
        return rate >= (1 - (_CLOSE_IN_GRAPH if isinstance(executor, InGraph) else _CLOSE)) * max(rates.values())

    def simplicity(setting: Setting) -> tuple[int, ...]:
        executor, prefetch = setting
        kind = 0 if isinstance(executor, InGraph) else 2 if isinstance(executor, Processes) else 1
        return kind, _workers(executor, readers), int(executor != present), prefetch

    return min((setting for setting, rate in rates.items() if is_good(setting[0], rate)), key=simplicity)


def _name(executor: Executor) -> str:
    return "no executor" if executor is None else executor_code(executor).removeprefix("ms.")


def _reason(options: TunedOptions, present: Executor, tried: list[TriedOptions], stages: list[TimedStage]) -> str:
    """Why these options are best, in a few sentences with the figures that were measured."""
    measured = [row for row in tried if row.samples_per_second]
    chosen = next(row for row in measured if {"executor": row.executor, "prefetch": row.prefetch} == options)
    now = next((row for row in measured if row.executor == present), None)
    sentences = []
    reading = next((stage for stage in stages if stage.stage == READING), None)
    if reading is not None:
        busy = min(reading.seconds, reading.cpu_seconds or 0.0)
        how = "all of it busy" if busy > 0.9 * reading.seconds else f"busy for {time_text(busy)} of them"
        sentences.append(f"Reading takes {time_text(reading.seconds)} per sample in one thread, {how}.")
    threads = {row.executor.workers: _rate(row) for row in reversed(measured) if isinstance(row.executor, Threads)}
    if reading is not None and {1, 2} <= threads.keys():
        why = ": it keeps the GIL, or the cores are busy" if threads[2] < _LOCKED * threads[1] else ""
        sentences.append(f"2 threads read {threads[2] / threads[1]:.2f}x as much as 1{why}.")
    name = _name(chosen.executor)
    idle = "" if chosen.idle is None else f", and the loop waits {chosen.idle:.0%} of its time"
    gain = f"{name[0].upper()}{name[1:]} gives {_rate(chosen):,.0f} samples/s{idle}"
    if now is not None and now.executor == chosen.executor:
        gain += ": that is what the loader has now"
    elif now is not None:
        waits = "" if now.idle is None else f", where it waits {now.idle:.0%}"
        gain += f": {_rate(chosen) / _rate(now):.2f}x of the present {_name(now.executor)}{waits}"
    return " ".join([*sentences, f"{gain}."])
