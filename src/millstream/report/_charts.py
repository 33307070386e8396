"""Charts of the metrics of runs, and of what their time was used for."""

import dataclasses
import itertools
import math

import numpy as np

from millstream.loops.curves import Curve, is_loss
from millstream.report._chart import (
    Axis,
    Binned,
    Chart,
    Series,
    binned,
    bytes_axis,
    lasts,
    linear_axis,
    log_axis,
    settled_part,
    steps_axis,
    summed,
    time_axis,
    value_text,
)
from millstream.report._run_data import USES, RunData, Times
from millstream.text.tables import size_text

MOST_CURVES = 40  # of a run; a page would be slow with more
_MOST_POINTS = 40_000  # of all curves of a page, which is 2 MB or 3 then
_DECADES = 100  # losses that span this factor are shown on a logarithmic axis
_MOST_EPOCHS = 8
_MOST = 240  # windows of a chart
_SHARES = Axis(0.0, 1.0, [(share / 4, f"{25 * share} %") for share in range(5)])
_MOMENTS = 400  # at which it is known where a run was
# What a record may know of memory, and how it is called here.
_MEMORY = {"host_memory": "host", "device_memory": "devices"}


def curve_charts(runs: list[RunData]) -> tuple[list[Chart], list[str]]:
    """The charts, losses first, and the names of entries that there was no room for."""
    curves: dict[str, list[tuple[RunData, Curve]]] = {}
    for run in runs:
        for subject, members in run.panels.items():
            curves.setdefault(subject, []).extend((run, curve) for curve in members)
    drawn, left_out, room = [], [], MOST_CURVES * len(runs)
    for subject in sorted(curves, key=lambda subject: not is_loss(subject)):
        room -= len(curves[subject])
        (drawn if room >= 0 else left_out).append(subject)
    most = min(max(_MOST_POINTS // max(sum(len(curves[subject]) for subject in drawn), 1), 250), 1000)
    return [_chart(subject, curves[subject], runs, most) for subject in drawn], left_out


def best_values(run: RunData) -> list[tuple[str, float, float]]:
    """Name, value and step of the best value of each metric whose name says what is good, evaluations first."""
    found = []
    for members in run.panels.values():
        best = members[-1].best()
        if best is not None:
            found.append((members[-1].label, best[1], best[0]))
    return found


def odd_values(run: RunData) -> list[tuple[str, int, int]]:
    """Name, count and first step of the values of each metric that are not finite."""
    curves = [curve for members in run.panels.values() for curve in members]
    return [
        (curve.label, int((~curve.finite).sum()), int(curve.steps[~curve.finite][0]))
        for curve in curves
        if not curve.finite.all()
    ]


def _chart(subject: str, curves: list[tuple[RunData, Curve]], runs: list[RunData], most: int) -> Chart:
    # The last curve of a run is that of an evaluation, if there is one: its best point is the one that counts.
    lasts = {run: curve for run, curve in curves}
    labels = list(dict.fromkeys(curve.label for _, curve in curves))
    series = []
    for run, curve in curves:
        number, dash = runs.index(run), labels.index(curve.label)
        made = _series(curve, most, has_best=lasts[run] is curve)
        color = dash if len(runs) == 1 else number
        series.append(dataclasses.replace(made, run=number, color=color, dash=dash))
    steps = np.concatenate([np.repeat(each.points.steps, 2) for each in series])
    values = np.concatenate([np.stack([each.points.low, each.points.high], 1).reshape(-1) for each in series])
    x, log = steps_axis(float(steps.min()), float(steps.max())), log_axis(values)
    known, shown = values[np.isfinite(values)], settled_part(x.place(steps), values)
    is_log = log is not None and is_loss(subject) and bool(known.max() / known.min() >= _DECADES)
    best = series[-1].best if len(runs) == 1 else None
    return Chart(
        subject,
        x,
        log if is_log and log is not None else linear_axis(shown),
        series,
        is_log=is_log,
        is_cut=not is_log and shown is not values,
        epochs=_epochs(runs[0]) if len(runs) == 1 else [],
        caption="" if best is None else f"best {value_text(best[1])} at step {best[0]:,.0f}",
    )


def _series(curve: Curve, most: int, *, has_best: bool) -> Series:
    points = binned(curve.steps, curve.values, most)
    smooth = None if curve.smooth is None else binned(curve.steps, curve.smooth, most).mean
    last = curve.last()
    text, best = value_text(last) if math.isfinite(last) else "", curve.best() if has_best else None
    return Series(curve.label, points, smooth, text, best)


def _epochs(run: RunData) -> list[tuple[float, str]]:
    """Where some of the epochs ended."""
    ends = run.epoch_ends
    strides = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    stride = next(size for size in strides if len(ends) <= size * _MOST_EPOCHS)
    chosen = [epoch for epoch in sorted(ends) if epoch % stride == 0]
    return [(ends[epoch], f"epoch {epoch:,}" if epoch == chosen[0] else f"{epoch:,}") for epoch in chosen]


def moments(run: RunData) -> dict[str, list[float]]:
    """Where the run was at some of its steps, in each unit that is known: step, epoch, samples, time."""
    if not len(run.history):
        return {}
    rows, units = np.unique(np.linspace(0, len(run.history) - 1, _MOMENTS).astype(np.int64)), run.history.units()
    steps, samples, times = (
        np.array([units[name][row] for row in rows], np.float64) for name in ("steps", "samples", "time")
    )
    found = {"step": steps, "samples": samples, "time": times}
    if run.epoch_ends:
        epochs, ends = [0.0, *run.epoch_ends], [0.0, *run.epoch_ends.values()]
        # The last epoch may not have ended: it is taken to be as long as the one before it.
        epochs, ends = [*epochs, epochs[-1] + 1], [*ends, 2 * ends[-1] - ends[-2]]
        found["epoch"] = np.interp(steps, ends, epochs)
    rising = {name: np.maximum.accumulate(values) for name, values in found.items() if values[-1] > 0}
    return {name: [0.0, *(float(f"{value:.7g}") for value in values.tolist())] for name, values in rising.items()}


def mixture_charts(runs: list[RunData]) -> list[Chart]:
    """For each run over a mixture, what share each source was to have, and what it had."""
    charts = []
    for run_number, run in enumerate(runs):
        if run.mixture is None:
            continue
        series = []
        for number, name in enumerate(run.mixture.planned):
            for dash, (kind, shares) in enumerate((("seen", run.mixture.seen), ("planned", run.mixture.planned))):
                steps, values = shares[name]
                if len(steps):
                    points, last = binned(steps, values), _share_text(float(values[-1]))
                    made = Series(f"{name}, {kind}", points, None, last, run=run_number, color=number, dash=dash)
                    series.append(made)
        steps = np.concatenate([each.points.steps for each in series])
        x = steps_axis(float(steps.min()), float(steps.max()))
        title, caption = f"{_prefix(run, runs)}Mixture", "share of each source"
        charts.append(Chart(title, x, _SHARES, series, kind="share", of_one_run=True, caption=caption))
    return charts


def _prefix(run: RunData, runs: list[RunData]) -> str:
    return "" if len(runs) == 1 else f"{run.name}: "


def time_charts(runs: list[RunData]) -> list[Chart]:
    """Speed, waiting and memory of all runs, and what the time of each went to; none for runs without times."""
    known = [(number, run.times) for number, run in enumerate(runs) if run.times is not None]
    if not known:
        return []
    axis = time_axis(max(float(times.seconds.sum()) for _, times in known))
    charts = [_speed(known, axis), _waiting(known, axis), _memory(known, axis, of_one=len(runs) == 1)]
    uses = [_uses(_prefix(runs[number], runs), number, times) for number, times in known]
    return [chart for chart in charts if chart is not None] + uses


def _speed(runs: list[tuple[int, Times]], axis: Axis) -> Chart | None:
    series = []
    for number, times in runs:
        if times.steady.any():
            samples, busy = (summed(np.where(times.steady, each, 0.0), _MOST) for each in (times.samples, times.busy))
            speed, median = np.where(busy > 0, samples / np.maximum(busy, 1e-9), np.nan), times.samples_per_second()
            text = "" if median is None else value_text(median)
            series.append(_over_time("samples per second", number, times, speed, text))
    if not series:
        return None
    y, caption = (
        linear_axis(np.concatenate([each.points.mean for each in series]), least=0.0),
        "without compiling and tests",
    )
    return Chart("Throughput", axis, y, series, over="time", least=0.0, caption=caption)


def _waiting(runs: list[tuple[int, Times]], axis: Axis) -> Chart | None:
    series = []
    for number, times in runs:
        if "data" in times.uses:
            waited, seconds = (summed(each, _MOST) for each in (times.uses["data"], times.seconds))
            share = times.share("data")
            series.append(_over_time("waiting", number, times, waited / seconds, _share_text(share)))
    return Chart("Waiting for data", axis, _SHARES, series, over="time", kind="share") if series else None


def _memory(runs: list[tuple[int, Times]], axis: Axis, *, of_one: bool) -> Chart | None:
    series = []
    for number, times in runs:
        for dash, (name, label) in enumerate(_MEMORY.items()):
            used = times.memory.get(name)
            if used is not None and np.isfinite(used).any():
                values = lasts(used, _MOST)
                made = _over_time(label, number, times, values, size_text(int(values[np.isfinite(values)][-1])))
                series.append(dataclasses.replace(made, color=dash if of_one else number, dash=dash))
    if not series:
        return None
    y, caption = bytes_axis(np.concatenate([each.points.mean for each in series])), "at the end of each window"
    return Chart("Memory", axis, y, series, over="time", kind="bytes", least=0.0, caption=caption)


def _uses(prefix: str, run: int, times: Times) -> Chart:
    """What each window was used for, as shares of it."""
    seconds = summed(times.seconds, _MOST)
    series = []
    for use, spent in times.uses.items():
        shares = _over_time(USES[use], run, times, summed(spent, _MOST) / seconds, _share_text(times.share(use)))
        series.append(dataclasses.replace(shares, color=list(USES).index(use)))  # the same for all runs on a page
    x, title = time_axis(float(times.seconds.sum())), f"{prefix}Where the time goes"
    return Chart(title, x, _SHARES, series, over="time", kind="share", stacked=True, of_one_run=True)


def _over_time(label: str, run: int, times: Times, values: np.ndarray, last: str) -> Series:
    ends = lasts(np.cumsum(times.seconds), _MOST)
    return Series(label, Binned(ends, values, values, values, ends[:0]), None, last, run=run, color=run)


def _share_text(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
