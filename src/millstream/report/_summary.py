"""A run in a few figures, and what it is in tables."""

import datetime
import json
import shlex
from html import escape
from typing import Any

import numpy as np

from millstream.callbacks.bar_progress import duration_text
from millstream.report._advice import findings
from millstream.report._chart import value_text
from millstream.report._charts import best_values
from millstream.report._html_table import html_table
from millstream.report._media_html import media_sections
from millstream.report._run_data import RunData
from millstream.text.tables import size_text, time_text

_STAGES = ("stage", "where", "shapes", "dtypes", "bytes per batch", "memory", "note")
_MOST_BEST, _MOST_FINDINGS = 4, 3
_MOST_CHARACTERS = 6_000_000  # of all images of a page
Tile = tuple[str, str, str]  # what it is, its value, and what is to be said of it


def all_tables(runs: list[RunData]) -> str:
    """What the runs are, as far as their records say it; what is the same in all of them stands there once."""
    sections = [run_sections(run, _MOST_CHARACTERS // len(runs)) for run in runs]
    shared = [each for each in sections[0] if all(each in others for others in sections[1:])] if len(runs) > 1 else []
    parts = ["<h3>All runs</h3>", *shared] if shared else []
    for run, found in zip(runs, sections, strict=True):
        own = [each for each in found if each not in shared]
        parts += [f"<h3>{escape(run.name)}</h3>"] if len(runs) > 1 and own else []
        parts += own
    return "".join(parts)


def run_sections(run: RunData, room: int) -> list[str]:
    """What a run is, in sections, whose images have at most `room` characters."""
    parts = [_section(title, content, is_open=True) for title, content in media_sections(run.media, room)]
    if run.beginnings:
        newest = run.beginnings[-1]
        loaders = enumerate(newest["loaders"].items())
        parts += [_config(newest), *(_pipeline(name, loader, is_open=not number) for number, (name, loader) in loaders)]
        parts += [_left_out(run), _tasks(newest), _state(newest["state"]), _versions(newest), _origin(run)]
    return [part for part in parts if part]


def _section(title: str, content: str, *, note: str = "", is_open: bool = False) -> str:
    aside = f' <span class="caption">{escape(note)}</span>' if note else ""
    shown = " open" if is_open else ""
    return f"<details{shown}><summary><h3>{escape(title)}</h3>{aside}</summary>{content}</details>"


def _pipeline(name: str, loader: dict[str, Any], *, is_open: bool) -> str:
    stages = [
        (
            _text(stage.get("stage")),
            _text(stage.get("where")),
            _text(stage.get("shapes")),
            _text(stage.get("dtypes")),
            _size(stage.get("bytes_per_batch")),
            _size(stage.get("memory_bytes")),
            _text(stage.get("note")),
        )
        for stage in loader["stages"]
    ]
    table = html_table(_STAGES, stages, numbers=("bytes per batch", "memory")) if stages else ""
    plan = html_table(("plan", ""), [(key, _text(value)) for key, value in loader["plan"].items()])
    return _section(f"Pipeline: {name}", table + (plan if loader["plan"] else ""), is_open=is_open)


def _left_out(run: RunData) -> str:
    rows = [
        (
            f"{first:,} to {last - 1:,}" if last - first > 1 else f"{first:,}",
            f"{last - first:,}",
            f"after step {step:,}",
        )
        for first, last, step in run.skip
    ]
    table = html_table(("batches", "count", "left out"), rows, numbers=("count",))
    return _section("Batches left out", table, is_open=True) if rows else ""


def _tasks(beginning: dict[str, Any]) -> str:
    rows = [(when, what) for when, what in beginning["tasks"]]
    if beginning["stop"] is not None:
        rows.append((beginning["stop"], "the loop stops"))
    return _section("What is done when", html_table(("when", "what"), rows)) if rows else ""


def _state(state: dict[str, Any]) -> str:
    if not state["arrays"]:
        return ""
    rows = [
        (path, f"{arrays:,} arrays" if shape is None else str(tuple(shape)), dtype, f"{count:,}", size_text(nbytes))
        for path, arrays, shape, dtype, count, nbytes in state["rows"]
    ]
    rest = state["arrays"] - sum(row[1] for row in state["rows"])
    if rest:
        rows.append((f"and {rest:,} more arrays", "", "", "", ""))
    table = html_table(("path", "shape", "dtype", "count", "bytes"), rows, numbers=("count", "bytes"))
    note = f"{state['count']:,} numbers in {state['arrays']:,} arrays, {size_text(state['nbytes'])}"
    return _section("Parameters", table, note=note)


def _config(beginning: dict[str, Any]) -> str:
    rows = list(flat_config(beginning).items())
    return _section("Config", html_table(("", ""), rows), is_open=True) if rows else ""


def flat_config(beginning: dict[str, Any]) -> dict[str, str]:
    """The configuration of a run: texts by names with dots."""
    made: dict[str, str] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, each in value.items():
                add(f"{prefix}.{name}" if prefix else name, each)
        else:
            made[prefix] = value if isinstance(value, str) else json.dumps(value)

    for name, value in beginning.get("config", {}).items():
        add(name, value)
    return made


def _versions(beginning: dict[str, Any]) -> str:
    return _section("Versions", html_table(("", ""), beginning["versions"].items()), is_open=True)


def _origin(run: RunData) -> str:
    """Where a run comes from, and when it ran."""
    rows = [(name, text) for name, text in origin(run).items() if text]
    for number, beginning in enumerate(run.beginnings):
        after = f"{_date(beginning['date'])}, after step {beginning['from_step']:,}"
        rows.append(("resumed", after) if number else ("begun", _date(beginning["date"])))
    if run.ended_at is not None:
        rows.append(("ended", _date(run.ended_at)))
    return _section("Origin", html_table(("", ""), rows), is_open=True)


def origin(run: RunData) -> dict[str, str]:
    """Note, command line, commit and host of a run, as texts; empty where not known."""
    newest = run.beginnings[-1] if run.beginnings else {}
    code = newest.get("code")
    changed = ", and files that differ from it" if code is not None and code["dirty"] else ""
    return {
        "note": newest.get("note", ""),
        "command": shlex.join(newest.get("command", [])),
        "commit": "" if code is None else f"{code['commit'][:12]}{changed}",
        "host": newest.get("host", ""),
    }


def _date(timestamp: float) -> str:
    return datetime.datetime.fromtimestamp(timestamp).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _text(value: Any) -> str:
    """A cell of any plain value; of several values, a line for each."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_text(each)}" for key, each in value.items())
    if isinstance(value, list) and any(isinstance(each, list | dict | str) for each in value):
        return "\n".join(map(_text, value))
    return str(tuple(value)) if isinstance(value, list) else str(value)


def _size(value: Any) -> str:
    return size_text(value) if isinstance(value, int) else _text(value)


def tiles(run: RunData) -> list[Tile]:
    """The figures on top of the page."""
    made: list[Tile] = []
    if len(run.history):
        newest = run.history.elapsed()
        made.append(("steps", f"{newest.steps:,}", "" if newest.epochs is None else f"{newest.epochs:,} epochs"))
        made.append(("samples", f"{newest.samples:,}", ""))
    if run.skip:
        left_out, ranges = sum(last - first for first, last, _ in run.skip), len(run.skip)
        made.append(("batches left out", f"{left_out:,}", "in one range" if ranges == 1 else f"in {ranges:,} ranges"))
    seconds = wall_time(run)
    made.append(("time", _length(seconds), _ended(run)))
    speed = _speed(run)
    if speed is not None:
        made.append(speed)
    waiting = None if run.times is None else run.times.share("data")
    if waiting is not None:
        made.append(("waiting for data", f"{100 * waiting:.0f} %", "of the time"))
    made += _memory(run)
    for name, value, step in best_values(run)[:_MOST_BEST]:
        made.append((f"best {name}", value_text(value), f"at step {step:,.0f}"))
    return made


def _memory(run: RunData) -> list[Tile]:
    """The most memory that was in use."""
    known = {} if run.times is None else {name: float(np.nanmax(used)) for name, used in run.times.memory.items()}
    made = []
    if "host_memory" in known:
        made.append(("host memory", size_text(int(known["host_memory"])), "the most of this process"))
    if "device_memory" in known:
        most = max(known["device_memory"], known.get("device_memory_peak", 0.0))
        made.append(("device memory", size_text(int(most)), "the most of all its devices"))
    return made


def wall_time(run: RunData) -> float | None:
    """How long the run took; None if that is not known."""
    logged = run.history.elapsed().time if len(run.history) else 0.0
    measured = 0.0 if run.times is None else float(run.times.seconds.sum())
    seconds = max(logged, measured)
    return seconds if seconds > 0 else None


def _speed(run: RunData) -> Tile | None:
    """How fast it was; None if nothing is known about that."""
    name, seconds = "samples per second", wall_time(run)
    if run.times is not None:
        if not run.times.samples.any():
            return None
        median = run.times.samples_per_second()
        if median is None:
            return name, "unknown", "too short to tell"
        return name, value_text(median), "median, without compiling and tests"
    if seconds is None or not len(run.history):
        return None
    return name, value_text(run.history.elapsed().samples / seconds), "of the whole time, with compiling and tests"


def advice(run: RunData) -> str:
    """What the figures suggest to do, in at most three sentences; what weighs most comes first."""
    return " ".join(findings(run)[:_MOST_FINDINGS])


def _length(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return time_text(seconds) if seconds < 60 else duration_text(seconds)


def _ended(run: RunData) -> str:
    if run.ended is not None:
        return f"ended: {run.ended}" if run.ended else "ended"
    return "it is running, or was killed" if run.beginnings else ""
