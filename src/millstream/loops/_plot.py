"""An image of a history: one panel per metric, with labels on the curves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from millstream.loops.curves import Curve, is_loss, panels
from millstream.text.errors import needs, require_bool, require_names, require_number, require_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from millstream.loops._history import History
    from millstream.loops.picture import Picture

_ALARM = "#B00020"
_LINE_HEIGHT = 0.17  # inches between labels
_DECADES = 100  # losses that span this factor get a logarithmic axis
_MOST_EPOCHS = 8
_STRIDES = [digit * 10**power for power in range(7) for digit in (1, 2, 5)]


def draw(
    history: "History", *, names: Sequence[str] | None, title: str | None, smooth: float | None, log: bool | None
) -> "Picture":
    """See `History.plot`."""
    if names is not None:
        require_names("History.plot", "names", names)
    if smooth is not None:
        require_number("History.plot", "smooth", smooth)
    if smooth is not None and not 0 <= smooth <= 1:
        raise ValueError(f"History.plot needs smooth as a share of the steps between 0 and 1. Got {smooth!r}.")
    if title is not None:
        require_text("History.plot", "title", title)
    if log is not None:
        require_bool("History.plot", "log", log)
    with needs("History.plot", "matplotlib", "plot"):
        from millstream.loops.picture import INK, Picture
    curves = panels(history, None if names is None else list(names), smooth)
    width, height = (7.5, 4.4) if len(curves) == 1 else (5.4, 3.5)
    across = len(curves) if len(curves) < 4 else (2 if len(curves) == 4 else 3)
    down = -(-len(curves) // across)
    # A figure of its own, without pyplot, changes nothing for other images of the program.
    figure = Picture(figsize=(width * across, height * down), layout="constrained", facecolor="white")
    if title is not None:
        figure.suptitle(title, color=INK, fontsize=13)
    axes = figure.subplots(down, across, squeeze=False).reshape(-1)
    units = history.units()
    for number, (axis, (subject, members)) in enumerate(zip(axes, curves.items(), strict=False)):
        _panel(axis, subject, members, log, inches=height - 1.0)
        _steps_axis(axis, units["steps"], named=number + across >= len(curves))
        _epochs_axis(axis, units["steps"], units["epochs"], named=number < across)
    for axis in axes[len(curves) :]:
        axis.set_axis_off()
    return figure


def _panel(axis: "Axes", subject: str, curves: list[Curve], log: bool | None, inches: float) -> None:
    from millstream.loops.picture import COLORS, set_log_axis, set_style

    set_style(axis, subject)
    if _is_logarithmic(subject, curves, log):
        set_log_axis(axis)
    axis.margins(x=0.02, y=0.08)
    colors = [COLORS[i % len(COLORS)] for i in range(len(curves))]
    for curve, color in zip(curves, colors, strict=True):
        _curve(axis, curve, color)
    axis.autoscale_view()  # labels are placed by the limits of the axis
    _missing(axis, curves, colors)
    # The last curve is that of an evaluation, if there is one: its best point is the one that counts.
    _best(axis, curves[-1], colors[-1])
    _labels(axis, curves, colors, inches)


def _is_logarithmic(subject: str, curves: list[Curve], log: bool | None) -> bool:
    values = np.concatenate([curve.values[curve.finite] for curve in curves])
    if not len(values) or values.min() <= 0:
        return False
    return (is_loss(subject) and bool(values.max() / values.min() >= _DECADES)) if log is None else log


def _curve(axis: "Axes", curve: Curve, color: str) -> None:
    steps, values = curve.thinned()
    if curve.smooth is None:
        axis.plot(steps, values, color=color, linewidth=1.6, marker="o", markersize=4, markeredgewidth=0, zorder=3)
        return
    axis.plot(steps, values, color=color, linewidth=0.6, alpha=0.3, zorder=2)
    smoothed = Curve(curve.label, curve.steps, curve.smooth, None)
    axis.plot(*smoothed.thinned(), color=color, linewidth=1.8, zorder=3)


def _missing(axis: "Axes", curves: list[Curve], colors: list[str]) -> None:
    """Crosses at the bottom where values are not finite, with the first step in words."""
    lines = []
    for curve, color in zip(curves, colors, strict=True):
        steps = curve.steps[~curve.finite]
        if len(steps):
            shown = steps[np.linspace(0, len(steps) - 1, min(len(steps), 200)).astype(np.int64)]
            axis.plot(
                shown,
                np.full(len(shown), 0.015),
                transform=axis.get_xaxis_transform(),
                linestyle="none",
                marker="x",
                markersize=5,
                color=color,
                markeredgewidth=1.3,
                clip_on=False,
                zorder=5,
            )
            caller = f"{curve.label}: " if len(curves) > 1 else ""
            lines.append(f"{caller}{len(steps):,} not finite, first at step {steps[0]:,}")
    if lines:
        axis.text(0.01, 0.04, "\n".join(lines), transform=axis.transAxes, fontsize=8, color=_ALARM, zorder=6)


def _best(axis: "Axes", curve: Curve, color: str) -> None:
    """A ring around the best point; its value and step stand above the panel, where no curve runs through them."""
    best = curve.best()
    if best is not None:
        step, value = best
        axis.plot([step], [value], "o", ms=8, mfc="white", mec=color, mew=1.8, zorder=6)
        axis.set_title(f"best {_number(value)} at step {step:,.0f}", loc="right", fontsize=9, color=color)


def _height(axis: "Axes", value: float) -> float:
    """Where a value lies between the bottom of an axis and its top, 0 to 1."""
    return float((axis.transScale + axis.transLimits).transform((1.0, value))[1])


def _labels(axis: "Axes", curves: list[Curve], colors: list[str], inches: float) -> None:
    """The names of the curves where they end, moved apart where they would lie on each other."""
    known = [(curve, color) for curve, color in zip(curves, colors, strict=True) if np.isfinite(curve.last())]
    heights = [_height(axis, curve.last()) for curve, _ in known]
    for i, height in _apart(heights, _LINE_HEIGHT / inches):
        curve, color = known[i]
        text = _number(curve.last()) if len(curves) == 1 else f"{curve.label}  {_number(curve.last())}"
        axis.text(1.015, height, text, transform=axis.transAxes, va="center", fontsize=9, color=color)


def _apart(heights: list[float], gap: float) -> list[tuple[int, float]]:
    """Numbers and heights of labels, each at least a gap above the one below."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed: list[tuple[int, float]] = []
    for i in order:
        placed.append((i, max(heights[i], placed[-1][1] + gap) if placed else heights[i]))
    shift = max(placed[-1][1] - 1.0, 0.0) if placed else 0.0
    return [(i, height - shift) for i, height in placed]


