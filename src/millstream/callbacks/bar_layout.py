"""The texts of a bar's line, and how they share its width."""

import math
from typing import NamedTuple

from millstream.callbacks.bar_progress import BarProgress, duration_text, step_time_text
from millstream.text.bar_line import Form, Values, cells_of, clipped, fit

_LEAST_BAR = 5


class BarLayout(NamedTuple):
    """A line: what stands before its bar, the cells of the bar (0 for none), and what stands after it."""

    before: str
    bar: int
    after: str


def lay_out(
    progress: BarProgress, values: dict[str, float], width: int | None, bar: int, *, ended: bool = False, desc: str = ""
) -> BarLayout:
    """The texts of a line as long as there is room for.

    Args:
        progress: How far the run is.
        values: What is to be shown of its logs, the most important first.
        width: Cells of the line, of which the bar's frame has two; None for any number.
        bar: Cells that the bar has where there is room.
        ended: Whether to show how long it took, and not how long it still takes.
        desc: What stands first.
    """
    counts, (times, short_time) = counts_text(progress), _times(progress, ended)
    short_counts = counts.split(" ")[0]
    if progress.label:
        before, after = f"{desc} {progress.label}".lstrip(), " - ".join([counts, *times])
        short_before, short_after = short_label(progress), f"{short_counts} {short_time}".rstrip()
    else:
        before, after = f"{desc} {counts}".lstrip(), f"- {' - '.join(times)}"
        short_before, short_after = short_counts, short_time
    least = 0 if progress.total is None else _LEAST_BAR
    lines = [
        (before, after, _form(before, after, " - ", ": ", least)),
        (before, short_after, _form(before, short_after, " ", " ", least)),
        (short_before, short_after, _form(short_before, short_after, " ", " ", least)),
        (short_before, short_after, _form(short_before, short_after, " ", " ")),
        ("", short_counts, _form("", short_counts, " ", " ")._replace(spare=True)),
        ("", "", Form(0, " ", " ", spare=True)),
    ]
    found = fit([form for *_, form in lines], value_texts(values), width, bar)
    before, after, form = lines[found.form]
    after = form.joint.join(text for text in (after, found.values) if text)
    if form.least:
        return BarLayout(before, found.bar, after)
    return BarLayout(clipped(f"{before} {after}".strip(), width), 0, "")


def short_label(progress: BarProgress) -> str:
    """What the bar is of, in short."""
    return progress.label.removeprefix("epoch ") if "/" in progress.label else progress.label


def _form(before: str, after: str, joint: str, between: str, least: int = 0) -> Form:
    """A line of these texts with a bar of at least that many cells in a frame of two, or with none."""
    return Form(cells_of(f"{before} {after}{joint}") + (3 if least else 0), joint, between, least)


def _times(progress: BarProgress, ended: bool) -> tuple[list[str], str]:
    """How long a run still takes, or how long it took if that is not known; in full and in short."""
    if ended or progress.total is None:
        taken, step = duration_text(progress.seconds), progress.seconds_per_step
        return [taken] if step is None else [taken, step_time_text(step)], taken
    if progress.seconds_left is None:
        return ["ETA: ?"], ""
    left = duration_text(progress.seconds_left)
    return [f"ETA: {left}"], f"<{left}"


def epoch_line(figures: list[str], values: dict[str, float], width: int | None) -> str:
    """The line of an epoch: its figures, of which the first is its number and the second its steps, and its values."""
    name, steps, *times = figures
    texts = ["  ".join(part) for part in ([name, steps, *times], [name, *times], [name, *times[:1]], [name])]
    forms = [Form(cells_of(f"{text}  "), "  ", " ") for text in texts]
    found = fit(forms, value_texts(values), width, 0)
    return clipped("  ".join(filter(None, [texts[found.form], found.values])), width)


def counts_text(progress: BarProgress) -> str:
    """How much is done: 412/1000, 12/40 samples, 3s/1:00, 7 steps, 1 step."""
    number = _seconds_text if progress.unit == "time" else str
    if progress.total is None:
        return f"{number(progress.done)} {progress.unit.removesuffix('s') if progress.done == 1 else progress.unit}"
    word = "" if progress.unit in ("steps", "time") else f" {progress.unit}"
    return f"{number(progress.done)}/{number(progress.total)}{word}"


def _seconds_text(seconds: float) -> str:
    return duration_text(math.floor(seconds))  # a minute is not over before its end


def value_texts(values: dict[str, float]) -> Values:
    """Names as they can stand in a line, and numbers."""
    return [(printable(name), number_text(value)) for name, value in values.items()]


def printable(name: str) -> str:
    """A name as it can stand in a line."""
    return name if name.isprintable() else ascii(name)[1:-1]


def number_text(value: float) -> str:
    """A value as bars show it.

    Example:
        >>> number_text(0.61479), number_text(3e-5), number_text(7)
        ('0.6148', '3.0000e-05', '7')
    """
    if isinstance(value, int):
        return str(value)
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.4e}"
