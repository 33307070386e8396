"""A progress bar by rich."""

import sys
from collections.abc import Collection
from typing import Any

from millstream.callbacks._bar import Bar
from millstream.callbacks.bar_layout import lay_out
from millstream.callbacks.bar_progress import BarProgress
from millstream.loops.elapsed import seconds
from millstream.loops.signatures import Point
from millstream.text.bar_line import NotebookOutput, cells_of, put
from millstream.text.errors import needs, require_bool, require_text

_WIDEST = 10_000  # cells of a line in a file
_BAR = 20  # cells, where there is room


def rich_bar(
    total: Point | None = None,
    *,
    desc: str = "",
    interval: float = 0.1,
    stateful_metrics: Collection[str] = (),
    disable: bool = False,
    **progress_options: object,
) -> Bar:
    """A bar of rich, with the time that is left and the metrics: means of this epoch, weighted by samples.

    Example:
        >>> bar = ms.callbacks.rich_bar(total=3, disable=True)
        >>> _ = ms.loop(0, range(3), {ms.every(1): [bar]})

    It shows what `keras_bar` shows, with a bar of rich. What is printed while it runs appears above it. Into a file or
    a pipe go whole lines: for every epoch what it has logged, the bar every ten seconds in between, or more rarely in
    long runs, and at the end.

    Args:
        total: Where the run will end: steps, or `at(samples=...)`, `at(epochs=...)`, `at(time=...)`. None:
            where the loop stops, if it says so.
        desc: What stands before it.
        interval: Seconds between two drawings.
        stateful_metrics: Metrics whose newest value is shown, not the mean, besides those logged as stateful metrics
            and the results of tests (`loss_test` and the like).
        disable: Whether to show nothing.
        progress_options: Anything else that `rich.progress.Progress` takes, such as `console`.
    """
    with needs("rich_bar", "rich", "progress"):
        import rich.progress  # noqa: F401
    require_bool("rich_bar", "disable", disable)
    require_text("rich_bar", "desc", desc)
    face = _RichFace(desc, seconds("rich_bar", interval), progress_options)
    return Bar("rich_bar", total, face, stateful_metrics=stateful_metrics, disabled=disable)


class _RichFace:
    def __init__(self, desc: str, interval: float, options: dict[str, Any]) -> None:
        self._desc = desc
        self._interval = interval
        self._options = {"auto_refresh": False, **options}
        self._rich: Any = None
        self._task: Any = None

    def open(self, progress: BarProgress) -> None:
        from rich import progress as parts

        self._before = parts.TextColumn("{task.fields[before]}", markup=False)
        self._bar = parts.BarColumn()
        self._after = parts.TextColumn("{task.fields[after]}", markup=False)
        self._rich = parts.Progress(self._before, self._bar, self._after, **self._options)
        self._task = self._rich.add_task(self._desc, before=self._desc, after="")
        self._done: float = 0
        self._output = NotebookOutput() if self._rich.console.is_jupyter else None
        if not self.keeps_lines and self._output is None:
            self._rich.start()

    @property
    def keeps_lines(self) -> bool:
        console = self._rich.console
        return not (console.is_terminal or console.is_jupyter) or console.is_dumb_terminal

    @property
    def width(self) -> int | None:
        return None if self.keeps_lines else self._rich.console.width - cells_of(f"{self._desc} ")

    @property
    def _room(self) -> int | None:
        return None if self.keeps_lines else self._rich.console.width

    def interval(self, progress: BarProgress) -> float:
        return max(self._interval, progress.plain_interval) if self.keeps_lines else self._interval

    def write_line(self, text: str) -> None:
        line = f"{self._desc} {text}".lstrip()
        if self._output is not None:
            put(sys.stdout, f"{line}\n")  # by rich it would be an output of its own, of which a notebook shows few
        else:
            self._rich.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def draw(self, progress: BarProgress, values: dict[str, float]) -> None:
        self._draw(progress, values)

    def close(self, progress: BarProgress, values: dict[str, float]) -> None:
        try:
            self._draw(progress, values, ended=True)
        finally:
            if not self.keeps_lines and self._output is None:
                self._rich.stop()

    def _draw(self, progress: BarProgress, values: dict[str, float], *, ended: bool = False) -> None:
        before, self._bar.bar_width, after = lay_out(progress, values, self._room, _BAR, ended=ended, desc=self._desc)
        self._rich.columns = (self._before, self._bar, self._after) if self._bar.bar_width else (self._before,)
        # A bar that was full stays so, unless it begins again.
        change = self._rich.update if progress.done >= self._done else self._rich.reset
        self._done = progress.done
        texts = {"before": before, "after": after.removeprefix("- ")}
        change(self._task, completed=progress.done, total=progress.total, **texts)
        console = self._rich.console
        if self._output is not None:
            self._output.show(self._rich)
        elif self.keeps_lines:
            parts = console.render(self._rich, console.options.update(width=_WIDEST))
            text = "".join(part.text for part in parts if not part.control)
            console.print(text.strip(), markup=False, highlight=False, soft_wrap=True)
        else:
            self._rich.refresh()
