"""A progress bar by rich."""

from collections.abc import Collection
from typing import Any

from millstream.callbacks._bar import Bar, number_text
from millstream.callbacks.bar_progress import BarProgress, duration_text
from millstream.loops.elapsed import seconds
from millstream.loops.signatures import Point
from millstream.text.bar_line import fitted
from millstream.text.errors import needs, require_bool, require_text

_WIDEST = 10_000  # cells of a line in a file
_BAR, _TIMES = 20, len(" 0:00:00 0:00:00 ")  # cells of the bar, and of the times beside it


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

    What is printed while it runs appears above it. Into a file or a pipe go whole lines: for every epoch what it has
    logged, as by `keras_bar`, the bar every ten seconds in between, or more rarely in long runs, and at the end.

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
        self._rich = _make_progress(self._options)
        self._task = self._rich.add_task(
            self._desc, total=progress.total, completed=progress.begin, counts=_counts(progress), values=""
        )
        if not self.keeps_lines:
            self._rich.start()

    @property
    def keeps_lines(self) -> bool:
        console = self._rich.console
        return not (console.is_terminal or console.is_jupyter) or console.is_dumb_terminal

    def interval(self, progress: BarProgress) -> float:
        return max(self._interval, progress.plain_interval) if self.keeps_lines else self._interval

    def write_line(self, text: str) -> None:
        self._rich.console.print(f"{self._desc} {text}".lstrip(), markup=False, highlight=False, soft_wrap=True)

    def draw(self, progress: BarProgress, values: dict[str, float]) -> None:
        counts, texts = _counts(progress), [f"{name}: {number_text(value)}" for name, value in values.items()]
        room = self._rich.console.width - len(f"{self._desc} {counts} ") - _BAR - _TIMES
        shown = fitted(texts, None if self.keeps_lines else max(room, 0))
        self._rich.update(self._task, completed=progress.done, counts=counts, values=shown)
        if self.keeps_lines:
            console = self._rich.console
            parts = console.render(self._rich, console.options.update(width=_WIDEST))
            text = "".join(part.text for part in parts if not part.control)
            console.print(text.strip(), markup=False, highlight=False, soft_wrap=True)
        else:
            self._rich.refresh()

    def close(self, progress: BarProgress, values: dict[str, float]) -> None:
        try:
            self.draw(progress, values)
        finally:
            if not self.keeps_lines:
                self._rich.stop()


def _make_progress(options: dict[str, Any]) -> Any:
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=_BAR),
        progress.TextColumn("{task.fields[counts]}", markup=False),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[values]}", markup=False),
        **options,
    )


def _counts(progress: BarProgress) -> str:
    number = duration_text if progress.unit == "time" else str
    of = "" if progress.total is None else f"/{number(progress.total)}"
    return f"{number(progress.done)}{of}" + ("" if progress.unit == "time" else f" {progress.unit}")
