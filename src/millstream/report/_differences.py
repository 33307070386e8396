"""What differs between several runs, and what does not."""

from html import escape
from typing import Any

import numpy as np

from millstream.loops.curves import Curve, is_loss
from millstream.report._chart import value_text
from millstream.report._html_table import Strong, html_table
from millstream.report._run_data import RunData
from millstream.report._summary import flat_config, origin, tiles

_MOST_METRICS, _MOST_SETTINGS = 8, 6
_CONFIG = "config."
Row = tuple[str, list[str], str]  # its name, a text for each run, and what to call it where all are the same


def differences(runs: list[RunData]) -> str:
    """A table with a column for each run, and a line with what is the same in all of them."""
    rows, same = _sorted_out([*_configs(runs), *_metrics(runs), *_figures(runs), *_facts(runs)])
    settings = [name for name in same if name.startswith(_CONFIG)]
    if len(settings) > _MOST_SETTINGS:
        same = [f"{len(settings):,} settings of config", *(name for name in same if name not in settings)]
    table = html_table(["", *(run.name for run in runs)], rows)
    listed = f"Identical in all runs: {', '.join(same)}." if same else "Nothing is the same in all runs."
    return f'<h2>What differs</h2>{table}<p class="note">{escape(listed)}</p>'


def _sorted_out(facts: list[Row]) -> tuple[list[list[str]], list[str]]:
    """The rows that differ, and the words for those that do not."""
    rows, same = [], []
    for name, values, word in facts:
        known = [value for value in values if value]
        if len(set(known)) > 1 or (word == "" and len(known) < len(values)):
            rows.append([name, *_unlike(values)])
        elif len(known) == len(values):
            same.append(word or name)
    return rows, same


def _configs(runs: list[RunData]) -> list[Row]:
    """What was configured; a key that some runs lack differs."""
    configs = [flat_config(run.beginnings[-1]) if run.beginnings else {} for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    return [(f"{_CONFIG}{name}", [config.get(name, "") for config in configs], "") for name in names]


def _metrics(runs: list[RunData]) -> list[Row]:
    """The best and the last values of metrics whose names say what is good; the best of all runs stands out."""
    curves: dict[str, dict[int, Curve]] = {}
    for number, run in enumerate(runs):
        for members in run.panels.values():
            curves.setdefault(members[-1].label, {})[number] = members[-1]
    rows = []
    for label, of_runs in list(curves.items()):
        best = {number: found for number, curve in of_runs.items() if (found := curve.best()) is not None}
        if not best or len(rows) >= 2 * _MOST_METRICS:
            continue
        texts = {number: f"{value_text(value)} @{step:,.0f}" for number, (step, value) in best.items()}
        rows.append(
            _ranked(f"best {label}", runs, {number: value for number, (_, value) in best.items()}, texts, label)
        )
        last = {number: curve.last() for number, curve in of_runs.items()}
        rows.append(_ranked(f"final {label}", runs, last, {n: value_text(v) for n, v in last.items()}, label))
    return rows


def _ranked(name: str, runs: list[RunData], values: dict[int, float], texts: dict[int, str], label: str) -> Row:
    finite = {number: value for number, value in values.items() if np.isfinite(value)}
    winner = None
    if len(finite) > 1 and len(set(finite.values())) > 1:
        winner = (min if is_loss(label) else max)(finite, key=lambda number: finite[number])
    cells = [texts.get(number, "") for number in range(len(runs))]
    return name, [Strong(cell) if number == winner else cell for number, cell in enumerate(cells)], ""


def _figures(runs: list[RunData]) -> list[Row]:
    """The figures of each run but its best values, which stand above."""
    figures = [{name: f"{value}\n{note}".strip() for name, value, note in tiles(run)} for run in runs]
    names = dict.fromkeys(name for each in figures for name in each if not name.startswith("best "))
    values = {name: [each.get(name, "") for each in figures] for name in names}
    words = {name: f"{found[0].splitlines()[0]} {name}" if all(found) else "" for name, found in values.items()}
    return [(name, found, words[name]) for name, found in values.items()]


def _facts(runs: list[RunData]) -> list[Row]:
    """What the runs are: where they come from, versions, pipelines, parameters."""
    facts = [_facts_of(run) for run in runs]
    names = dict.fromkeys(name for each in facts for name in each)
    return [(name, [each.get(name, ("", ""))[0] for each in facts], _word(name, facts)) for name in names]


def _word(name: str, facts: list[dict[str, tuple[str, str]]]) -> str:
    return next((each[name][1] for each in facts if name in each), name)


def _facts_of(run: RunData) -> dict[str, tuple[str, str]]:
    """Facts by name: the text of each, and what it is called where it is the same in all runs."""
    made = {name: (text, "") for name, text in origin(run).items() if text}
    if not run.beginnings:
        return made
    newest = run.beginnings[-1]
    made |= {name: (text, f"{name} {text}" if len(text) < 20 else name) for name, text in newest["versions"].items()}
    for name, loader in newest["loaders"].items():
        made[f"pipeline: {name}"] = (_pipeline_text(loader), f"pipeline of {name}")
    count = newest["state"]["count"]
    made["parameters"] = (f"{count:,}", f"{count:,} parameters")
    made["what is done when"] = ("\n".join(f"{when}: {what}" for when, what in newest["tasks"]), "what is done when")
    if newest["stop"] is not None:
        made["stop"] = (newest["stop"], f"stop {newest['stop']}")
    return made


def _pipeline_text(loader: dict[str, Any]) -> str:
    """A line for each stage and each part of the plan."""
    stages = ["; ".join(f"{key} {value}" for key, value in stage.items() if value) for stage in loader["stages"]]
    return "\n".join([*stages, *(f"{key}: {value}" for key, value in loader["plan"].items())])


def _unlike(values: list[str]) -> list[str]:
    """Texts; of those with several lines, only the lines that not all of them have."""
    if not any("\n" in value for value in values):
        return values
    lines = [value.splitlines() for value in values]
    common = set(lines[0]).intersection(*lines[1:])

    def keep(each: list[str]) -> str:
        return "\n".join(line for line in each if line not in common)

    return [
        Strong(keep(each)) if isinstance(value, Strong) else keep(each)
        for each, value in zip(lines, values, strict=True)
    ]
