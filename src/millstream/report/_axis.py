"""Axes: where a value lies between the ends of one, and which values are written beside it."""

import dataclasses
import math

import numpy as np

_STRIDES = (1, 2, 5, 10)
_SMALLEST, _LARGEST = 1e-270, 1e270  # ends of an axis are a little farther out, and must still be numbers


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
    stride = max(_stride((last - first) / 5), 1)
    ticks = [value for value in _multiples(first, last, stride) if value >= 0]
    return Axis(first, last, [(value, count_text(value)) for value in ticks])


def linear_axis(values: np.ndarray, *, least: float | None = None, percent: bool = False) -> Axis:
    """An axis for values, with some room at both ends.

    Args:
        values: All of them.
        least: A value below which the axis need not go, and up to which it does.
        percent: Whether 1 is written as 100 %.
    """
    known = np.clip(values[np.isfinite(values)], -_LARGEST, _LARGEST)
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    low = low if least is None else min(least, low)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = low - (0.0 if low == least else room), high + room
    stride = _stride((high - low) / 4)
    ticks = _multiples(low, high, stride)
    digits = max(0, -math.floor(math.log10(stride) + 1e-9))
    texts = [f"{100 * value:.{max(0, digits - 2)}f} %" if percent else _tick_text(value, digits) for value in ticks]
    return Axis(low, high, list(zip(ticks, texts, strict=True)))


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
    return Axis(10**low, 10**high, ticks, log=True)


def count_text(value: float) -> str:
    """A number of things, short: 12k, 3M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size or (abs(value) >= size and value % (size / 10) == 0):
            return f"{value / size:.4g}{unit}"
    return f"{value:g}"


def _tick_text(value: float, digits: int) -> str:
    if abs(value) >= 1e4:
        return count_text(value) if abs(value) < 1e13 else f"{value:.3g}"
    return f"{value:.{digits}f}" if digits <= 5 else f"{value:.3g}"


def _stride(least: float) -> float:
    """A round number that is no smaller."""
    power = 10.0 ** math.floor(math.log10(least))
    return power * next(digit for digit in _STRIDES if digit * power >= least * 0.999)


def _multiples(low: float, high: float, stride: float) -> list[float]:
    return [number * stride for number in range(math.ceil(low / stride), math.floor(high / stride) + 1)]
