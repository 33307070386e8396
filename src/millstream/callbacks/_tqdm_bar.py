"""A progress bar by tqdm."""

import inspect
import io
import sys
from collections.abc import Collection
from typing import Any

from millstream.callbacks._bar import Bar
from millstream.callbacks.bar_layout import short_label, value_texts
from millstream.callbacks.bar_progress import BarProgress
from millstream.loops.elapsed import seconds
from millstream.loops.signatures import Point
from millstream.text.bar_line import Form, NotebookOutput, cells_of, fit, is_notebook, put, rewrites
from millstream.text.errors import needs, require_text

_INTERVAL = 0.1
_VALUES = Form(0, ", ", "=")
_BAR = "{percentage:3.0f}%|{bar}| "


def tqdm_bar(
    total: Point | None = None,
    *,
    desc: str | None = None,
    stateful_metrics: Collection[str] = (),
    **tqdm_options: object,
) -> Bar:
    """A bar of tqdm with the metrics after it: means of this epoch, weighted by samples.

    Example:
        >>> bar = ms.callbacks.tqdm_bar(ms.at(samples=1000), desc="digits", disable=True)
        >>> _ = ms.loop(0, [np.ones(100)] * 10, {ms.every(1): [bar]})

    Of every epoch a line stays, as by `keras_bar`; in a run that stops at an epoch, the bar is that of the current one,
    or of its test, and the time that is left that of the run. Into a file or a pipe go whole lines: those of epochs,
    the bar every ten seconds in between, or more rarely in long runs, and at the end.

    Args:
        total: Where the run will end: steps, or `at(samples=...)`, `at(epochs=...)`, `at(time=...)`. None:
            where the loop stops, if it says so.
        desc: What stands before it.
        stateful_metrics: Metrics whose newest value is shown, not the mean, besides those logged as stateful metrics
            and the results of tests (`loss_test` and the like).
        tqdm_options: Anything else that tqdm takes. `mininterval` is 0.1 seconds, and 10 or more if it writes into a
            file or a pipe.
    """
    with needs("tqdm_bar", "tqdm", "progress"):
        import tqdm.std
    if desc is not None:
        require_text("tqdm_bar", "desc", desc)
    known = inspect.signature(tqdm.std.tqdm.__init__).parameters
    if unknown := [name for name in tqdm_options if name not in known]:
        raise TypeError(f"tqdm_bar takes the options of tqdm, which has no {', '.join(unknown)}.")
    disable = tqdm_options.pop("disable", False)
    disabled = not rewrites(_stream(tqdm_options)) if disable is None else bool(disable)  # None: only on a terminal
    face = _TqdmFace(tqdm.std.tqdm, {"desc": desc, "dynamic_ncols": "ncols" not in tqdm_options, **tqdm_options})
    return Bar("tqdm_bar", total, face, stateful_metrics=stateful_metrics, disabled=disabled)


