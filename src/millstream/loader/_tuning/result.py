"""What tuning has found: times, trials, and the advice that follows."""

import dataclasses
from typing import Any

from millstream.loader._tuning.stages import TimedStage
from millstream.loader._tuning.trials import Executor, TriedOptions
from millstream.text.errors import function_name
from millstream.text.tables import WIDTH, name_table, text_table, time_text

_STAGES = ("stage", "time", "of it at work", "per")
_TRIED = ("executor", "prefetch", "samples/s", "idle", "cores", "note")
_NUMBERS = ("time", "of it at work", "prefetch", "samples/s", "idle", "cores")


class Tuning:
    """What a loader's stages cost, how it fares with other options, and which are best; printed, tables and code.

    See `DataLoader.tune`.

    Example:
        >>> tuning = loader.tune(seconds=0.5, progress=False)
        >>> faster = loader.replace(**tuning.options)
        >>> tuning.options["executor"]
        InGraph()

    Attributes:
        stages: What each stage takes, alone.
        tried: What came of other options, and of the present ones.
        options: The best ones, for `DataLoader.replace`.
        reason: Why, with the figures.
        code: The same as code.
    """

    def __init__(
        self,
        stages: list[TimedStage],
        tried: list[TriedOptions],
        options: dict[str, Any],
        reason: str,
        others: dict[str, str],
    ) -> None:
        self.stages = stages
        self.tried = tried
        self.options = options
        self.reason = reason
        chosen = {"executor": executor_code(options["executor"]), "prefetch": str(options["prefetch"])}
        arguments = ", ".join(f"{name}={text}" for name, text in (chosen | others).items())
        self.code = f"ms.DataLoader(pipeline, {arguments})"

    def __repr__(self) -> str:
        stages = text_table(_STAGES, map(_stage_cells, self.stages), numbers=_NUMBERS, width=WIDTH)
        tried = text_table(_TRIED, map(self._tried_cells, self.tried), numbers=_NUMBERS, prose=("note",), width=WIDTH)
        advice = name_table([("advice", self.code), ("because", self.reason)], width=WIDTH)
        return f"{stages}\n\n{tried}\n\n{advice}"

    def _tried_cells(self, row: TriedOptions) -> tuple[str, ...]:
        chosen = {"executor": row.executor, "prefetch": row.prefetch} == self.options
        rate = "" if row.samples_per_second is None else f"{row.samples_per_second:,.0f}"
        idle = "" if row.idle is None else f"{row.idle:.0%}"
        cores = "" if row.cores is None else f"{row.cores:.2g}"
        note = "; ".join(filter(None, ["advised" if chosen else "", row.note]))
        return executor_code(row.executor), str(row.prefetch), rate, idle, cores, note


def _stage_cells(row: TimedStage) -> tuple[str, ...]:
    work = "" if row.cpu_seconds is None else time_text(row.cpu_seconds)
    return row.stage, time_text(row.seconds), work, row.per


def executor_code(executor: Executor) -> str:
    """An executor as it is written in a program: what differs from the defaults."""
    if executor is None:
        return "None"
    arguments = []
    for field in dataclasses.fields(executor):
        value = getattr(executor, field.name)
        if field.default is dataclasses.MISSING:
            arguments.append(repr(value))
        elif value != field.default:
            arguments.append(f"{field.name}={function_name(value) if callable(value) else repr(value)}")
    return f"ms.{type(executor).__name__}({', '.join(arguments)})"
