"""A progress bar in the manner of Keras."""

from collections.abc import Collection

from millstream.callbacks._bar import Bar
from millstream.callbacks.bar_layout import lay_out
from millstream.callbacks.bar_progress import BarProgress
from millstream.loops.elapsed import seconds
from millstream.loops.signatures import Point
from millstream.text.bar_line import BarLine
from millstream.text.errors import require_int


def keras_bar(
    total: Point | None = None,
    *,
    width: int = 27,
    interval: float = 0.05,
    stateful_metrics: Collection[str] = (),
    verbose: int = 1,
) -> Bar:
    """A line with a bar, the time that is left, and the metrics: means of this epoch, weighted by samples.

    Example:
        >>> bar = ms.callbacks.keras_bar(total=100)
        >>> _ = bar(ms.loops.Elapsed(steps=100, time=12.0, time_before=8.6), {"loss": 1.53712})  # by hand; or in a loop
        100/100 [===========================] - 3s - 3.4s/step - loss: 1.5371

    While it runs, it looks like `80/100 [=====================>.....] - ETA: 42s - loss: 1.5371`; in a run that stops
    at an epoch, like `epoch 2/5 [===>.......] 29/100 - ETA: 44s - loss: 0.1291`; and in a test, like
    `epoch 2/5 testing [====>......] 9/23 - ETA: 3s`. Of every epoch a line stays, such as
    `epoch 3/5  100 steps  11.2s  40ms/step  loss 0.0821  loss_test 0.0490`, with exactly what that epoch has logged.

    The loss comes first, then what a callback monitors, others, and results of tests. Where a terminal is too narrow,
    the bar and the texts shrink before a value is left out. Into a file or a pipe the bar goes every ten seconds, or,
    in long runs, whenever the run is 5 % older, and at the end. Metrics are shown two steps late, so that nothing waits
    for them; in the lines of epochs and at the end they are exact. Process 0 alone writes.

    Args:
        total: Where the run will end: steps, or `at(samples=...)`, `at(epochs=...)`, `at(time=...)`. None:
            where the loop stops, if it says so.
        width: How wide the bar is, where there is room.
        interval: Seconds between two drawings.
        stateful_metrics: Metrics whose newest value is shown, not the mean, besides those logged as stateful metrics
            and the results of tests (`loss_test` and the like).
        verbose: 0 shows nothing.
    """
    require_int("keras_bar", "width", width, least=1)
    require_int("keras_bar", "verbose", verbose, least=0)
    face = _KerasFace(width, seconds("keras_bar", interval))
    return Bar("keras_bar", total, face, stateful_metrics=stateful_metrics, disabled=verbose == 0)


class _KerasFace:
    def __init__(self, width: int, interval: float) -> None:
        self._width = width
        self._interval = interval
        self._line = BarLine()

    def open(self, progress: BarProgress) -> None:
        self._line = BarLine()

    @property
    def keeps_lines(self) -> bool:
        return not self._line.rewrites

    def interval(self, progress: BarProgress) -> float:
        return max(self._interval, progress.plain_interval) if self.keeps_lines else self._interval

    def write_line(self, text: str) -> None:
        self._line.leave(text)

    @property
    def width(self) -> int | None:
        return self._line.width

    def draw(self, progress: BarProgress, values: dict[str, float]) -> None:
        self._line.write(self._text(progress, values))

    def close(self, progress: BarProgress, values: dict[str, float]) -> None:
        if progress.steps:
            self._line.write(self._text(progress, values, ended=True), end=True)
        elif not self.keeps_lines:
            self._line.write("")

    def _text(self, progress: BarProgress, values: dict[str, float], *, ended: bool = False) -> str:
        before, width, after = lay_out(progress, values, self.width, self._width, ended=ended)
        if not width:
            return before
        filled = int(width * (progress.share or 0))
        bar = "=" * width if filled == width else "=" * filled + ">" + "." * (width - filled - 1)
        return f"{before} [{bar}] {after}"
