"""The history of a run: what was logged at which step, by columns."""

import math
import operator
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

import numpy as np

from millstream.loops import _history_html, _plot, history_table
from millstream.loops._clock import StepSpan
from millstream.loops._timeline import Timeline
from millstream.loops.column import IN_FLIGHT, Column, read_columns, require_readable
from millstream.loops.elapsed import Elapsed
from millstream.loops.log_entries import Logs, Name, as_logs, describe_logged, find_entry, require_name
from millstream.loops.media import MEDIA
from millstream.loops.media_log import MediaLog
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_leaf, describe_value, require_int

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_ELAPSED = ("steps", "samples", "epochs", "time", "date")


class PlotOptions(TypedDict, total=False):
    """The options of `History.plot`."""

    names: Sequence[str] | None
    title: str | None
    smooth: float | None
    log: bool | None
    dpi: int


class History(Sequence[Logs]):
    """What was logged at which step: a table with one row per step that logged anything.

    Values that come from a device stay there until many can be read at once, or are asked for. Images and histograms
    are not in the table: they are kept beside it for writers, and only so many of them.

    Example:
        >>> history = ms.loops.history()
        >>> history.commit(ms.loops.Elapsed(steps=1), ms.logs().add_metric("loss", 0.5))
        >>> steps, loss = history.collect("steps", "loss")
        >>> loss
        [0.5]
    """

    def __init__(self) -> None:
        self._moments = Timeline()
        self._newest_step: int | None = None
        self._columns: dict[Name, Column] = {}
        self._media = MediaLog()

    def commit(self, elapsed: Elapsed, logs: Mapping[str, object]) -> None:
        """Keep what a step has logged; nothing waits for a device.

        Logs of the step that was committed last go into its row, where newer values win.
        """
        if type(logs) is not Logs:
            logs = as_logs("History.commit", logs)
        if elapsed.steps != self._newest_step:
            self._newest_step = elapsed.steps
            self._moments.append(elapsed)
        row, columns, due = self._moments.length - 1, self._columns, []
        for collection, entries in logs.items():
            if collection in MEDIA:
                for name, value in entries.items():
                    self._media.add((collection, name), elapsed, value)
                continue
            for name, value in entries.items():
                try:
                    column = columns[collection, name]
                except KeyError:
                    column = self._new_column((collection, name), value, plain=getattr(value, "ndim", 0) == 0)
                if column.append(row, value):
                    due.append(column)
        if due:
            read_columns(due)

    def begin_run(self, steps: int | None) -> None:
        """A run begins to log here; it adds to the newest row only if it continues after the step of that row.

        Args:
            steps: How far the run is that begins; None if it does not continue with another.
        """
        if steps != self._newest_step:
            self._newest_step = None

    def commit_block(self, passed: StepSpan, logs: Logs, masks: np.ndarray | None = None) -> None:
        """Keep what several steps have logged that were one program.

        Args:
            passed: These steps, all after the newest row.
            logs: Arrays, whose first rows belong to these steps.
            masks: The masks of their batches, unless the real rows of each are its first ones.
        """
        rows = self._new_rows(passed)
        for path, block in self._media.take(passed, logs.entries(), stacked=True):
            column = self._columns.get(path)
            if column is None:
                column = self._new_column(path, block, plain=block.ndim == 1)
            has_rows = path[0] == "outputs" and masks is not None and block.shape[1 : masks.ndim] == masks.shape[1:]
            column.extend(rows, block, masks if has_rows else None)

    def commit_columns(self, passed: StepSpan, columns: Mapping[Name, list[object]]) -> None:
        """Keep what several steps have logged, all of them the same entries.

        Args:
            passed: These steps, all after the newest row.
            columns: The values of each entry, one for each step.
        """
        rows, due = self._new_rows(passed), []
        for path, values in self._media.take(passed, columns.items(), stacked=False):
            column = self._columns.get(path)
            if column is None:
                column = self._new_column(path, values[0], plain=getattr(values[0], "ndim", 0) == 0)
            if column.extend_values(rows, values):
                due.append(column)
        read_columns(due)

    def _new_rows(self, passed: StepSpan) -> range:
        rows = range(len(self), len(self) + len(passed.steps))
        self._moments.extend(passed)
        self._newest_step = passed.steps[-1]
        return rows

    @property
    def plain(self) -> bool:
        """Whether nothing but single numbers has been logged, and no image or histogram at the newest row."""
        large = self._newest_step is not None and self._media.newest_step == self._newest_step
        return not large and all(column.plain for column in self._columns.values())

    @property
    def media(self) -> MediaLog:
        """The images and histograms that are kept, for writers."""
        return self._media

    def _new_column(self, path: Name, value: Any, *, plain: bool) -> Column:
        for part in path:
            if not isinstance(part, str):
                raise TypeError(f"Names of what is logged are strings. Got {describe_value(part)} in {path[0]!r}.")
        require_readable(".".join(path), value)
        self._columns[path] = column = Column(".".join(path), plain)
        return column

    def __len__(self) -> int:
        return self._moments.length

    @overload
    def __getitem__(self, index: int) -> Logs: ...
    @overload
    def __getitem__(self, index: slice) -> list[Logs]: ...
    def __getitem__(self, index: int | slice) -> Logs | list[Logs]:
        """What one row holds, and under `elapsed` where the run was."""
        if isinstance(index, slice):
            chosen = range(len(self))[index]
            if not chosen:
                return []
            low, high = min(chosen[0], chosen[-1]), max(chosen[0], chosen[-1])
            made = list(self.rows(low, high + 1))
            return [made[row - low] for row in chosen]
        if not hasattr(index, "__index__"):
            raise TypeError(
                f"History is indexed by row numbers and slices. Got {describe_value(index)}. "
                f"For the values of an entry, write history.collect({index!r})."
            )
        if not -len(self) <= index < len(self):
            raise IndexError(f"History has {len(self)} rows. Got index {index}.")
        row = range(len(self))[index]
        return next(self.rows(row, row + 1))

    def __iter__(self) -> Iterator[Logs]:
        return self.rows(0, len(self))

    def rows(self, start: int, stop: int) -> Iterator[Logs]:
        """The rows from `start` to before `stop`."""
        made = [Logs(elapsed=self._elapsed_entries(row)) for row in range(start, stop)]
        for (collection, name), column in self._columns.items():
            first, last = column.position(start), column.position(stop)
            for row, value in zip(column.rows[first:last], column.between(first, last), strict=True):
                made[row - start].add_entry(collection, name, value)
        return iter(made)

    def ready_rows(self, step: int, together: int = 1) -> int:
        """How many rows, from the first on, can be read without waiting for a device.

        Args:
            step: Where the run is.
            together: How many rows its last steps have that were begun at once; those count as one in flight.
        """
        require_int("History.ready_rows", "step", step, least=0)
        require_int("History.ready_rows", "together", together, least=0)
        in_flight = IN_FLIGHT * max(together, 1)
        ready = max(len(self) - in_flight, 0)
        while ready < len(self) and self.elapsed(ready).steps <= step - in_flight:
            ready += 1
        return ready

    def names(self) -> list[str]:
        """All entries, as "collection.name"."""
        return [".".join(path) for path in self._columns]

    def elapsed(self, row: int = -1) -> Elapsed:
        """How far the run was at a row: the newest, or the one of this number."""
        try:
            return self._moments.elapsed(range(len(self))[operator.index(row)])
        except TypeError:
            raise TypeError(f"History.elapsed needs a row as an int. Got {describe_value(row)}.") from None
        except IndexError:
            found = f"needs a row from {-len(self)} to {len(self) - 1}. Got {row}."
            nothing = "needs a row. The history is empty: nothing has been logged yet, and len(history) is 0."
            raise ValueError(f"History.elapsed {found if len(self) else nothing}") from None

    @overload
    def collect(self, name: str, /, *, missing: object = None) -> list[Any]: ...
    @overload
    def collect(self, first: str, second: str, /, *, missing: object = None) -> tuple[list[Any], list[Any]]: ...
    @overload
    def collect(
        self, first: str, second: str, third: str, /, *, missing: object = None
    ) -> tuple[list[Any], list[Any], list[Any]]: ...
    @overload
    def collect(
        self, first: str, second: str, third: str, fourth: str, /, *names: str, missing: object = None
    ) -> tuple[list[Any], ...]: ...
    def collect(self, *names: str, missing: object = None) -> list[Any] | tuple[list[Any], ...]:
        """The values of some entries, a list for each, over those rows that have all of them.

        A name that was never logged is an error that lists those that were; `missing` says that it may come later.

        Example:
            >>> history = ms.loops.history()
            >>> history.commit(ms.loops.Elapsed(steps=1), {"loss": 0.5})
            >>> history.commit(ms.loops.Elapsed(steps=2), {"loss": 0.4, "loss_test": 0.6})
            >>> history.collect("loss")
            [0.5, 0.4]
            >>> history.collect("steps", "loss", "loss_test", missing=np.nan)
            ([1, 2], [0.5, 0.4], [nan, 0.6])

        Args:
            names: "name" or "collection.name"; also steps, samples, epochs, time and date of a row.
            missing: If given, rows that have any of them count too, and this stands for what they lack. Names that
                have not been logged yet are empty then.

        Returns:
            One list if there is one name, else a tuple of lists.
        """
        found = [self._find(name, is_required=missing is None) for name in names]
        columns = [source for source in found if isinstance(source, Column)]
        if not columns:
            rows: Sequence[int] = range(len(self))
        elif all(column.rows == columns[0].rows for column in columns):
            rows = columns[0].rows
        elif missing is not None:
            rows = sorted(set[int]().union(*(column.rows for column in columns)))
        else:
            rows = sorted(set(columns[0].rows).intersection(*(column.rows for column in columns[1:])))
        lists = [self._at_rows(source, rows, missing) for source in found]
        return lists[0] if len(lists) == 1 else tuple(lists)

    def _find(self, name: str, *, is_required: bool) -> Column | str:
        """The column of a name, empty if there is none and it is not required, or the unit that it is."""
        require_name("History.collect", name)
        column, unit = self.column(name), name.removeprefix("elapsed.")
        if column is not None:
            return column
        if unit in _ELAPSED:
            return unit
        if is_required:
            raise ValueError(
                f"History.collect: {name!r} was never logged. {describe_logged(name, self._columns, _ELAPSED)} "
                "If it may be logged later, give missing=, such as missing=np.nan."
            )
        return Column(name, plain=True)

    def _at_rows(self, source: Column | str, rows: Sequence[int], missing: Any) -> list[Any]:
        if isinstance(source, str):
            values = self.units()[source]
            return values if len(rows) == len(self) else [values[row] for row in rows]
        if source.rows == rows:
            return source.since(0)
        found = dict(zip(source.rows, source.since(0), strict=True))
        return [found.get(row, missing) for row in rows]

    def units(self) -> dict[str, list[Any]]:
        """Steps, samples, epochs (None where unknown), time and date (a timestamp) of every row."""
        return self._moments.units()

    def _elapsed_entries(self, row: int) -> dict[str, Any]:
        elapsed = self.elapsed(row)
        entries = {unit: getattr(elapsed, unit) for unit in _ELAPSED}
        if entries["epochs"] is None:
            del entries["epochs"]
        return entries

    def latest(self) -> Logs:
        """The newest value of every entry, as it came: a device's values are not read."""
        latest = Logs()
        for (collection, name), column in self._columns.items():
            latest.add_entry(collection, name, column.newest())
        return latest

    def column(self, name: str) -> Column | None:
        """The column of an entry given as "name" or "collection.name"; None if nothing was logged under it."""
        path = find_entry(name, list(self._columns))
        return None if path is None else self._columns[path]

    def columns(self) -> dict[Name, Column]:
        """All columns, by collection and name."""
        return dict(self._columns)

    def weights(self, start: int = 0) -> Sequence[int]:
        """How many samples the step of each row had, from a row on."""
        if not isinstance(start, int):
            raise TypeError(f"History.weights needs start to be an int. Got {describe_value(start)}.")
        return self._moments.weights(start)

    def mean(self, name: str, start: int = 0, *, missing: float | None = None) -> float:
        """The mean of an entry over the rows from `start` on, weighted by their samples; NaN if these have no value.

        Example:
            >>> history = ms.loops.history()
            >>> history.commit(ms.loops.Elapsed(steps=1, samples=4), {"loss": 1.0})
            >>> history.commit(ms.loops.Elapsed(steps=2, samples=5, samples_before=4), {"loss": 2.0})
            >>> history.mean("loss")
            1.2

        Args:
            name: "name" or "collection.name".
            start: The first row; -5 means the last five rows.
            missing: What to return if nothing has been logged under this name yet, which is an error otherwise.
        """
        require_name("History.mean", name)
        if not isinstance(start, int):
            raise TypeError(f"History.mean needs start to be an int. Got {describe_value(start)}.")
        column = self.column(name)
        if column is None:
            if missing is not None:
                return missing
            raise ValueError(
                f"History.mean: {name!r} was never logged. {describe_logged(name, self._columns)} "
                "If it may be logged later, give missing=, such as missing=np.nan."
            )
        first = column.position(start if start >= 0 else max(len(self) + start, 0))
        values = column.floats(first)
        if len(values) and np.isnan(values).all() and np.ndim(newest := column.newest()):
            raise TypeError(
                f"History.mean: the values of {name!r} are arrays (the last: {describe_leaf(newest)}). Log one number "
                "per step, such as jnp.mean(value), or take the arrays from history.collect."
            )
        weights = np.asarray(self._moments.weights(), np.float64)[column.row_numbers(first)]
        counted = weights > 0  # a mean over no samples is NaN, and would make all of it NaN
        return float(values[counted] @ weights[counted] / weights.sum()) if counted.any() else math.nan

    def to_dict(self) -> dict[str, list[Any]]:
        """The history as a table: steps, samples, epochs, time, date and every entry, each as a list over all rows.

        Entries that are arrays, such as outputs, do not fit into a table and are left out; so in all tables below.

        Example:
            >>> history = ms.loops.history()
            >>> history.commit(ms.loops.Elapsed(steps=1), {"loss": 0.5})
            >>> history.commit(ms.loops.Elapsed(steps=2), {"loss": 0.4, "loss_test": 0.6})
            >>> history.to_dict()["loss_test"]
            [None, 0.6]

        Returns:
            Lists by name: "name", or "collection.name" where that would not say which. None where a row has no value.
        """
        return history_table.to_dict(self)

    def to_pandas(self) -> "pandas.DataFrame":
        """The history as a DataFrame, with the columns of `to_dict`.

        Example:
            >>> history = ms.loops.history()
            >>> history.commit(ms.loops.Elapsed(steps=1), {"loss": 0.5})
            >>> history.to_pandas()["loss"].mean()
            np.float64(0.5)
        """
        return history_table.to_pandas(self)

    def to_csv(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write the table of `to_dict` to a file; where a row has no value, the field is empty.

        Example:
            >>> history = ms.loops.history()
            >>> history.commit(ms.loops.Elapsed(steps=1), {"loss": 0.5})
            >>> print(history.to_csv("history.csv").read_text().splitlines()[0])
            steps,samples,epochs,time,date,loss

        Args:
            path: Where to; the file gets its name when it is whole.
        """
        return history_table.to_csv(self, path)

    def to_jsonl(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write one line of JSON per row, with its collections as in `history[row]`; `History.from_jsonl` reads it.

        Example:
            >>> import json
            >>> history = ms.loops.history()
            >>> history.commit(ms.loops.Elapsed(steps=1), {"loss": 0.5})
            >>> line = json.loads(history.to_jsonl("history.jsonl").read_text())
            >>> line["elapsed"]["steps"], line["metrics"]
            (1, {'loss': 0.5})

        Args:
            path: Where to; the file gets its name when it is whole. NaN and infinities are written as Python writes
                them.
        """
        return history_table.to_jsonl(self, path)

    @classmethod
    def from_jsonl(cls, path: str | os.PathLike[str]) -> "History":
        """Read a history that `to_jsonl` has written, to look at it or to continue with it.

        Example:
            >>> history = ms.loops.history()
            >>> history.commit(ms.loops.Elapsed(steps=1), {"loss": 0.5})
            >>> ms.loops.History.from_jsonl(history.to_jsonl("history.jsonl")).collect("loss")
            [0.5]

        Args:
            path: The file. Lines of `jsonl_logger`, with values beside `steps`, are understood too; those are metrics.
                A last line that was not written to its end is left out.
        """
        history = cls()
        for elapsed, logs in history_table.read_jsonl(path):
            history.commit(elapsed, logs)
        return history

    def to_state(self, start: int = 0, stop: int | None = None, *, outputs: bool = True) -> dict[str, PyTree]:
        """All rows, or those from `start` to before `stop`, as plain values and NumPy arrays: exact, for checkpoints.

        Example:
            >>> history = ms.loops.history()
            >>> history.commit(ms.loops.Elapsed(steps=1), {"loss": 0.5})
            >>> ms.loops.History.from_state(history.to_state()).collect("loss")
            [0.5]

        Args:
            start: The first row.
            stop: The row after the last; None for all there are. The newest row may still get more values of its step.
            outputs: Whether to keep outputs, and other arrays with several axes, too. A vector that is a loss or a
                metric, such as one number per class or per run, is kept in any case.

        Returns:
            Dicts, lists and tuples of arrays of plain dtypes, numbers, text and None.
        """
        start, stop, _ = slice(start, stop).indices(len(self))
        columns = []
        for (collection, name), column in self._columns.items():
            most_axes = None if outputs else 0 if collection == "outputs" else 1
            state = column.to_state(start, stop, most_axes=most_axes)
            if state is not None:
                columns.append({"collection": collection, "name": name, **state})
        return {"start": start, "moments": self._moments.to_state(start, stop), "columns": columns}

    @classmethod
    def from_state(cls, *states: dict[str, PyTree]) -> "History":
        """The history that `to_state` was called on.

        Example:
            >>> history = ms.loops.history()
            >>> history.commit(ms.loops.Elapsed(steps=1), {"loss": 0.5})
            >>> first = history.to_state()
            >>> history.commit(ms.loops.Elapsed(steps=2), {"loss": 0.4})
            >>> ms.loops.History.from_state(first, history.to_state(1)).collect("loss")
            [0.5, 0.4]

        Args:
            states: What `to_state` gave; several parts in order, each from the row on at which the one before ends.
        """
        history = cls()
        for state in states:
            history.append_state(state)
        return history

    def append_state(self, state: dict[str, PyTree]) -> None:
        """Add the rows of what `to_state` gave, which follow those there are.

        Example:
            >>> history, copy = ms.loops.history(), ms.loops.history()
            >>> history.commit(ms.loops.Elapsed(steps=1), {"loss": 0.5})
            >>> copy.append_state(history.to_state())
            >>> copy.collect("loss")
            [0.5]
        """
        start = state["start"]
        if start != len(self):
            raise ValueError(f"History.from_state needs row {len(self)} next. Got a part that starts with row {start}.")
        self._moments.append_state(state["moments"])
        for column_state in state["columns"]:
            path = column_state["collection"], column_state["name"]
            column = self._columns[path] if path in self._columns else self._new_column(path, None, plain=True)
            column.append_state(column_state, start, len(self))
        self._newest_step = self.elapsed().steps if len(self) else None

    @overload
    def plot(self, path: None = None, **options: Unpack[PlotOptions]) -> "Figure": ...
    @overload
    def plot(self, path: str | os.PathLike[str], **options: Unpack[PlotOptions]) -> pathlib.Path: ...
    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        names: Sequence[str] | None = None,
        title: str | None = None,
        smooth: float | None = None,
        log: bool | None = None,
        dpi: int = 150,
    ) -> "Figure | pathlib.Path":
        """An image of the curves: one panel per metric, with that of training and evaluation together.

        Example:
            >>> history = ms.loops.history()
            >>> for step in range(1, 101):
            ...     history.commit(ms.loops.Elapsed(steps=step), {"loss": 1 / step})
            >>> history.plot("history.png").name
            'history.png'

        Args:
            path: Where to write it, as PNG or whatever else its suffix says.
            names: Which entries, "name" or "collection.name"; all that are numbers by default.

        Other Args:
            title: Stands above it.
            smooth: Over which share of the steps noisy curves are averaged, 0 for not at all. By default 1/50.
            log: Whether the values have a logarithmic axis. By default losses that span two decades do.
            dpi: Dots per inch of the file.

        Returns:
            The path, or without one a `matplotlib.figure.Figure`, which a notebook shows.
        """
        figure = _plot.draw(self, names=names, title=title, smooth=smooth, log=log)
        return figure if path is None else figure.save("History.plot", path, dpi)

    def _repr_html_(self) -> str:
        return _history_html.history_html(self)

    def __repr__(self) -> str:
        return f"History({len(self)} rows: {', '.join(self.names()) or 'nothing logged'})"


def history() -> History:
    """An empty history.

    Example:
        >>> len(ms.loops.history())
        0
    """
    return History()