def _steps_axis(axis: "Axes", steps: list[int], *, named: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    from millstream.loops.picture import FAINT

    if steps[0] == steps[-1]:
        axis.set_xlim(steps[0] - 1, steps[0] + 1)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda step, _: _count(step)))
    if named:
        axis.set_xlabel("steps", fontsize=9, color=FAINT)


def _epochs_axis(axis: "Axes", steps: list[int], epochs: list[Any], *, named: bool) -> None:
    """Light ticks on top where epochs ended."""
    from millstream.loops.picture import LIGHT

    ends = {e: s for s, e in reversed(list(zip(steps, epochs, strict=True))) if e is not None and e > 0}
    if not ends:
        return
    stride = next(size for size in _STRIDES if len(ends) <= size * _MOST_EPOCHS or size == _STRIDES[-1])
    chosen = sorted(epoch for epoch in ends if epoch % stride == 0)
    labels = [f"epoch {epoch:,}" if i == 0 else f"{epoch:,}" for i, epoch in enumerate(chosen)]
    top = axis.secondary_xaxis("top")
    top.set_xticks([ends[epoch] for epoch in chosen], labels if named else [""] * len(labels))
    top.tick_params(colors=LIGHT, labelsize=7.5, length=3, pad=1)
    top.spines["top"].set_visible(False)


def _number(value: float) -> str:
    return f"{value:.4g}"


def _count(step: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(step) >= 10 * size or (abs(step) >= size and step % (size / 10) == 0):
            return f"{step / size:g}{unit}"
    return f"{step:g}"
