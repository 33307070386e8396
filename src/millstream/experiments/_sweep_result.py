"""What a sweep found: its runs, in a table and a picture."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, overload

import jax
import numpy as np

from millstream.experiments._drawing import draw_runs
from millstream.experiments._grid import Hyperparameters, value_text
from millstream.loops import History
from millstream.loops.curves import Curve
from millstream.loops.log_entries import describe_logged, require_name
from millstream.reading.contracts import PyTree
from millstream.text.errors import require_choice
from millstream.text.html import html_curves, html_table, html_text
from millstream.text.tables import size_text, text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHARE = 10  # the last tenth of the values of a run counts
_PICTURED = 6  # curves in a notebook
_BINS = 150  # of a curve there


@dataclasses.dataclass(frozen=True, eq=False)
class SweptRun:
    """One run of a sweep.

    Example:
        >>> history = ms.loops.history()
        >>> run = ms.loops.SweptRun("0-lr=0.1", {"lr": 0.1}, history, jnp.zeros(3), None)
        >>> run.state.shape
        (3,)

    Attributes:
        name: Number and hyperparameters, as its folder is called.
        hyperparameters: What it was trained with.
        history: What it has logged, as if it had run alone.
        states: Those of all runs that were trained at once with it.
        place: Which of these is its own; None if there is only this one.
    """

    name: str
    hyperparameters: Hyperparameters
    history: History
    states: PyTree
    place: int | None

    @property
    def state(self) -> PyTree:
        """Its last state."""
        return self.states if self.place is None else jax.tree.map(lambda leaf: leaf[self.place], self.states)

    def value(self, monitor: str) -> float:
        """The mean over the last tenth of the values of an entry; NaN if there are none, or one is not finite."""
        column = self.history.column(monitor)
        if column is None or not len(column):
            return math.nan
        values = column.floats()
        last = values[-max(len(values) // _SHARE, 1) :]
        return float(last.mean()) if np.isfinite(last).all() else math.nan

    def diverged_at(self, monitor: str) -> int | None:
        """The first step at which an entry was not finite; None if it always was."""
        column = self.history.column(monitor)
        wrong = [] if column is None else np.flatnonzero(~np.isfinite(column.floats()))
        if column is None or not len(wrong):
            return None
        return self.history.elapsed(int(column.row_numbers()[wrong[0]])).steps

    def __repr__(self) -> str:
        return f"SweptRun({self.name}, {self.history})"


@dataclasses.dataclass(frozen=True, eq=False)
class Sweep:
    """The runs of a sweep; made by `ms.sweep`. Printed, a table with the best run first; in a notebook, curves as well.

    Example:
        >>> history = ms.loops.history()
        >>> history.commit(ms.loops.Elapsed(steps=1), {"loss": 0.5})
        >>> run = ms.loops.SweptRun("0-lr=0.1", {"lr": 0.1}, history, jnp.zeros(3), None)
        >>> ms.loops.Sweep((run,), "loss", "min", 12).best.hyperparameters
        {'lr': 0.1}

    Attributes:
        runs: The runs, in the order of the grid.
        monitor: The entry by which they are compared: each by the mean over the last tenth of its values.
        mode: Whether "min" or "max" is better.
        nbytes: Bytes of the states that were held at once.
        interrupted: Whether Ctrl-C has ended it. Runs that had not begun are missing then.
    """

    runs: tuple[SweptRun, ...]
    monitor: str
    mode: Literal["min", "max"]
    nbytes: int
    interrupted: bool = False

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[SweptRun]:
        return iter(self.runs)

    @property
    def histories(self) -> list[History]:
        """The history of each run, in the order of the grid."""
        return [run.history for run in self.runs]

    @property
    def ranked(self) -> list[SweptRun]:
        """The runs, the best one first; those that diverged last."""
        sign = 1 if self.mode == "min" else -1

        def rank(run: SweptRun) -> tuple[bool, float]:
            value = run.value(self.monitor)
            return math.isnan(value), sign * value if value == value else 0.0

        return sorted(self.runs, key=rank)

    @property
    def best(self) -> SweptRun:
        """The best run."""
        best = self.ranked[0]
        if math.isnan(best.value(self.monitor)):
            logged = best.history.columns()
            why = (
                f"every run diverged: {self.monitor} is not finite at the end of any of them"
                if best.history.column(self.monitor) is not None
                else f"{self.monitor!r} was never logged. {describe_logged(self.monitor, logged)}"
            )
            raise ValueError(f"Sweep.best: {why} Compare by another entry: output.by('accuracy', 'max').best.")
        return best

    def by(self, monitor: str, mode: Literal["min", "max"] = "min") -> "Sweep":
        """The same runs, compared by another entry.

        Example:
            >>> history = ms.loops.history()
            >>> history.commit(ms.loops.Elapsed(steps=1), {"accuracy": 0.5})
            >>> run = ms.loops.SweptRun("0-lr=0.1", {"lr": 0.1}, history, jnp.zeros(3), None)
            >>> ms.loops.Sweep((run,), "loss", "min", 12).by("accuracy", "max").best.name
            '0-lr=0.1'

        Args:
            monitor: "name" or "collection.name".
            mode: Whether "min" or "max" is better.
        """
        require_name("Sweep.by", monitor, "monitor")
        require_choice("Sweep.by", "mode", mode, ["min", "max"])
        return dataclasses.replace(self, monitor=monitor, mode=mode)

    @overload
    def plot(self, path: None = None, *, dpi: int = 150) -> "Figure": ...
    @overload
    def plot(self, path: str | os.PathLike[str], *, dpi: int = 150) -> pathlib.Path: ...
    def plot(self, path: str | os.PathLike[str] | None = None, *, dpi: int = 150) -> "Figure | pathlib.Path":
        """An image of the monitored entry of all runs, the best ones in color.

        Args:
            path: Where to write it, as PNG or whatever else its suffix says.
            dpi: Dots per inch of the file.

        Returns:
            The path, or without one a `matplotlib.figure.Figure`, which a notebook shows.
        """
        names = [(self._words(run), self._curve(run)) for run in self.ranked]
        figure = draw_runs("Sweep.plot", self.monitor, names)
        return figure if path is None else figure.save("Sweep.plot", path, dpi)

    def _curve(self, run: SweptRun) -> Curve:
        """The monitored entry of a run over its steps."""
        column = run.history.column(self.monitor)
        if column is None:
            return Curve(self.monitor, np.empty(0), np.empty(0), None)
        return Curve(self.monitor, np.array(run.history.units()["steps"])[column.row_numbers()], column.floats(), None)

    def _words(self, run: SweptRun) -> str:
        return ", ".join(f"{name} {value_text(value)}" for name, value in run.hyperparameters.items())

    def _header(self) -> list[str]:
        return [*self.runs[0].hyperparameters, self.monitor, "steps", ""]

    def _rows(self) -> list[list[str]]:
        rows = []
        for run in self.ranked:
            value, diverged = run.value(self.monitor), run.diverged_at(self.monitor)
            steps = f"{run.history.elapsed().steps:,}" if len(run.history) else "0"
            said = "" if diverged is None else f"not finite from step {diverged:,}"
            hyperparameters = map(value_text, run.hyperparameters.values())
            rows.append([*hyperparameters, "" if math.isnan(value) else f"{value:.4g}", steps, said])
        return rows

    def _title(self) -> str:
        ended = ", interrupted" if self.interrupted else ""
        return f"{len(self)} runs{ended}; the states of those at once take {size_text(self.nbytes)}"

    def _repr_html_(self) -> str:
        header = self._header()
        curves = []
        for run in self.ranked[:_PICTURED]:
            steps, values = self._curve(run).thinned(_BINS)
            curves.append((self._words(run), steps.tolist(), values.tolist()))
        more = f", the best {_PICTURED} of {len(self)}" if len(self) > _PICTURED else ""
        picture = html_curves(f"{self.monitor}{more}", curves)
        table = html_table(header, self._rows(), numbers=header[:-1])
        return f"{html_text(self._title())}{table}<div>{picture}</div>"

    def __str__(self) -> str:
        header = self._header()
        return f"{self._title()}\n{text_table(header, self._rows(), numbers=header[:-1])}"

    def __repr__(self) -> str:
        return f"Sweep({self._title()})"
