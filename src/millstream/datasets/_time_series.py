"""Series of measurements, cut into windows."""

import os
from typing import ClassVar

import numpy as np

from millstream.datasets._array_dataset import ArrayDataset
from millstream.datasets._cache import CacheDir, find_or_fetch, require_place, require_reading
from millstream.datasets._download import RemoteFile
from millstream.datasets._time_split import require_split, split_by_time
from millstream.datasets._windows import cut_windows, require_windows
from millstream.files.data_files import local_path, require_file
from millstream.plan.ordering import Ordering
from millstream.sources.csv import read_csv
from millstream.sources.host_array import HostArraySource


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
        who = type(self).__name__
        context = self.default_context if context_length is None else context_length
        # Before the file is asked for, which may take a download.
        require_windows(who, context, prediction_length, overlapping, stride)
        require_split(who, split, train_fraction, val_fraction)
        require_place(who, "cache_dir", cache_dir)
        require_place(who, "data_path", data_path)
        series = self._series(who, cache_dir, data_path)
        part = split_by_time(who, series, split, train_fraction, val_fraction, context)
        super().__init__(cut_windows(who, part, context, prediction_length, overlapping, stride))

    def _series(self, who: str, cache_dir: CacheDir, data_path: str | os.PathLike[str] | None) -> np.ndarray:
        if data_path is None:
            path = find_or_fetch(who, self.file, cache_dir, self.folder, f"cyreal_{self.folder}")
        else:
            path = require_file(who, local_path(who, data_path))
        series = read_csv(path, [self.column])[self.column]
        if not np.isfinite(series).all():
            row = int(np.flatnonzero(~np.isfinite(series))[0])
            raise ValueError(f"{who} needs finite values. Row {row} of {path} is {series[row]}. Mend the file.")
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
        require_reading(cls.__name__, ordering, prefetch_size)
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
