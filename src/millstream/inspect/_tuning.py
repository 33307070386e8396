"""The result of tuning: what stages take, how fast a loader is with other options, and which are best."""

import dataclasses
from typing import Literal, TypedDict

from millstream.reading.executor import InGraph
from millstream.reading.processes import Processes
from millstream.reading.threads import Threads
from millstream.text.html import html_names, html_table
from millstream.text.summaries import call_text
from millstream.text.tables import line_width, name_table, text_table, time_text

Executor = InGraph | Threads | Processes | None
_STAGE_HEADER = ("stage", "time", "of it busy", "per")
_TRIED_HEADER = ("executor", "prefetch", "samples/s", "idle", "cores", "note")


@dataclasses.dataclass(frozen=True)
class TimedStage:
    """How long a stage of a pipeline takes.

    Example:
        >>> tuning = loader.tune(seconds=0.5, progress=False)
        >>> [(stage.stage, stage.per) for stage in tuning.stages]
        [('compiled stages', 'batch')]

    Attributes:
        stage: Its name.
        per: Whether the seconds are for a sample or for a batch.
        seconds: How long it takes, alone, in one thread.
        cpu_seconds: How much of that it is busy; the rest of the time it waits. None if that is not known.
    """

    stage: str
    per: Literal["sample", "batch"]
    seconds: float
    cpu_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class TriedOptions:
    """The speed of a loader with some options.

    Example:
        >>> tried = loader.tune(seconds=0.5, progress=False).tried[0]
        >>> tried.executor, tried.samples_per_second > 0
        (InGraph(), True)

    Attributes:
        executor: Where samples are read.
        prefetch: How many batches ahead.
        samples_per_second: Samples that came through the loop; None if it was not tried.
        idle: The share of the loop's time, from 0 to 1, in which it waited for a batch; None without a step.
        cores: How many cores were busy, workers included; None if that is not known.
        note: Why it was not tried, or anything else worth knowing.
    """

    executor: Executor
    prefetch: int
    samples_per_second: float | None = None
    idle: float | None = None
    cores: float | None = None
    note: str = ""


class TunedOptions(TypedDict):
    """The options of a `DataLoader` that are advised."""

    executor: Executor
    prefetch: int


@dataclasses.dataclass(frozen=True, repr=False)
class Tuning:
    """What a loader's stages cost, its speed with other options, and which are best; printed, tables and code.

    See `tune`.

    Example:
        >>> tuning = loader.tune(seconds=0.5, progress=False)
        >>> faster = loader.replace(**tuning.options)
        >>> sorted(tuning.options)
        ['executor', 'prefetch']

    Attributes:
        stages: How long each stage takes, alone.
        tried: The speed with other options, and with the present ones.
        options: The best ones, for `DataLoader.replace`.
        reason: Why, with the figures.
        others: Arguments of the loader that stay, as code, by name.
    """

    stages: list[TimedStage]
    tried: list[TriedOptions]
    options: TunedOptions
    reason: str
    others: dict[str, str]

    @property
    def code(self) -> str:
        """The best options as code."""
        chosen = {"executor": executor_code(self.options["executor"]), "prefetch": str(self.options["prefetch"])}
        arguments = ", ".join(f"{name}={text}" for name, text in (chosen | self.others).items())
        return f"ms.DataLoader(pipeline, {arguments})"

    def __repr__(self) -> str:
        width = line_width()
        tables = [
            text_table(_STAGE_HEADER, map(_stage_cells, self.stages), numbers=_STAGE_HEADER[1:-1], width=width),
            text_table(
                _TRIED_HEADER, map(self._cells, self.tried), numbers=_TRIED_HEADER[1:-1], prose=("note",), width=width
            ),
            name_table([("advice", self.code), ("because", self.reason)], width=width),
        ]
        return "\n\n".join(tables)

    def _repr_html_(self) -> str:
        stages = html_table(_STAGE_HEADER, map(_stage_cells, self.stages), numbers=_STAGE_HEADER[1:-1])
        tried = html_table(_TRIED_HEADER, map(self._cells, self.tried), numbers=_TRIED_HEADER[1:-1])
        return stages + tried + html_names([("advice", self.code), ("because", self.reason)])

    def _cells(self, row: TriedOptions) -> tuple[str, ...]:
        chosen = {"executor": row.executor, "prefetch": row.prefetch} == self.options
        rate = "" if row.samples_per_second is None else f"{row.samples_per_second:,.0f}"
        idle = "" if row.idle is None else f"{row.idle:.0%}"
        cores = "" if row.cores is None else f"{row.cores:.2g}"
        note = "; ".join(filter(None, ["advised" if chosen else "", row.note]))
        return executor_code(row.executor), str(row.prefetch), rate, idle, cores, note


def _stage_cells(row: TimedStage) -> tuple[str, ...]:
    busy = "" if row.cpu_seconds is None else time_text(row.cpu_seconds)
    return row.stage, time_text(row.seconds), busy, row.per


def executor_code(executor: Executor) -> str:
    """An executor as it is written in a program: what differs from the defaults."""
    if not dataclasses.is_dataclass(executor):
        return repr(executor)
    room = "ms." if type(executor).__module__.startswith("millstream.reading.") else ""
    return f"{room}{call_text(executor)}"
