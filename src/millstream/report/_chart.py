"""What a chart shows, before anything is drawn."""

import dataclasses
import math
from typing import Any

import numpy as np

from millstream.text.ticks import multiples, round_stride, short_count

_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_SMALLEST, _LARGEST = 1e-270, 1e270  # ends of an axis are a little farther out, and must still be numbers
_MOST_ODD = 100
_EARLY, _MUCH = 0.1, 3.0  # the first tenth of a chart is cut off if it would take two thirds of the height


@dataclasses.dataclass(frozen=True)
class Axis:
    """A range of values, and those that are written beside it.

    Attributes:
        low: The value at its begin.
        high: The value at its end.
        ticks: Values with their texts.
        log: Whether equal ratios have equal lengths.
    """

    low: float
    high: float
    ticks: list[tuple[float, str]]
    log: bool = False

    def place(self, values: np.ndarray) -> np.ndarray:
        """Where values lie, 0 at the begin and 1 at the end; NaN for those that such an axis cannot have."""
        low, high = self.low, self.high
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.where(values > 0, np.log10(values), np.nan)
            low, high = math.log10(low), math.log10(high)
        return (values - low) / (high - low)


def steps_axis(first: float, last: float) -> Axis:
    """An axis of steps, which begins and ends with those that there are."""
    if first == last:
        first, last = first - 1, last + 1
    stride = max(round_stride((last - first) / 6), 1)
    ticks = [value for value in multiples(first, last, stride) if value >= 0]
    return Axis(first, last, [(value, short_count(value)) for value in ticks])


def time_axis(seconds: float) -> Axis:
    """An axis of time from 0 on."""
    size, unit = next((size, unit) for size, unit in _TIMES if seconds >= 2 * size or size == 1.0)
    stride = round_stride(seconds / size / 6)
    ticks = [
        (value * size, f"{_tick_text(value, _digits(stride))} {unit}") for value in multiples(0, seconds / size, stride)
    ]
    return Axis(0.0, seconds, ticks)


def bytes_axis(values: np.ndarray) -> Axis:
    """An axis of bytes from 0 on."""
    known = values[np.isfinite(values)]
    size, unit = next((size, unit) for size, unit in _SIZES if (len(known) and known.max() >= size) or size == 1.0)
    return linear_axis(values, least=0.0, unit=size, name=unit)


