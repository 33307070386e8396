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
    lasts,
    linear_axis,
    log_axis,
    steps_axis,
    summed,
    value_text,
)
from millstream.report._run_data import USES, RunData, Times

MOST_CURVES = 40  # of a page, which would be slow with more
_DECADES = 100  # losses that span this factor are shown on a logarithmic axis
_MOST_EPOCHS = 8
_MOST = 240  # windows of a chart
_SHARES = Axis(0.0, 1.0, [(share / 4, f"{25 * share} %") for share in range(5)])
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def curve_charts(runs: list[RunData]) -> tuple[list[Chart], list[str]]:
    """The charts, losses first, and the names of entries that there was no room for."""
    curves: dict[str, list[tuple[RunData, Curve]]] = {}
    for run in runs:
        for subject, members in run.panels.items():
            curves.setdefault(subject, []).extend((run, curve) for curve in members)
    charts, left_out, room = [], [], MOST_CURVES
    for subject in sorted(curves, key=lambda subject: not is_loss(subject)):
        room -= len(curves[subject])
        if room >= 0:
            charts.append(_chart(subject, curves[subject], runs))
        else:
            left_out.append(subject)
    return charts, left_out


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


def _chart(subject: str, curves: list[tuple[RunData, Curve]], runs: list[RunData]) -> Chart:
    # The last curve of a run is that of an evaluation, if there is one: its best point is the one that counts.
    lasts = {run: curve for run, curve in curves}
    series = [
        _series(curve, "" if len(runs) == 1 else f"{run.name}: ", has_best=lasts[run] is curve) for run, curve in curves
    ]
    steps = np.concatenate([each.points.steps for each in series])
    values = np.concatenate([each for one in series for each in (one.points.low, one.points.high)])
    linear, log = linear_axis(values), log_axis(values)
    known = values[np.isfinite(values)]
    first_log = log is not None and is_loss(subject) and known.max() / known.min() >= _DECADES
    best = series[-1].best if len(runs) == 1 else None
    return Chart(
        subject,
        steps_axis(float(steps.min()), float(steps.max())),
        log if log is not None and first_log else linear,
        series,
        other=linear if first_log else log,
        epochs=_epochs(runs[0]) if len(runs) == 1 else [],
        caption="" if best is None else f"best {value_text(best[1])} at step {best[0]:,.0f}",
    )


def _series(curve: Curve, prefix: str, *, has_best: bool) -> Series:
    points = binned(curve.steps, curve.values)
    smooth = None if curve.smooth is None else binned(curve.steps, curve.smooth).mean
    last = curve.last()
    text, best = value_text(last) if math.isfinite(last) else "", curve.best() if has_best else None
    return Series(prefix + curve.label, points, smooth, text, best)


def _epochs(run: RunData) -> list[tuple[float, str]]:
    """Where some of the epochs ended."""
    ends = run.epoch_ends
    strides = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    stride = next(size for size in strides if len(ends) <= size * _MOST_EPOCHS)
    chosen = [epoch for epoch in sorted(ends) if epoch % stride == 0]
    return [(ends[epoch], f"epoch {epoch:,}" if epoch == chosen[0] else f"{epoch:,}") for epoch in chosen]


def mixture_charts(runs: list[RunData]) -> list[Chart]:
    """For each run over a mixture, what share each source was to have, and what it had."""
    charts = []
    for run in runs:
        if run.mixture is None:
            continue
        series = []
        for number, name in enumerate(run.mixture.planned):
            for kind, shares in (("planned", run.mixture.planned), ("seen", run.mixture.seen)):
                steps, values = shares[name]
                if len(steps):
                    color, last = 2 * number + (kind == "seen"), _share_text(float(values[-1]))
                    series.append(Series(f"{name}, {kind}", binned(steps, values), None, last, color=color))
        steps = np.concatenate([each.points.steps for each in series])
        prefix, x = "" if len(runs) == 1 else f"{run.name}: ", steps_axis(float(steps.min()), float(steps.max()))
        charts.append(Chart(f"{prefix}Mixture", x, _SHARES, series, percent=True, caption="share of each source"))
    return charts


def time_charts(runs: list[RunData]) -> list[Chart]:
    """Speed and waiting of all runs, and for each what its time went to; none for runs whose times are not known."""
    known = [(run, run.times) for run in runs if run.times is not None]
    if not known:
        return []
    axis = time_axis(max(float(times.seconds.sum()) for _, times in known))
    prefixes = ["" if len(runs) == 1 else f"{run.name}: " for run, _ in known]
    pairs = list(zip(prefixes, (times for _, times in known), strict=True))
    charts = [_speed(pairs, axis), _waiting(pairs, axis)]
    return [chart for chart in charts if chart is not None] + [_uses(prefix, times) for prefix, times in pairs]


def time_axis(seconds: float) -> Axis:
    """An axis of time from 0 on."""
    size, unit = next((size, unit) for size, unit in _UNITS if seconds >= 2 * size or size == 1.0)
    inner = linear_axis(np.array([seconds / size]), least=0.0)
    ticks = [(value * size, f"{text} {unit}") for value, text in inner.ticks if value * size <= seconds]
    return Axis(0.0, seconds, ticks)


def _speed(runs: list[tuple[str, Times]], axis: Axis) -> Chart | None:
    series = []
    for prefix, times in runs:
        if times.steady.any():
            samples, busy = (summed(np.where(times.steady, each, 0.0), _MOST) for each in (times.samples, times.busy))
            speed, median = np.where(busy > 0, samples / np.maximum(busy, 1e-9), np.nan), times.samples_per_second()
            text = "" if median is None else value_text(median)
            series.append(_over_time(f"{prefix}samples per second", times, speed, text))
    if not series:
        return None
    values = np.concatenate([each.points.mean for each in series])
    caption = "without compiling and tests"
    return Chart("Throughput", axis, linear_axis(values, least=0.0), series, over="time", caption=caption)


def _waiting(runs: list[tuple[str, Times]], axis: Axis) -> Chart | None:
    series = []
    for prefix, times in runs:
        if "data" in times.uses:
            waited, seconds = (summed(each, _MOST) for each in (times.uses["data"], times.seconds))
            share = times.share("data")
            series.append(_over_time(f"{prefix}waiting", times, waited / seconds, _share_text(share)))
    return Chart("Waiting for data", axis, _SHARES, series, over="time", percent=True) if series else None


def _uses(prefix: str, times: Times) -> Chart:
    """What each window was used for, as shares of it."""
    seconds = summed(times.seconds, _MOST)
    series = []
    for use, spent in times.uses.items():
        shares = _over_time(USES[use], times, summed(spent, _MOST) / seconds, _share_text(times.share(use)))
        series.append(dataclasses.replace(shares, color=list(USES).index(use)))  # the same for all runs on a page
    x = time_axis(float(times.seconds.sum()))
    return Chart(f"{prefix}Where the time goes", x, _SHARES, series, over="time", percent=True, stacked=True)


def _over_time(label: str, times: Times, values: np.ndarray, last: str) -> Series:
    ends = lasts(np.cumsum(times.seconds), _MOST)
    return Series(label, Binned(ends, values, values, values, ends[:0]), None, last)


def _share_text(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
