"""One column of a history: values that come from the device late, many at a time."""

import array
import bisect
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from millstream.text.errors import describe_leaf, describe_value

_LEAST = 256
_WORDS = {1: np.uint8, 2: np.uint16}

Run = np.ndarray | list[Any]
IN_FLIGHT = 2  # steps that may still be computing; their values are not read unless asked for
_READ_AT_ONCE = 64  # many more would have left the processor's caches
_PLAIN = (bool, int, float, complex, np.generic, np.ndarray)


class _ColumnValues:
    """Values in the order they came, with the dtype and shape each of them had."""

    def __init__(self) -> None:
        self._numbers: np.ndarray | None = None  # grows by half of its length
        self._count = 0
        self._objects: list[Any] | None = None  # instead, as soon as values differ in dtype or are not numbers

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


def _as_float(value: Any) -> float:
    try:
        return float(value) if not isinstance(value, str | bytes | np.ndarray) else np.nan
    except (TypeError, ValueError):
        return np.nan


class Column:
    """Values and the rows they belong to.

    A value is kept as it came, and its number is read when many are waiting, or when it is asked for. Reading a
    value that is two steps old waits for nothing, because no more than two steps are ever in flight.

    Args:
        name: How it is called, in errors.
        plain: Whether values are single numbers; others are read as soon as they are old enough, since they are large.

    Attributes:
        plain: As above.
    """

    def __init__(self, name: str, plain: bool) -> None:
        self._name = name
        self.plain = plain
        self._read_at = _READ_AT_ONCE if plain else IN_FLIGHT + 1
        self._start = self._stop = -1
        self._sparse: array.array[int] | None = None  # instead, as soon as a row is left out
        self._values = _ColumnValues()
        self._waiting: list[Any] = []  # single values, perhaps as `RealRows`, and `ValueBlock`s

    @property
    def rows(self) -> Sequence[int]:
        """The row of each value: a range, if none was left out."""
        return range(self._start, self._stop) if self._sparse is None else self._sparse

    def __repr__(self) -> str:
        return f"Column({self._name}, {len(self):,} values)"

    def __len__(self) -> int:
        return self._stop - self._start if self._sparse is None else len(self._sparse)

    def position(self, row: int) -> int:
        """How many values belong to rows before this one."""
        return bisect.bisect_left(self.rows, row)

    def row_numbers(self, position: int = 0, stop: int | None = None) -> np.ndarray:
        """The rows of the values from one position to before another, as an array of its own."""
        rows = self.rows[position:stop]
        return np.arange(rows.start, rows.stop) if isinstance(rows, range) else np.array(rows, np.int64)

    def append(self, row: int, value: Any) -> bool:
        """Add the value of a new row, or a newer one of the newest row; whether it is time to `read_columns`."""
        if row == self._stop and self._sparse is None:
            self._stop += 1
        else:
            self._add_row(row)
        if isinstance(value, np.ndarray):
            value = value.copy()  # its owner may write into it before it is read
        waiting = self._waiting
        waiting.append(value)
        return len(waiting) >= self._read_at

    def _add_row(self, row: int) -> None:
        """A row that is not the one after the newest of a column without gaps."""
        if not len(self):
            self._start, self._stop = row, row + 1
        elif self.rows[-1] == row:
            self._forget_newest()
        else:
            if self._sparse is None:
                self._sparse = array.array("q", self.rows)
            self._sparse.append(row)

    def _forget_newest(self) -> None:
        """Drop the newest value; its row gets a new one."""
        if self._waiting and not isinstance(self._waiting[-1], ValueBlock):
            self._waiting.pop()
        else:
            self.read()
            self._values.pop()

    def extend(self, rows: range, block: Any, masks: np.ndarray | None = None) -> None:
        """The values of several new rows, as one array whose first rows they are; `masks` says what is kept of each."""
        self._add_rows(rows)
        self._waiting.append(ValueBlock(block.copy() if isinstance(block, np.ndarray) else block, len(rows), masks))
        if len(self._waiting) >= self._read_at:
            self.read(IN_FLIGHT)

    def extend_values(self, rows: range, values: list[Any]) -> bool:
        """Add the values of several new rows, which nobody will write into; whether it is time to `read_columns`."""
        self._add_rows(rows)
        self._waiting.extend(values)
        return len(self._waiting) >= self._read_at

    def _add_rows(self, rows: Sequence[int]) -> None:
        """Several rows after those there are."""
        if isinstance(rows, range) and self._sparse is None and (not len(self) or rows.start == self._stop):
            self._start, self._stop = self._start if len(self) else rows.start, rows.stop
            return
        if self._sparse is None:
            self._sparse = array.array("q", self.rows)
        self._sparse.extend(rows)

    def read(self, keep: int = 0) -> None:
        """Read all that is waiting but the newest `keep` values."""
        count = len(self._waiting) - keep
        if count <= 0:
            return
        waiting = self._waiting[:count]
        _start_copies(waiting)
        read = _numbers_at_once(waiting)
        runs = [self._on_host(value) for value in waiting] if read is None else [read]
        del self._waiting[:count]  # only now: what cannot be read stays, and says so again
        for run in runs:
            self._values.extend(run)

    def waiting_form(self) -> tuple[int, np.dtype] | None:
        """How many single numbers are waiting on a device that are not in flight, and their dtype; None for others."""
        count = len(self._waiting) - IN_FLIGHT
        values = self._waiting[:count]
        if count <= 0 or not isinstance(values[0], jax.Array) or not _are_alike(values):
            return None
        return count, values[0].dtype

    def waiting_values(self, count: int) -> list[Any]:
        """The oldest values that have not been read."""
        return self._waiting[:count]

    def settle(self, numbers: np.ndarray) -> None:
        """Take the numbers of the oldest values that have not been read."""
        del self._waiting[: len(numbers)]
        self._values.extend(numbers)

    @property
    def is_ready(self) -> bool:
        """Whether all values can be read without waiting for a device."""
        newest: list[Any] = [getattr(value, "array", value) for value in self._waiting[-IN_FLIGHT:]]
        return all(value.is_ready() for value in newest if hasattr(value, "is_ready"))

    def since(self, position: int, *, settled: int | None = None) -> list[Any]:
        """The values from a position on: numbers, or arrays.

        Args:
            position: Of the first value, counted over those this column has.
            settled: The steps of the rows before this one are over. Later values are left out if they may still be in
                flight. None: wait for all.
        """
        self.read(0 if settled is None else self._in_flight(settled))
        return self._values.since(position)

    def _in_flight(self, settled: int) -> int:
        """How many of the newest values a device may still be computing, if the rows before this one are over."""
        count = min(len(self) - self.position(settled), IN_FLIGHT, len(self._waiting))
        while count and isinstance(self._waiting[-count], _PLAIN):
            count -= 1  # the host has it, as it has the results of a test
        return count

    def between(self, start: int, stop: int) -> list[Any]:
        """The values from one position to before another."""
        self.read()
        return self._values.since(start, stop)

    def floats(self, position: int = 0) -> np.ndarray:
        """The values from a position on as one array of doubles, with NaN for what is not a real number."""
        self.read()
        return self._values.floats(position)

    def runs(self, position: int = 0, stop: int | None = None) -> list[Run]:
        """The values from one position to before another, exactly, as arrays of equals and lists of other objects."""
        self.read()
        return self._values.runs(position, stop)

    def to_state(self, start: int, stop: int, *, most_axes: int | None = None) -> dict[str, Any] | None:
        """What it has from row `start` to before `stop`, exactly; None if that is nothing.

        Args:
            start: The first row.
            stop: The row after the last.
            most_axes: Values that are arrays with more axes are left out; None keeps all.
        """
        position, last = self.position(start), self.position(stop)
        rows, runs = [np.empty(0, np.int64)], []
        for run in self.runs(position, last) if position < last else []:
            if most_axes is None or isinstance(run, list) or run.ndim <= 1 + most_axes:
                rows.append(self.row_numbers(position, position + len(run)))
                runs.append(self._run_state(run))
            position += len(run)
        return {"rows": pack_numbers(np.concatenate(rows)), "values": runs} if runs else None

    def _run_state(self, run: Run) -> dict[str, Any]:
        if isinstance(run, list):
            for value in run:
                if not isinstance(value, bool | int | float | complex | str | bytes | None):
                    raise TypeError(
                        f"History.to_state keeps numbers, text and arrays of numbers. {self._name} was logged as "
                        f"{describe_value(value)}. Log what of it is a number, or text."
                    )
            return {"objects": list(run)}
        # Files know nothing of bfloat16 and its kin, so their bits travel as whole numbers.
        if run.dtype.isbuiltin == 2:
            return {"dtype": run.dtype.name, "array": run.view(_WORDS[run.dtype.itemsize])}
        return {"dtype": run.dtype.str, "array": run}

    def append_state(self, state: dict[str, Any], start: int, stop: int) -> None:
        """Add what `to_state` gave, whose rows must lie between the two."""
        runs = [_run_of(run) for run in state["values"]]
        rows = unpack_numbers(state["rows"], sum(map(len, runs)), f"rows of {self._name}")
        if not len(rows) or rows[0] < start or rows[-1] >= stop or np.any(np.diff(rows) <= 0):
            raise ValueError(f"History.from_state: {self._name} has values of other rows than {start} to {stop - 1}.")
        if any(isinstance(run, np.ndarray) and run.ndim > 1 for run in runs):
            self.plain, self._read_at = False, IN_FLIGHT + 1
        first, last = int(rows[0]), int(rows[-1])
        self._add_rows(range(first, last + 1) if last - first == len(rows) - 1 else rows.tolist())
        for run in runs:
            # Arrays with axes are values of their own.
            self._values.extend(list(run) if isinstance(run, np.ndarray) and run.ndim > 1 else run)

    @property
    def single(self) -> bool:
        """Whether no value is an array with axes, so that the column fits into a table."""
        self.read()
        return self._values.single()

    def newest(self) -> Any:
        """The newest value, as it came if it has not been read yet; what a fused run logged is read."""
        if self._waiting and not isinstance(self._waiting[-1], ValueBlock | RealRows):
            return self._waiting[-1]
        return self.since(len(self) - 1)[0]

    def _on_host(self, value: Any) -> Run:
        """A value as a run of its own."""
        if isinstance(value, ValueBlock):
            host = self._host(value.array)[: value.count]
            if value.masks is not None:
                return [row[mask] for row, mask in zip(host, value.masks, strict=True)]
            return host if host.ndim == 1 else list(host)
        if isinstance(value, RealRows):
            return [self._host(value.array)[value.mask]]
        host = self._host(value)
        return host[None] if isinstance(host, np.ndarray) and host.ndim == 0 and _is_number(host.dtype) else [host]

    def _host(self, value: Any) -> Any:
        if not isinstance(value, jax.Array):
            host = np.asarray(value) if isinstance(value, _PLAIN) else value
            return host if isinstance(host, np.ndarray) and (host.ndim or _is_number(host.dtype)) else value
        try:
            return np.asarray(value)
        except RuntimeError:
            if value.is_deleted():
                raise RuntimeError(
                    f"The logged value {self._name} was donated to a later step before it was read. "
                    "Log a copy of it: jnp.copy(...) inside the step."
                ) from None
            require_readable(self._name, value)
            raise


