"""A progress bar by tqdm."""

import inspect
import io
import sys
from collections.abc import Collection
from typing import Any

from millstream.callbacks._bar import Bar, number_text
from millstream.callbacks.bar_progress import BarProgress
from millstream.loops.elapsed import seconds
from millstream.loops.signatures import Point
from millstream.text.bar_line import put, rewrites
from millstream.text.errors import needs, require_text

# A rate in seconds per second says nothing.
_TIME_FORMAT = "{l_bar}{bar}| {n:.0f}/{total:.0f}s [{elapsed}<{remaining}{postfix}]"
_INTERVAL = 0.1


def tqdm_bar(
    total: Point | None = None,
    *,
    desc: str | None = None,
    stateful_metrics: Collection[str] = (),
    **tqdm_options: object,
) -> Bar:
    """A bar of tqdm (in notebooks its widget) with the metrics after it: means of this epoch, weighted by samples.

    Example:
        >>> bar = ms.callbacks.tqdm_bar(ms.at(samples=1000), desc="digits", disable=True)
        >>> _ = ms.loop(0, [np.ones(100)] * 10, {ms.every(1): [bar]})

    Into a file or a pipe go whole lines: for every epoch what it has logged, as by `keras_bar`, the bar every ten
    seconds in between, or more rarely in long runs, and at the end.

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
        import tqdm.auto
    if desc is not None:
        require_text("tqdm_bar", "desc", desc)
    known = inspect.signature(tqdm.std.tqdm.__init__).parameters
    if unknown := [name for name in tqdm_options if name not in known]:
        raise TypeError(f"tqdm_bar takes the options of tqdm, which has no {', '.join(unknown)}.")
    disable = tqdm_options.pop("disable", False)
    disabled = not rewrites(_stream(tqdm_options)) if disable is None else bool(disable)  # None: only on a terminal
    face = _TqdmFace(tqdm.auto.tqdm, {"desc": desc, "dynamic_ncols": True, **tqdm_options})
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
        # Whoever calls `draw` has waited already, so tqdm need not.
        ours = {"unit": progress.unit.removesuffix("s"), "initial": progress.begin, "mininterval": 0, "miniters": 0}
        options: dict[str, Any] = {**ours, **self._options}
        if progress.unit == "time" and progress.total is not None:
            options.setdefault("bar_format", _TIME_FORMAT)
        self._stream = _stream(self._options)
        if self.keeps_lines:
            options["file"] = _Unseen(self._stream)
        self._bar = self._tqdm(total=progress.total, **options)

    @property
    def keeps_lines(self) -> bool:
        return not rewrites(self._stream)

    def interval(self, progress: BarProgress) -> float:
        if self._interval is not None:
            return self._interval
        return progress.plain_interval if self.keeps_lines else _INTERVAL

    def write_line(self, text: str) -> None:
        desc = self._options["desc"]
        put(self._stream, f"{text}\n" if desc is None else f"{desc}: {text}\n")

    def draw(self, progress: BarProgress, values: dict[str, float]) -> None:
        self._show(values)
        self._bar.update(progress.done - self._bar.n)
        if self.keeps_lines:
            put(self._stream, f"{self._bar}\n")

    def close(self, progress: BarProgress, values: dict[str, float]) -> None:
        self._show(values)
        self._bar.n = progress.done
        if self.keeps_lines:
            put(self._stream, f"{self._bar}\n")
        self._bar.close()

    def _show(self, values: dict[str, float]) -> None:
        self._bar.set_postfix({name: number_text(value) for name, value in values.items()}, refresh=False)


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
