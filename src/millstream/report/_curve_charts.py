"""Charts of what was logged: a metric and its evaluations in one, of one run or of several."""

import itertools
import math

import numpy as np

from millstream.loops.curves import Curve, is_loss
from millstream.report._axis import linear_axis, log_axis, steps_axis
from millstream.report._bins import binned
from millstream.report._chart import Chart, Series, value_text
from millstream.report._run_data import RunData

MOST_CURVES = 40  # of a page, which would be slow with more
_DECADES = 100  # losses that span this factor are shown on a logarithmic axis
_MOST_EPOCHS = 8


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
