"""Charts of what the time of a run was used for."""

import dataclasses

import numpy as np

from millstream.report._axis import Axis, linear_axis
from millstream.report._bins import Binned, lasts, summed
from millstream.report._chart import Chart, Series, value_text
from millstream.report._run_data import USES, RunData, Times

_MOST = 240  # windows of a chart
_SHARES = Axis(0.0, 1.0, [(share / 4, f"{25 * share} %") for share in range(5)])
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


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
