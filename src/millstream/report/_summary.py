"""A run in a few figures, and a sentence of advice drawn from them."""

import datetime
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from millstream.callbacks.bar_progress import duration_text
from millstream.report._chart import value_text
from millstream.report._charts import best_values, odd_values
from millstream.report._run_data import RunData
from millstream.text.tables import size_text, time_text

_STAGES = ("stage", "where", "shapes", "dtypes", "bytes per batch", "memory", "note")
_MOST_BEST = 4
_MUCH_WAITING, _MUCH_TESTING, _MUCH_CALLING, _MUCH_COMPILING = 0.2, 0.4, 0.2, 0.4
Tile = tuple[str, str, str]  # what it is, its value, and what is to be said of it
_ADVICE = (
    ("data", _MUCH_WAITING, "{} of the time was spent waiting for data: loader.tune() suggests how to fix it."),
    (
        "callbacks",
        _MUCH_CALLING,
        "{} of the time was spent in callbacks, logging and saving: let them be due less often, every(100) say.",
    ),
    (
        "compiling",
        _MUCH_COMPILING,
        "{} of the time was spent compiling and starting, which a run does once: it is a smaller part of a longer one.",
    ),
    (
        "evaluation",
        _MUCH_TESTING,
        "{} of the time was spent in tests: test_duration= tests on fewer batches.",
    ),
)


def run_tables(run: RunData) -> str:
    """What the run is, as far as its record says it."""
    if not run.beginnings:
        return ""
    newest = run.beginnings[-1]
    loaders = enumerate(newest["loaders"].items())
    parts = [_pipeline(name, loader, is_open=number == 0) for number, (name, loader) in loaders]
    parts += [_left_out(run), _tasks(newest), _state(newest["state"]), _versions(run.beginnings)]
    return "".join(parts)


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str] = ()) -> str:
    """A table in a box that scrolls by itself, if it is wider than the page; empty columns are left out."""
    body = [*rows]
    used = [i for i in range(len(header)) if any(row[i] for row in body)]
    names = ['class="number"' if header[i] in numbers else "" for i in range(len(header))]
    top = "".join(f"<th scope=col {names[i]}>{escape(header[i])}</th>" for i in used)
    lines = "".join("<tr>" + "".join(f"<td {names[i]}>{_cell(row[i])}</td>" for i in used) + "</tr>" for row in body)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="table">'
        f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _cell(text: str) -> str:
    return escape(text).replace("\n", "<br>")


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


def _versions(beginnings: list[dict[str, Any]]) -> str:
    rows = list(beginnings[-1]["versions"].items())
    for number, beginning in enumerate(beginnings):
        date = datetime.datetime.fromtimestamp(beginning["date"]).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        rows.append(("begun" if number == 0 else "gone on", f"{date}, after step {beginning['from_step']:,}"))
    return _section("Versions", html_table(("", ""), rows), is_open=True)


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
    for name, value, step in best_values(run)[:_MOST_BEST]:
        made.append((f"best {name}", value_text(value), f"at step {step:,.0f}"))
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
    """What the figures suggest to do, in a sentence."""
    odd = odd_values(run)
    if odd:
        name, count, step = odd[0]
        times = "once" if count == 1 else f"{count:,} times"
        found = f"{name} was not finite {times}, first at step {step:,}"
        return f"{found}: ms.callbacks.terminate_on_nan() stops such a run there."
    if run.times is None:
        return (
            f"This is read from {run.kind}, which does not say what the time was used for, what the data went through "
            'and with which versions: ms.record("run") among the callbacks writes that down.'
        )
    shares = {use: run.times.share(use) or 0.0 for use in run.times.uses}
    for use, much, text in _ADVICE:
        if shares.get(use, 0.0) >= much:
            return text.format(f"{100 * shares[use]:.0f} %")
    return f"{100 * shares['steps']:.0f} % of the time was spent in the steps themselves: the data keep up with them."


def _length(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return time_text(seconds) if seconds < 60 else duration_text(seconds)


def _ended(run: RunData) -> str:
    if run.ended is not None:
        return f"ended: {run.ended}" if run.ended else "ended"
    return "it is running, or was killed" if run.beginnings else ""
