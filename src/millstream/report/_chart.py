"""What a chart shows, before anything is drawn."""

import dataclasses
import math
from typing import Any

import numpy as np

from millstream.report._axis import Axis
from millstream.report._bins import Binned


@dataclasses.dataclass(frozen=True, eq=False)
class Series:
    """One curve of a chart.

    Attributes:
        label: What it is called.
        points: What is drawn.
        smooth: Its values averaged over their neighbours, at the same places; None if it is drawn as it is.
        last: Its newest value, as a text; "" if there is none.
        best: Where its best value is, and that value; None if nobody can tell.
        color: The number of its color; None for that of its place in the chart.
    """

    label: str
    points: Binned
    smooth: np.ndarray | None = None
    last: str = ""
    best: tuple[float, float] | None = None
    color: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Chart:
    """Curves over steps or over time; or shares of a whole, one upon the other.

    Attributes:
        title: What it shows.
        x: Its lower axis.
        y: Its axis on the left.
        series: Its curves.
        other: The axis on the left in the other scale, linear or logarithmic; None if there is none.
        over: "step", or "time": each value then holds from the point before it.
        percent: Whether values are shares.
        stacked: Whether its values lie upon each other.
        epochs: Where epochs ended, with their numbers.
        caption: What is said beside the title.
    """

    title: str
    x: Axis
    y: Axis
    series: list[Series]
    other: Axis | None = None
    over: str = "step"
    percent: bool = False
    stacked: bool = False
    epochs: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    caption: str = ""

    def data(self) -> dict[str, Any]:
        """The chart as the script of the page needs it."""
        return {
            "x": {"low": self.x.low, "high": self.x.high},
            "axes": [dataclasses.asdict(axis) for axis in (self.y, self.other) if axis is not None],
            "over": self.over,
            "percent": self.percent,
            "stacked": self.stacked,
            "series": [_series_data(series) for series in self.series],
        }


def value_text(value: float) -> str:
    """A value as it is shown.

    Example:
        >>> value_text(0.123456), value_text(12345.6)
        ('0.1235', '12,346')
    """
    return f"{value:.4g}" if abs(value) < 1e3 else f"{value:,.0f}" if abs(value) < 1e12 else f"{value:.3e}"


def _series_data(series: Series) -> dict[str, Any]:
    points = series.points
    data = {"label": series.label, "x": points.steps.tolist(), "mean": _numbers(points.mean)}
    if not points.is_exact:
        data |= {"low": _numbers(points.low), "high": _numbers(points.high)}
    return data | {"smooths": series.smooth is not None}


def _numbers(values: np.ndarray) -> list[float | None]:
    """Values with more digits than are shown, and None where there is none."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