def read_columns(columns: Iterable[Column]) -> None:
    """Read what is waiting in several columns, but what may be in flight.

    The numbers of one step lie together in memory. Where steps log many of them, reading and freeing them step by step
    costs less than column by column (200 numbers a step: 430 us instead of 660).
    """
    together: dict[Any, list[Column]] = {}
    for column in columns:
        together.setdefault(column.waiting_form(), []).append(column)
    for form, alike in together.items():
        if form is None or len(alike) == 1 or not _read_rows(alike, *form):
            for column in alike:
                column.read(IN_FLIGHT)


def _read_rows(columns: list[Column], count: int, dtype: np.dtype) -> bool:
    """Read the oldest `count` values of columns of one dtype, row by row; whether that was possible."""
    rows = [*zip(*(column.waiting_values(count) for column in columns), strict=True)]
    try:
        numbers = np.frombuffer(b"".join([b"".join(row) for row in rows]), dtype).reshape(count, len(columns))
    except TypeError:  # they are not on a CPU
        return False
    for column, values in zip(columns, numbers.T, strict=True):
        column.settle(values)
    while rows:
        rows.pop()  # the last that holds these arrays
    return True


class ValueBlock:
    """Values of several rows in one array, and a mask for each if only some of its own rows are kept."""

    def __init__(self, array: Any, count: int, masks: np.ndarray | None) -> None:
        self.array = array
        self.count = count
        self.masks = masks


