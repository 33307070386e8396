"""Series of measurements, cut into windows."""

import numbers
import os
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from millstream.datasets._cache import ArrayDataset, CacheDir, find_or_fetch, require_place
from millstream.datasets._download import RemoteFile
from millstream.files.data_files import local_path, require_file
from millstream.plan.ordering import Ordering
from millstream.sources.array import check_reading
from millstream.sources.csv import read_csv
from millstream.sources.host_array import HostArraySource
from millstream.text.errors import describe_leaf, describe_value, require_bool, require_choice, require_int


def require_split(caller: str, split: str, train_fraction: float, val_fraction: float) -> None:
    """Refuse shares of a series that do not add up."""
    require_choice(caller, "split", split, ("train", "val", "test"))
    are_numbers = all(isinstance(share, numbers.Real) for share in (train_fraction, val_fraction))
    if not are_numbers or not (0 < train_fraction <= 1 and 0 <= val_fraction and train_fraction + val_fraction <= 1):
        raise ValueError(
            f"{caller} needs 0 < train_fraction and train_fraction + val_fraction <= 1. "
            f"Got {describe_value(train_fraction)} and {describe_value(val_fraction)}."
        )


def split_by_time(
    caller: str, series: np.ndarray, split: str, train_fraction: float, val_fraction: float, history: int
) -> np.ndarray:
    """The part of a series that is for training, or that comes after it.

    "val" and "test" begin `history` values early: their first target is then the first value that is new.
    """
    train_end = round(len(series) * train_fraction)
    val_end = round(len(series) * (train_fraction + val_fraction))
    start, end = {"train": (0, train_end), "val": (train_end, val_end), "test": (val_end, len(series))}[split]
    if start == end:
        raise ValueError(
            f"{caller}: there is nothing for {split!r} with train_fraction {train_fraction} and val_fraction "
            f"{val_fraction}. Change them."
        )
    return series[start if split == "train" else max(0, start - history) : end]


