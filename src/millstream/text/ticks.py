"""Round numbers beside an axis, and how they are written."""

import math

_PARTS = (1, 2, 5, 10)
_FINE_PARTS = (1, 2, 2.5, 5, 10)


def ticks(low: float, high: float, most: int = 5, *, whole: bool = False) -> list[float]:
    """About that many round numbers, at most one more, that are equally far apart.

    Example:
        >>> ticks(0, 1000), ticks(0, 0.7), ticks(0, 3, whole=True)
        ([0, 200, 400, 600, 800, 1000], [0, 0.2, 0.4, 0.6], [0, 1, 2, 3])

    Args:
        low: The first number of the range.
        high: The last one.
        most: How many intervals there may be.
        whole: Whether only whole numbers make sense.
    """
    least = max((high - low) / most, 1.0 if whole else 0.0) or 1.0
    stride = round_stride(least, _FINE_PARTS)
    if whole and stride != round(stride):
        stride = round_stride(least)
    found = [round(value, 12) for value in multiples(low - 1e-9 * stride, high + 1e-9 * stride, stride)]
    return [int(value) if value == round(value) else value for value in found]


def round_stride(least: float, parts: tuple[float, ...] = _PARTS) -> float:
    """A round number that is at least as large: one of `parts`, the last of which is 10, times a power of ten.

    Example:
        >>> round_stride(34), round_stride(0.15)
        (50.0, 0.2)
    """
    power = 10.0 ** math.floor(math.log10(least))
    return power * next(part for part in parts if part * power >= least * 0.999)


def multiples(low: float, high: float, stride: float) -> list[float]:
    """The multiples of a number in a range.

    Example:
        >>> multiples(-1, 5, 2)
        [0, 2, 4]
    """
    return [number * stride for number in range(math.ceil(low / stride), math.floor(high / stride) + 1)]


def short_count(value: float) -> str:
    """A number of things beside an axis.

    Example:
        >>> short_count(950), short_count(2_500), short_count(3_000_000)
        ('950', '2.5k', '3M')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size or (abs(value) >= size and value % (size / 10) == 0):
            return f"{value / size:.4g}{unit}"
    return f"{value:g}"
