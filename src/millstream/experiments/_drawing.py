"""Images of experiments."""

from typing import TYPE_CHECKING, Any

from millstream.text.errors import needs

if TYPE_CHECKING:
    from millstream.loops.picture import Picture


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
