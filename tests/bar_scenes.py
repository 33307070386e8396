"""What a person sees of bars, on terminals of three widths; `python tests/bar_scenes.py` writes it to bar_scenes.txt.

Runs are played by hand, because times of real ones differ.
"""

import io
import os
import pathlib
import sys
from collections.abc import Iterator
from unittest import mock

import pyte

import millstream as ms
from millstream.loops import LoopState
from millstream.loops.schedules import Epochs

GOLDEN = pathlib.Path(__file__).with_suffix(".txt")
WIDTHS = (120, 80, 40)
EPOCH, STEP, TEST_STEP = 100, 0.7, 0.2


class Screen(io.StringIO):
    """A terminal, as a stream."""

    encoding = "utf-8"  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]

    def __init__(self, columns: int, rows: int = 12) -> None:
        super().__init__()
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.Stream(self._screen)

    def isatty(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        self._stream.feed(text.replace("\n", "\r\n"))
        return len(text)

    def lines(self) -> list[str]:
        """What can be read on it."""
        return [line.rstrip() for line in self._screen.display if line.strip()]


def bar_on(kind: str, screen: Screen, columns: int, **options):
    """A bar that draws on this terminal; that of Keras draws on standard output."""
    if kind == "keras":
        return ms.callbacks.keras_bar(**options)
    if kind == "tqdm":
        return ms.callbacks.tqdm_bar(file=screen, ncols=columns, **options)
    from rich.console import Console

    console = Console(file=screen, force_terminal=True, width=columns, color_system=None, _environ={})
    return ms.callbacks.rich_bar(console=console, **options)


class PlayedRun:
    """A training run with a bar, played step by step: epochs of a hundred steps, and tests of 23 after them.

    Args:
        bar: The bar.
        stop: Where it will end, if that is known.
        epochs: Whether it knows epochs.
        test_step: Seconds of a step of a test.
    """

    def __init__(
        self, bar: ms.Observer, *, stop: ms.loops.Period | None, epochs: bool = True, test_step: float = TEST_STEP
    ) -> None:
        self.state = LoopState(
            None,
            ms.loops.History(),
            ms.loops.Elapsed(epochs=0 if epochs else None, epochs_before=0 if epochs else None),
            name="train",
            ends_at=stop,
            epochs=Epochs(EPOCH) if epochs else None,
            callbacks=[ms.callbacks.early_stopping("accuracy_test", patience=3)],
        )
        self.time = 0.0
        self._bar, self._counts_epochs, self._test_step = bar, epochs, test_step
        bar.start(self.state)

    def step(self, logs: dict[str, float]) -> None:
        """A training step."""
        step, before = self.state.elapsed.steps + 1, self.time
        self.time += STEP
        epochs = (step // EPOCH, (step - 1) // EPOCH) if self._counts_epochs else (None, None)
        self.state.elapsed = ms.loops.Elapsed(
            step, 32 * step, epochs[0], self.time, 0.0, 32 * (step - 1), epochs[1], before
        )
        self._logs = logs

    def test(self) -> Iterator[int]:
        """A test inside the step; it stands at each of its own steps."""
        test = LoopState(
            None, ms.loops.History(), ms.loops.Elapsed(), name="test", ends_at=ms.at(23), parent=self.state
        )
        for step in range(1, 24):
            self.time += self._test_step
            test.elapsed = ms.loops.Elapsed(step, time=step * self._test_step)
            self.state.elapsed = self.state.elapsed.replace(time=self.time)
            self._bar.observe(test, 0, 0)
            yield step
        self.state.waits.evaluation += 23 * self._test_step
        self._logs |= {"loss_test": 0.113, "accuracy_test": 0.958}

    def end_step(self) -> None:
        """The step is over: it is logged, and the bar looks."""
        start = len(self.state.history)
        self.state.history.commit(self.state.elapsed, self._logs)
        self._bar.observe(self.state, start, start + 1)

    def finish(self, reason: str) -> None:
        """The run ends."""
        self.state.reason = reason
        self._bar.finish(self.state)


def logs_of(step: int) -> dict[str, float]:
    return {"accuracy": 0.5 + step / 1000, "gradient_norm": 1.5, "loss": 10 / (step + 5)}


def training(bar: ms.Observer) -> Iterator[str]:
    """A run of five epochs that is interrupted in its third."""
    run = PlayedRun(bar, stop=ms.at(epochs=5))
    yield "before the first step"
    for step in range(1, 242):
        run.step(logs_of(step))
        if step % EPOCH == 0:
            for tested in run.test():
                if tested == 9:
                    yield f"in the test of epoch {step // EPOCH}"
        run.end_step()
        if step in (2, 10, 141):
            yield f"step {step}"
    run.finish("interrupted")
    yield "interrupted"


def by_steps(bar: ms.Observer) -> Iterator[str]:
    """A run that knows no epochs, whose loss becomes NaN, and whose names are long and wide."""
    run = PlayedRun(bar, stop=ms.at(40), epochs=False)
    for step in range(1, 41):
        loss = {"loss": 1.0 if step < 30 else float("nan")}
        run.step({"a_metric_whose_name_is_so_long_that_it_fits_no_terminal": 1.0, "精度": 0.5} | loss)
        run.end_step()
        if step in (20, 30):
            yield f"step {step}"
    run.finish("it reached its stop")
    yield "ended"


def endless(bar: ms.Observer) -> Iterator[str]:
    """A run that nobody knows the end of, with one metric of a long name, inside an epoch and without epochs."""
    for epochs in (True, False):
        run = PlayedRun(bar, stop=None, epochs=epochs)
        for _ in range(25):
            run.step({"validation_cross_entropy_of_the_whole_encoder": 0.25})
            run.end_step()
        yield f"step 25 {'of an epoch' if epochs else 'without epochs'}"
        run.finish("a callback stopped it")
    yield "ended"


def scenes() -> str:
    """All of them, as text."""
    parts = []
    for play in (training, by_steps, endless):
        for kind in ("keras", "rich", "tqdm"):
            for columns in WIDTHS:
                screen = Screen(columns)
                parts.append(f"=== {play.__name__}: {kind}_bar, {columns} columns")
                with mock.patch.object(sys, "stdout", screen), mock.patch.dict(os.environ, COLUMNS=str(columns)):
                    for moment in play(bar_on(kind, screen, columns)):
                        parts += [f"--- {moment}", *screen.lines()]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(scenes())