class RealRows:
    """An array of which only the rows that a mask counts are kept."""

    def __init__(self, array: jax.Array, mask: np.ndarray) -> None:
        self.array = array
        self.mask = mask
        self.ndim = array.ndim


def require_readable(name: str, value: Any) -> None:
    """Refuse an array of which other processes have a part."""
    value = value.array if isinstance(value, RealRows) else value
    if isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated):
        raise ValueError(
            f"The logged value {name} ({describe_leaf(value)}) lies in several processes. "
            "Log a mean, or what every process has."
        )


def pack_numbers(numbers: np.ndarray) -> Any:
    """Whole numbers as the first and the one after the last, if none is left out; else as they are."""
    if len(numbers) and numbers.dtype.kind == "i" and np.all(np.diff(numbers) == 1):
        return int(numbers[0]), int(numbers[-1]) + 1
    return numbers


def unpack_numbers(numbers: Any, count: int, what: str) -> np.ndarray:
    """The numbers that `packed` was given, if there are `count` of them."""
    found = numbers[1] - numbers[0] if isinstance(numbers, tuple) else len(numbers)
    if found != count:
        raise ValueError(f"History.from_state needs {count} {what}. Got {found}.")
    return np.arange(*numbers) if isinstance(numbers, tuple) else np.asarray(numbers)


