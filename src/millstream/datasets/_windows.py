"""Cutting a series into windows: a context, and the target that follows it."""

from typing import Any

import numpy as np

from millstream.text.errors import describe_leaf, describe_value, require_bool, require_int


def time_series_windows(
    series: Any,
    context_length: int,
    prediction_length: int = 1,
    *,
    overlapping: bool = True,
    stride: int | None = None,
) -> dict[str, np.ndarray]:
    """The windows of a series as `{"context": (N, context_length, ...), "target": (N, prediction_length, ...)}`.

    Example:
        >>> windows = ms.datasets.time_series_windows(np.arange(6.0), context_length=3, prediction_length=1)
        >>> windows["context"].tolist(), windows["target"].tolist()
        ([[0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 4.0]], [[3.0], [4.0], [5.0]])

    Args:
        series: Values over time, of shape (T,) or (T, D).
        context_length: Values before.
        prediction_length: Values after.
        overlapping: Whether windows may share values.
        stride: Steps from one window to the next: 1 by default, or the length of a window if they must not overlap.
    """
    return cut_windows("time_series_windows", series, context_length, prediction_length, overlapping, stride)


def cut_windows(
    who: str, series: Any, context_length: int, prediction_length: int, overlapping: bool, stride: int | None
) -> dict[str, np.ndarray]:
    """What `time_series_windows` does, under the name of the caller."""
    require_windows(who, context_length, prediction_length, overlapping, stride)
    try:
        values = np.asarray(series)
    except Exception:
        raise TypeError(f"{who} needs series to be an array of numbers. Got {describe_value(series)}.") from None
    length = context_length + prediction_length
    step = (1 if overlapping else length) if stride is None else stride
    if values.ndim not in (1, 2) or values.dtype.kind not in "iuf":
        raise ValueError(f"{who} needs numbers of shape (T,) or (T, D). Got {describe_leaf(values)}.")
    if len(values) < length:
        raise ValueError(
            f"{who} needs a series at least as long as a window. The series has {len(values)} values, a window "
            f"{context_length} + {prediction_length}. Shorten the window, or give this split a larger share."
        )
    starts = np.arange(0, len(values) - length + 1, step)
    rows = starts[:, None] + np.arange(length)
    return {"context": values[rows[:, :context_length]], "target": values[rows[:, context_length:]]}


def require_windows(who: str, context_length: int, prediction_length: int, overlapping: bool, stride: Any) -> None:
    """Refuse windows that no series can be cut into."""
    require_int(who, "context_length", context_length, least=1)
    require_int(who, "prediction_length", prediction_length, least=1)
    require_bool(who, "overlapping", overlapping)
    if stride is not None:
        require_int(who, "stride", stride, least=1)
        length = context_length + prediction_length
        if not overlapping and stride < length:
            raise ValueError(f"{who}: windows of {length} values, {stride} apart, overlap. Pass overlapping=True.")