class _TqdmFace:
    def __init__(self, tqdm: Any, options: dict[str, Any]) -> None:
        interval = options.pop("mininterval", None)
        self._interval = None if interval is None else seconds("tqdm_bar", interval)
        self._tqdm = tqdm
        self._options = options
        self._stream: Any = None
        self._bar: Any = None

    def open(self, progress: BarProgress) -> None:
        # What calls `draw` has waited already, so tqdm need not.
        ours = {"unit": progress.unit.removesuffix("s"), "initial": progress.done, "mininterval": 0, "miniters": 0}
        self._stream = _stream(self._options)
        self._output = NotebookOutput() if is_notebook(self._stream) else None
        options: dict[str, Any] = {**ours, **self._options, "desc": self._desc(progress)}
        if self.keeps_lines or self._output is not None:
            options |= {"file": _Unseen(self._stream), "dynamic_ncols": False}
        self._bar = self._tqdm(total=progress.total, **options)

    @property
    def keeps_lines(self) -> bool:
        return not rewrites(self._stream)

    @property
    def width(self) -> int | None:
        columns, desc = self._bar.format_dict["ncols"], self._options["desc"]
        return None if not columns or self.keeps_lines else columns - (cells_of(f"{desc}: ") if desc else 0)

    def interval(self, progress: BarProgress) -> float:
        if self._interval is not None:
            return self._interval
        return progress.plain_interval if self.keeps_lines else _INTERVAL

    def write_line(self, text: str) -> None:
        desc = self._options["desc"]
        line = text if desc is None else f"{desc}: {text}"
        if self._output is not None:
            put(sys.stdout, f"{line}\n")
        elif self.keeps_lines:
            put(self._stream, f"{line}\n")
        else:
            self._bar.write(line, file=self._stream)

    def draw(self, progress: BarProgress, values: dict[str, float]) -> None:
        self._set(progress, values)
        self._bar.refresh()
        self._put()

    def close(self, progress: BarProgress, values: dict[str, float]) -> None:
        self._set(progress, values, ended=True)
        self._put()
        self._bar.close()

    def _put(self) -> None:
        if self._output is not None:
            self._output.show(str(self._bar))
        elif self.keeps_lines:
            put(self._stream, f"{self._bar}\n")

    def _set(self, progress: BarProgress, values: dict[str, float], *, ended: bool = False) -> None:
        """Have the bar show this, with as many values as there is room for."""
        bar, texts = self._bar, value_texts(values)
        bar.n, bar.total = progress.done, progress.total
        bar.desc = self._desc(progress)
        bar.unit = self._options.get("unit", progress.unit.removesuffix("s"))
        if self._options.get("bar_format") is not None:
            bar.set_postfix_str(_VALUES.text(texts), refresh=False)
            return
        shown, lines = bar.format_dict, self._lines(progress, ended)
        forms = [_VALUES._replace(cells=self._cells(shown, line), least=5 * ("{bar}" in line)) for line in lines]
        forms[-1] = forms[-1]._replace(spare=True)
        found = fit(forms, texts, shown["ncols"] or None, 0)
        line = lines[found.form].removesuffix("]")
        line += _VALUES.joint if found.values and not line.endswith("[") else ""
        bar.bar_format = line + found.values.replace("{", "{{").replace("}", "}}") + "]"

    def _desc(self, progress: BarProgress) -> str:
        return ": ".join(text for text in (self._options["desc"], progress.label) if text)

    def _cells(self, shown: dict[str, Any], line: str) -> int:
        """Of a line without its bar and values, and with what stands before these."""
        text = self._bar.format_meter(**{**shown, "bar_format": line.replace("{bar}", ""), "ncols": None})
        return cells_of(text) + len(_VALUES.joint)

    def _lines(self, progress: BarProgress, ended: bool) -> list[str]:
        """How tqdm is to write its line, but for the values, from the longest to the shortest."""
        interval, desc = self._bar.format_interval, "{desc}: " if self._bar.desc else ""
        short = f"{short_label(progress)}: " if progress.label else ""
        taken, left = interval(progress.seconds), progress.seconds_left
        # Seconds per second say nothing.
        rate = f", {self._rate(progress)}" if progress.measure != "time" else ""
        if progress.total is None:
            counts = f"{{n_fmt}}{self._bar.unit}"
            return [f"{desc}{counts} [{taken}{rate}]", f"{short}{counts} [{taken}]", f"{short}{counts} []"]
        counts = "{n:.0f}/{total:.0f}s" if progress.unit == "time" else "{n_fmt}/{total_fmt}"
        times = f"{taken}<{'?' if left is None else interval(left)}"
        time = taken if ended else times.removeprefix(taken)
        return [
            f"{desc}{_BAR}{counts} [{times}{rate}]",
            f"{desc}{_BAR}{counts} [{times}]",
            f"{short}{_BAR}{counts} [{time}]",
            f"{short}{counts} [{time}]",
            f"{short}{counts} []",
        ]

    def _rate(self, progress: BarProgress) -> str:
        unit, speed = self._options.get("unit", progress.measure.removesuffix("s")), progress.speed
        if not speed:
            return f"?{unit}/s"
        return f"{speed:.2f}{unit}/s" if speed >= 1 else f"{1 / speed:.2f}s/{unit}"


class _Unseen(io.StringIO):
    """What tqdm writes to, with its carriage returns, while its lines go to a stream that keeps them."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._encoding = getattr(stream, "encoding", None)

    @property
    def encoding(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """By which tqdm tells whether it can draw with more than ASCII."""
        return self._encoding

    def write(self, text: str, /) -> int:
        return len(text)


def _stream(options: dict[str, Any]) -> Any:
    """Where tqdm writes to."""
    file = options.get("file")
    return sys.stderr if file is None else file