def settled_part(places: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The values an axis is made for: without the first ones, if those would flatten all others.

    Args:
        places: Where each value is, from 0 to 1.
        values: All of them.
    """
    known = np.isfinite(values)
    late = values[known & (places >= _EARLY)]
    if len(late) > 1 and 0 < np.ptp(late) * _MUCH < np.ptp(values[known]):
        return late
    return values


def linear_axis(values: np.ndarray, *, least: float | None = None, unit: float = 1.0, name: str = "") -> Axis:
    """An axis for values, with some room at both ends.

    Args:
        values: All of them.
        least: A value below which the axis need not go, and up to which it does.
        unit: What ticks are multiples of.
        name: Of the unit, written after each number.
    """
    known = np.clip(values[np.isfinite(values)] / unit, -_LARGEST, _LARGEST)
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    low = low if least is None else min(least, low)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = low - (0.0 if low == least else room), high + room
    stride = round_stride((high - low) / 6)
    texts = {value: f"{_tick_text(value, _digits(stride))} {name}".strip() for value in multiples(low, high, stride)}
    return Axis(low * unit, high * unit, [(value * unit, text) for value, text in texts.items()])


def log_axis(values: np.ndarray) -> Axis | None:
    """A logarithmic axis; None if some of the values are not above zero or out of all measure, or there are none."""
    known = values[np.isfinite(values)]
    if not len(known) or known.min() < _SMALLEST or known.max() > _LARGEST:
        return None
    low, high = math.log10(known.min()), math.log10(known.max())
    room = (high - low) * 0.06 or 0.3
    low, high = low - room, high + room
    decades = high - low
    digits = (1,) if decades > 4 else (1, 3) if decades > 2 else (1, 2, 5)
    stride = max(1, round(decades / 6))
    powers = range(math.floor(low), math.ceil(high) + 1)
    values_at = [digit * 10.0**power for power in powers if power % stride == 0 for digit in digits]
    ticks = [(value, f"{value:g}") for value in values_at if low <= math.log10(value) <= high]
    if len(ticks) < 2:
        ticks = [(value, text) for value, text in linear_axis(known).ticks if 10**low <= value <= 10**high]
    return Axis(10**low, 10**high, ticks, log=True)


def _tick_text(value: float, digits: int) -> str:
    if abs(value) >= 1e4:
        return short_count(value) if abs(value) < 1e13 else f"{value:.3g}"
    return f"{value:.{digits}f}" if digits <= 5 else f"{value:.3g}"


def _digits(stride: float) -> int:
    """How many digits after the point tell multiples apart."""
    return max(0, -math.floor(math.log10(stride) + 1e-9))


@dataclasses.dataclass(frozen=True, eq=False)
class Binned:
    """Points of a curve, each of them standing for one or several.

    Attributes:
        steps: Where each is: the last step it stands for.
        low: The lowest of its values; NaN if none is finite.
        mean: Their mean.
        high: The highest.
        odd: Steps whose values are not finite.
    """

    steps: np.ndarray
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray
    odd: np.ndarray

    @property
    def is_exact(self) -> bool:
        """Whether each point stands for itself."""
        return self.low is self.high


def binned(steps: np.ndarray, values: np.ndarray, most: int = 1000) -> Binned:
    """A curve with not too many points; a chart is about 500 dots wide, and may be zoomed."""
    finite = np.isfinite(values)
    odd, known = steps[~finite], np.where(finite, values, np.nan)
    if len(values) <= most:
        return Binned(steps, known, known, known, odd)
    edges = np.linspace(0, len(values), most + 1).astype(np.int64)
    starts, ends = edges[:-1], edges[1:]
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    count = np.add.reduceat(finite.astype(np.int64), starts)
    sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
    low, high = (np.where(count > 0, each, np.nan) for each in (low, high))
    mean = np.where(count > 0, sums / np.maximum(count, 1), np.nan)
    return Binned(steps[ends - 1], low, mean, high, odd)


def summed(values: np.ndarray, most: int) -> np.ndarray:
    """Numbers of neighbouring windows added up, so that not too many are left."""
    if len(values) <= most:
        return values
    return np.add.reduceat(values, np.linspace(0, len(values), most + 1).astype(np.int64)[:-1])


def lasts(values: np.ndarray, most: int) -> np.ndarray:
    """The last number of each of the windows that `summed` adds up."""
    if len(values) <= most:
        return values
    return values[np.linspace(0, len(values), most + 1).astype(np.int64)[1:] - 1]


@dataclasses.dataclass(frozen=True, eq=False)
class Series:
    """One curve of a chart.

    Attributes:
        label: What it is called; curves of different runs may share a label.
        points: What is drawn.
        smooth: Its values averaged over their neighbours, at the same places; None if it is drawn as it is.
        last: Its newest value, as a text; "" if there is none.
        best: Where its best value is, and that value; None if unknown.
        run: The number of its run.
        color: The number of its color: that of its run, or with one run alone that of its place in the chart.
        dash: How its line is broken; 0 is a whole line.
    """

    label: str
    points: Binned
    smooth: np.ndarray | None = None
    last: str = ""
    best: tuple[float, float] | None = None
    run: int = 0
    color: int = 0
    dash: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Chart:
    """Curves over steps or over time; or shares of a whole, one upon the other.

    Attributes:
        title: What it shows.
        x: Its lower axis.
        y: Its axis on the left.
        series: Its curves.
        over: "step", or "time": each value then holds from the point before it.
        kind: What its values are: "number", "share" or "bytes".
        is_log: Whether a logarithmic axis shows its values best.
        is_cut: Whether its first values are not on its axis.
        least: A value below which its axis need not go; None if there is none.
        stacked: Whether its values lie upon each other.
        of_one_run: Whether it shows one run among several: its colors are then not those of runs.
        epochs: Where epochs ended, with their numbers.
        caption: What is said beside the title.
    """

    title: str
    x: Axis
    y: Axis
    series: list[Series]
    over: str = "step"
    kind: str = "number"
    is_log: bool = False
    is_cut: bool = False
    least: float | None = None
    stacked: bool = False
    of_one_run: bool = False
    epochs: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    caption: str = ""

    @property
    def labels(self) -> list[str]:
        """What is in its legend."""
        return list(dict.fromkeys(series.label for series in self.series))

    def data(self) -> dict[str, Any]:
        """The chart as the script of the page needs it."""
        return {
            "title": self.title,
            "over": self.over,
            "kind": self.kind,
            "log": self.is_log,
            "least": self.least,
            "stacked": self.stacked,
            "single": self.of_one_run,
            "epochs": self.epochs,
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
    data: dict[str, Any] = {
        "label": series.label,
        "run": series.run,
        "color": series.color,
        "dash": series.dash,
        "best": series.best,
        "odd": some_of(points.odd).tolist(),
        "smooths": series.smooth is not None,
        "x": _numbers(points.steps),
        "mean": _numbers(points.mean),
    }
    if not points.is_exact:
        data |= {"low": _numbers(points.low), "high": _numbers(points.high)}
    return data


def some_of(places: np.ndarray) -> np.ndarray:
    """No more of them than can be told apart."""
    return places[np.linspace(0, len(places) - 1, min(len(places), _MOST_ODD)).astype(np.int64)]


def _numbers(values: np.ndarray) -> list[float | None]:
    """Values with more digits than are shown, and None where there is none; whole numbers as they are."""
    if values.dtype.kind == "i":
        return values.tolist()
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
