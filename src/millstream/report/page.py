"""One page of HTML about one run or several: it loads nothing, and may load nothing."""

import base64
import hashlib
import importlib.resources
import json
import os
import pathlib
import re
import string
from collections.abc import Iterable, Sequence
from html import escape

import millstream
from millstream.loops.history_table import whole_file
from millstream.report._chart_html import COLORS, chart_html
from millstream.report._charts import curve_charts, mixture_charts, moments, time_charts
from millstream.report._differences import differences
from millstream.report._reading import read_runs
from millstream.report._run_data import RunData
from millstream.report._summary import advice, all_tables, origin, tiles
from millstream.text.errors import describe_value, require_path

_Path = str | os.PathLike[str]


def write_report(runs: _Path | Iterable[_Path], output: _Path | None = None) -> pathlib.Path:
    """Write a page about a run, or about several in comparison, to be looked at in a browser.

    The page is one file: it needs no network, and no script to be read.

    Example:
        >>> from millstream.report.page import write_report
        >>> with ms.callbacks.csv_logger("losses.csv") as writer:
        ...     stopped = writer(ms.loops.Elapsed(steps=1, samples=32), {"loss": 0.5})
        >>> write_report("losses.csv").name
        'losses.html'

    Args:
        runs: Folders of `ms.record` or `ms.checkpoint`, files of `ms.callbacks.jsonl_logger` or
            `ms.callbacks.csv_logger`.
        output: The file to write. None: `report.html` in the folder of the run, or a file beside its own; of several
            runs, `report.html` in the current folder.

    Returns:
        The file that was written.
    """
    if not isinstance(runs, str | os.PathLike | Iterable):
        raise TypeError(f"write_report needs the path of a run, or those of several. Got {describe_value(runs)}.")
    paths = [runs] if isinstance(runs, str | os.PathLike) else list(runs)
    if not paths:
        raise ValueError(f"write_report needs at least one run. Got {describe_value(runs)}.")
    target = None if output is None else require_path("write_report", "output to be a path", output).expanduser()
    if target is not None and target.is_dir():
        raise IsADirectoryError(
            f"write_report needs the path of a file to write. {target} is a folder; {target / 'report.html'} would do."
        )
    page = make_page(read_runs(paths)).encode()
    with whole_file("write_report", _place(paths) if target is None else target) as (final, file):
        file.write(page)
    return final.resolve()


def _place(paths: Sequence[_Path]) -> pathlib.Path:
    if len(paths) > 1:
        return pathlib.Path("report.html")
    path = pathlib.Path(paths[0]).expanduser()
    return path / "report.html" if path.is_dir() else path.with_suffix(".html")


def make_page(runs: list[RunData], *, is_live: bool = False, wrong: Sequence[str] = ()) -> str:
    """The page, as text.

    Args:
        runs: What it is about.
        is_live: Whether it comes from a server, which it asks for newer ones.
        wrong: What could not be read, in words.
    """
    files = importlib.resources.files("millstream.report")
    style, script, page = ((files / name).read_text("utf-8") for name in ("page.css", "page.js", "page.html"))
    names = [run.name for run in runs]
    curves, left_out = curve_charts(runs)
    curves += mixture_charts(runs)
    times = time_charts(runs)
    charts = [chart_html(chart, number, names) for number, chart in enumerate((*curves, *times))]
    data = {
        "runs": [{"name": run.name, "moments": moments(run)} for run in runs],
        "charts": [chart.data() for chart in (*curves, *times)],
    }
    return string.Template(page).substitute(
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        connect="'self'" if is_live else "'none'",
        live="" if is_live else "hidden",
        title=escape(" and ".join(names)),
        heads="".join(f'<p class="alarm">{escape(text)}</p>' for text in wrong)
        + ("".join(map(_head, runs)) if len(runs) == 1 else _comparison(runs)),
        runs=_legend(names) if len(runs) > 1 else "",
        curves="".join(charts[: len(curves)]) or "<p>Nothing was logged.</p>",
        left_out=_left_out(left_out),
        times="".join(charts[len(curves) :]) or "<p>No timing data was recorded.</p>",
        tables=all_tables(runs),
        # In a script element nothing but "<" could end the data.
        data=json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        version=escape(millstream.__version__),
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _head(run: RunData) -> str:
    cards = "".join(
        f"<li><span>{escape(name)}</span>{_figure(value)}<small>{escape(note)}</small></li>"
        for name, value, note in tiles(run)
    )
    note = origin(run)["note"]
    said = f'<p class="said">{escape(note)}</p>' if note else ""
    return f'{said}<p class="advice">{escape(_advice(run))}</p><ul class="tiles">{cards}</ul>'


def _figure(value: str) -> str:
    """The number of a tile; one that would not fit is shortened, and whole under the pointer."""
    if re.fullmatch(r"\d{1,3}(,\d{3}){2,}", value):
        rounded = float(f"{float(value.replace(',', '')):.3g}")
        size, unit = next((size, unit) for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if rounded >= size)
        return f'<strong title="{value}">{rounded / size:g}{unit}</strong>'
    return f"<strong>{escape(value)}</strong>"


def _advice(run: RunData) -> str:
    is_empty = not len(run.history) and run.times is None
    return "Nothing has been recorded yet." if is_empty else advice(run)


def _legend(names: list[str]) -> str:
    """The runs with their colors."""
    return "".join(
        f'<li><span class="swatch c{number % COLORS} s0"></span>{escape(name)}</li>'
        for number, name in enumerate(names)
    )


def _comparison(runs: list[RunData]) -> str:
    """The figures of several runs beside each other, and the advice for each."""
    said = "".join(f'<p class="advice"><b>{escape(run.name)}</b> {escape(_advice(run))}</p>' for run in runs)
    return said + differences(runs)


def _left_out(names: list[str]) -> str:
    return f'<p class="note">Not drawn, because there are so many: {escape(", ".join(names))}.</p>' if names else ""
