"""Parts of a series for training, validation and testing, one after the other in time."""

import numbers

import numpy as np

from millstream.text.errors import describe_value, require_choice


def require_split(who: str, split: str, train_fraction: float, val_fraction: float) -> None:
    """Refuse shares of a series that are none."""
    require_choice(who, "split", split, ("train", "val", "test"))
    are_numbers = all(isinstance(share, numbers.Real) for share in (train_fraction, val_fraction))
    if not are_numbers or not (0 < train_fraction <= 1 and 0 <= val_fraction and train_fraction + val_fraction <= 1):
        raise ValueError(
            f"{who} needs 0 < train_fraction and train_fraction + val_fraction <= 1. "
            f"Got {describe_value(train_fraction)} and {describe_value(val_fraction)}."
        )


def split_by_time(
    who: str, series: np.ndarray, split: str, train_fraction: float, val_fraction: float, history: int
) -> np.ndarray:
    """The part of a series that is for training, or that comes after it.

    "val" and "test" begin `history` values early: their first target is then the first value that is new.
    """
    train_end = round(len(series) * train_fraction)
    val_end = round(len(series) * (train_fraction + val_fraction))
    start, end = {"train": (0, train_end), "val": (train_end, val_end), "test": (val_end, len(series))}[split]
    if start == end:
        raise ValueError(
            f"{who}: there is nothing for {split!r} with train_fraction {train_fraction} and val_fraction "
            f"{val_fraction}. Change them."
        )
    return series[start if split == "train" else max(0, start - history) : end]
