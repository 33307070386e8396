"""Tables of a report: the stages of the data, the arrays of the state, what is done when, and versions."""

import datetime
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from millstream.report._run_data import RunData
from millstream.text.tables import size_text

_STAGES = ("stage", "where", "shapes", "dtypes", "bytes per batch", "memory", "note")


def run_tables(run: RunData) -> str:
    """What the run is, as far as its record says it."""
    if not run.beginnings:
        return ""
    newest = run.beginnings[-1]
    loaders = enumerate(newest["loaders"].items())
    parts = [_pipeline(name, loader, is_open=number == 0) for number, (name, loader) in loaders]
    parts += [_tasks(newest), _state(newest["state"]), _versions(run.beginnings)]
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