def time_series_windows(
    series: ArrayLike,
    context_length: int,
    prediction_length: int = 1,
    *,
    overlapping: bool = True,
    stride: int | None = None,
) -> dict[str, np.ndarray]:
    """The windows of a series as `{"context": (N, context_length, ...), "target": (N, prediction_length, ...)}`.

    These are copies. `ms.views.windows` is a view of the series instead, for long ones and for several.

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
    caller: str, series: Any, context_length: int, prediction_length: int, overlapping: bool, stride: int | None
) -> dict[str, np.ndarray]:
    """What `time_series_windows` does, under the name of the caller."""
    require_windows(caller, context_length, prediction_length, overlapping, stride)
    try:
        values = np.asarray(series)
    except Exception:
        raise TypeError(f"{caller} needs series to be an array of numbers. Got {describe_value(series)}.") from None
    length = context_length + prediction_length
    step = (1 if overlapping else length) if stride is None else stride
    if values.ndim not in (1, 2) or values.dtype.kind not in "iuf":
        raise ValueError(f"{caller} needs numbers of shape (T,) or (T, D). Got {describe_leaf(values)}.")
    if len(values) < length:
        raise ValueError(
            f"{caller} needs a series at least as long as a window. The series has {len(values)} values, a window "
            f"{context_length} + {prediction_length}. Shorten the window, or give this split a larger share."
        )
    starts = np.arange(0, len(values) - length + 1, step)
    rows = starts[:, None] + np.arange(length)
    return {"context": values[rows[:, :context_length]], "target": values[rows[:, context_length:]]}


def require_windows(caller: str, context_length: int, prediction_length: int, overlapping: bool, stride: Any) -> None:
    """Refuse windows that no series can be cut into."""
    require_int(caller, "context_length", context_length, least=1)
    require_int(caller, "prediction_length", prediction_length, least=1)
    require_bool(caller, "overlapping", overlapping)
    if stride is not None:
        require_int(caller, "stride", stride, least=1)
        length = context_length + prediction_length
        if not overlapping and stride < length:
            raise ValueError(f"{caller}: windows of {length} values, {stride} apart, overlap. Pass overlapping=True.")


class _TimeSeriesDataset(ArrayDataset):
    """Windows of one column of a CSV file."""

    folder: ClassVar[str]
    file: ClassVar[RemoteFile]
    column: ClassVar[str]
    default_context: ClassVar[int]

    def __init__(
        self,
        split: str = "train",
        cache_dir: CacheDir = None,
        *,
        overlapping: bool = False,
        context_length: int | None = None,
        prediction_length: int = 1,
        stride: int | None = None,
        train_fraction: float = 0.8,
        val_fraction: float = 0.0,
        data_path: str | os.PathLike[str] | None = None,
    ) -> None:
        caller = type(self).__name__
        context = self.default_context if context_length is None else context_length
        # Before the file is asked for, which may take a download.
        require_windows(caller, context, prediction_length, overlapping, stride)
        require_split(caller, split, train_fraction, val_fraction)
        require_place(caller, "cache_dir", cache_dir)
        require_place(caller, "data_path", data_path)
        series = self._series(caller, cache_dir, data_path)
        part = split_by_time(caller, series, split, train_fraction, val_fraction, context)
        super().__init__(cut_windows(caller, part, context, prediction_length, overlapping, stride))

    def _series(self, caller: str, cache_dir: CacheDir, data_path: str | os.PathLike[str] | None) -> np.ndarray:
        if data_path is None:
            path = find_or_fetch(caller, self.file, cache_dir, self.folder, f"cyreal_{self.folder}")
        else:
            path = require_file(caller, local_path(caller, data_path))
        series = read_csv(path, [self.column])[self.column]
        if not np.isfinite(series).all():
            row = int(np.flatnonzero(~np.isfinite(series))[0])
            raise ValueError(f"{caller} needs finite values. Row {row} of {path} is {series[row]}. Fix the file.")
        return series

    @classmethod
    def make_disk_source(
        cls,
        *,
        split: str = "train",
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
        cache_dir: CacheDir = None,
        overlapping: bool = False,
        context_length: int | None = None,
        prediction_length: int = 1,
        stride: int | None = None,
        train_fraction: float = 0.8,
        val_fraction: float = 0.0,
        data_path: str | os.PathLike[str] | None = None,
    ) -> HostArraySource:
        """A source whose windows stay on the host. The series are small and are read whole."""
        check_reading(cls.__name__, ordering, prefetch_size)
        dataset = cls(
            split,
            cache_dir,
            overlapping=overlapping,
            context_length=context_length,
            prediction_length=prediction_length,
            stride=stride,
            train_fraction=train_fraction,
            val_fraction=val_fraction,
            data_path=data_path,
        )
        return HostArraySource(dataset.as_array_dict(), ordering, prefetch_size)


class DailyMinTemperaturesDataset(_TimeSeriesDataset):
    """Ten years of daily minimum temperatures in Melbourne, 3,650 values.

    A sample is `{"context": float32 (context_length,), "target": float32 (prediction_length,)}`.

    Example:
        >>> days = ms.datasets.DailyMinTemperaturesDataset(context_length=14, overlapping=True)  # doctest: +SKIP

    Args:
        split: "train", "val" or "test": one after the other in time. The contexts of "val" and "test" reach back into
            what comes before.
        cache_dir: Where the file is, or is downloaded to; by default `~/.cache/millstream`.
        overlapping: Whether windows may share values.
        context_length: Values before, 30 by default.
        prediction_length: Values after.
        stride: Steps from one window to the next: 1 by default, or the length of a window if they must not overlap.
        train_fraction: The share of the series that is for training.
        val_fraction: The share that comes next; the rest is for testing.
        data_path: A CSV file of your own with the same column.
    """

    folder = "daily_min_temperatures"
    file = RemoteFile(
        "daily-min-temperatures.csv",
        ("https://raw.githubusercontent.com/jbrownlee/Datasets/master/daily-min-temperatures.csv",),
    )
    column = "Temp"
    default_context = 30


class SunspotsDataset(_TimeSeriesDataset):
    """Monthly sunspots from 1749 to 1983, 2,820 values.

    A sample is `{"context": float32 (context_length,), "target": float32 (prediction_length,)}`.

    Example:
        >>> months = ms.datasets.SunspotsDataset(split="test", prediction_length=12)  # doctest: +SKIP

    Args:
        split: "train", "val" or "test": one after the other in time. The contexts of "val" and "test" reach back into
            what comes before.
        cache_dir: Where the file is, or is downloaded to; by default `~/.cache/millstream`.
        overlapping: Whether windows may share values.
        context_length: Values before, 24 by default.
        prediction_length: Values after.
        stride: Steps from one window to the next: 1 by default, or the length of a window if they must not overlap.
        train_fraction: The share of the series that is for training.
        val_fraction: The share that comes next; the rest is for testing.
        data_path: A CSV file of your own with the same column.
    """

    folder = "sunspots"
    file = RemoteFile(
        "monthly-sunspots.csv",
        ("https://raw.githubusercontent.com/jbrownlee/Datasets/master/monthly-sunspots.csv",),
    )
    column = "Sunspots"
    default_context = 24
