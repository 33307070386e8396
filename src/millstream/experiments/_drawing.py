"""Images of experiments."""

from typing import TYPE_CHECKING, Any

from millstream.loops.curves import is_loss
from millstream.text.errors import needs

if TYPE_CHECKING:
    from millstream.loops.picture import Picture


_FEW = 60  # points that are drawn one by one


def draw_rates(caller: str, curve: Any) -> "Picture":
    """See `LearningRateCurve.plot`."""
    with needs(caller, "matplotlib", "plot"):
        from millstream.loops.picture import COLORS, FAINT, Picture, set_style
    figure = Picture(figsize=(7.5, 4.4), layout="constrained", facecolor="white")
    axis = figure.subplots()
    set_style(axis, "loss by learning rate")
    axis.set_xscale("log")
    axis.plot(curve.rates, curve.losses, color=COLORS[0], linewidth=0.7, alpha=0.35, label="loss")
    axis.plot(curve.rates, curve.smoothed, color=COLORS[0], linewidth=1.8, label="smoothed")
    if curve.suggestion is not None:
        axis.axvline(curve.suggestion, color=COLORS[1], linewidth=1.4, linestyle="--")
        axis.set_title(f"suggested {curve.suggestion:.2g}", loc="right", fontsize=10, color=COLORS[1])
    if curve.diverges_at is not None:
        axis.axvline(curve.diverges_at, color=FAINT, linewidth=1.0, linestyle=":")
        place: Any = {"transform": axis.get_xaxis_transform(), "ha": "right", "va": "top"}
        axis.text(curve.diverges_at, 1.0, "diverges ", color=FAINT, fontsize=8.5, **place)
    axis.set_xlabel(f"learning rate\n{curve.reason}", fontsize=9, color=FAINT)
    axis.legend(frameon=False, fontsize=8.5, labelcolor=FAINT)
    return figure


def draw_runs(caller: str, title: str, curves: list[tuple[str, Any]]) -> "Picture":
    """See `Sweep.plot`; the best run comes first."""
    with needs(caller, "matplotlib", "plot"):
        from millstream.loops.picture import COLORS, FAINT, LIGHT, Picture, set_log_axis, set_style
    figure = Picture(figsize=(8.5, 4.4), layout="constrained", facecolor="white")
    axis = figure.subplots()
    set_style(axis, title)
    for number, (name, curve) in reversed(list(enumerate(curves))):
        steps, values = curve.thinned()
        named = number < len(COLORS)
        style: Any = {"marker": "o", "markersize": 3.5} if len(steps) <= _FEW else {}
        axis.plot(
            steps,
            values,
            color=COLORS[number] if named else LIGHT,
            linewidth=1.6 if named else 0.8,
            zorder=3 if named else 2,
            label=name if named else None,
            **style,
        )
    finite = [curve.values[curve.finite] for _, curve in curves]
    known = [values for values in finite if len(values)]
    if known and min(values.min() for values in known) > 0 and is_loss(title):
        set_log_axis(axis)
    axis.set_xlabel("steps", fontsize=9, color=FAINT)
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(
        handles[::-1],
        labels[::-1],
        frameon=False,
        fontsize=8.5,
        labelcolor=FAINT,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        title=f"best {len(COLORS)} of {len(curves)}" if len(curves) > len(COLORS) else None,
        title_fontsize=8.5,
    )
    return figure