def _run_of(state: dict[str, Any]) -> Run:
    if "objects" in state:
        return list(state["objects"])
    array, dtype = np.asarray(state["array"]), np.dtype(state["dtype"])
    return array if array.dtype == dtype else array.view(dtype)


def _is_number(dtype: np.dtype) -> bool:
    return dtype.kind in "biufc" or dtype.isbuiltin == 2  # the latter: bfloat16 and other dtypes of JAX


def _numbers_at_once(values: list[Any]) -> np.ndarray | None:
    """Numbers of one type as one array; None if they are not that, or one of them cannot be read."""
    kinds = {*map(type, values)}
    kind = kinds.pop()
    if kinds or kind in (ValueBlock, RealRows):
        return None
    if issubclass(kind, jax.Array):
        return _device_numbers(values)
    if not issubclass(kind, bool | int | float | complex | np.generic):
        return None
    numbers = np.array(values)
    # Large ints among others would become something else together than they are alone.
    return numbers if _is_number(numbers.dtype) and numbers.dtype == np.asarray(values[0]).dtype else None


def _device_numbers(values: list[Any]) -> np.ndarray | None:
    if not _are_alike(values):
        return None
    first = values[0]
    try:
        # An array on a CPU is its bytes: half the price of a NumPy array for each. Others are a TypeError.
        return np.frombuffer(b"".join(values), first.dtype)
    except TypeError:
        pass
    try:
        return np.array([np.asarray(value) for value in values], first.dtype)
    except (RuntimeError, TypeError):
        return None


def _are_alike(values: list[Any]) -> bool:
    """Whether arrays of JAX, or what may be such, are single numbers of one dtype."""
    try:
        # Two arrays with one aval have the same shape and dtype; asking for the aval is the cheapest question.
        return not values[0].ndim and len({*map(operator.attrgetter("aval"), values)}) == 1
    except AttributeError:
        return False


def _start_copies(values: Sequence[Any]) -> None:
    """Let copies from another device run beside each other; on the CPU there is nothing to copy."""
    first = values[0].array if isinstance(values[0], ValueBlock | RealRows) else values[0]
    # Values of one column come from one place, so the first speaks for all.
    if not isinstance(first, jax.Array) or next(iter(first.sharding.device_set)).platform == "cpu":
        return
    for value in values:
        held = value.array if isinstance(value, ValueBlock | RealRows) else value
        if isinstance(held, jax.Array) and not held.is_deleted():
            held.copy_to_host_async()
