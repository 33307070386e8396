"""The values of a column on the host: numbers of one dtype lie side by side, anything else is kept one by one."""

from typing import Any

import numpy as np

_LEAST = 256

Run = np.ndarray | list[Any]


class ColumnValues:
    """Values in the order they came, with the dtype and shape each of them had."""

    def __init__(self) -> None:
        self._numbers: np.ndarray | None = None  # grows by half of its length
        self._count = 0
        self._objects: list[Any] | None = None  # instead, as soon as values differ in dtype or are no numbers

    def __len__(self) -> int:
        return self._count if self._objects is None else len(self._objects)

    def extend(self, values: Run) -> None:
        """More values: an array with a number for each, or a list of arrays and other objects."""
        if isinstance(values, list):
            self._as_objects().extend(values)
        elif self._objects is not None:
            self._objects.extend(values)  # as NumPy's own numbers, which know their dtype
        elif self._numbers is not None and self._numbers.dtype != values.dtype:
            self._as_objects().extend(values)
        else:
            self._extend_numbers(values)

    def _extend_numbers(self, values: np.ndarray) -> None:
        stop = self._count + len(values)
        if self._numbers is None or stop > len(self._numbers):
            grown = np.empty(max(_LEAST, stop + stop // 2), values.dtype)
            if self._numbers is not None:
                grown[: self._count] = self._numbers[: self._count]
            self._numbers = grown
        self._numbers[self._count : stop] = values
        self._count = stop

    def _as_objects(self) -> list[Any]:
        if self._objects is None:
            self._objects = [] if self._numbers is None else list(self._numbers[: self._count])
            self._numbers = None
        return self._objects

    def pop(self) -> None:
        """Forget the newest value."""
        if self._objects is None:
            self._count -= 1
        else:
            self._objects.pop()

    def since(self, position: int, stop: int | None = None) -> list[Any]:
        """The values from a position on: Python's numbers, arrays, and other objects as they came."""
        if self._objects is None:
            return [] if self._numbers is None else self._numbers[: self._count][position:stop].tolist()
        return [value.item() if isinstance(value, np.generic) else value for value in self._objects[position:stop]]

    def floats(self, position: int) -> np.ndarray:
        """The values from a position on as one array, with NaN for what is not a real number."""
        if self._objects is not None:
            return np.array([_as_float(value) for value in self._objects[position:]], np.float64)
        if self._numbers is None or self._numbers.dtype.kind == "c":
            return np.full(max(self._count - position, 0), np.nan)
        return self._numbers[position : self._count].astype(np.float64)

    def single(self) -> bool:
        """Whether no value is an array with axes."""
        return self._objects is None or not any(isinstance(value, np.ndarray) for value in self._objects)

    def runs(self, position: int, stop: int | None = None) -> list[Run]:
        """The values between two positions, as few arrays and lists: what `extend` takes to have them again."""
        if self._objects is None:
            return [] if self._numbers is None else [self._numbers[: self._count][position:stop].copy()]
        runs: list[tuple[Any, list[Any]]] = []
        for value in self._objects[position:stop]:
            is_array = isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject
            kind = (value.dtype, value.shape) if is_array else None
            if not runs or runs[-1][0] != kind:
                runs.append((kind, []))
            runs[-1][1].append(value)
        return [values if kind is None else np.stack(values) for kind, values in runs]


def unfold(run: Run) -> Run:
    """One of `runs` as `extend` takes it: arrays with axes are values of their own."""
    return list(run) if isinstance(run, np.ndarray) and run.ndim > 1 else run


def _as_float(value: Any) -> float:
    try:
        return float(value) if not isinstance(value, str | bytes | np.ndarray) else np.nan
    except (TypeError, ValueError):
        return np.nan
