"""A run in a few figures, and a sentence of advice drawn from them."""

from millstream.callbacks.bar_progress import duration_text
from millstream.report._chart import value_text
from millstream.report._charts import best_values, odd_values
from millstream.report._run_data import RunData
from millstream.text.tables import time_text

_MOST_BEST = 4
_MUCH_WAITING, _MUCH_TESTING, _MUCH_CALLING, _MUCH_COMPILING = 0.2, 0.4, 0.2, 0.4

Tile = tuple[str, str, str]  # what it is, its value, and what is to be said of it
_ADVICE = (
    ("data", _MUCH_WAITING, "{} of the time was spent waiting for data: loader.tune() suggests how to mend it."),
    (
        "callbacks",
        _MUCH_CALLING,
        "{} of the time was spent in callbacks, logging and saving: let them be due less often, every(100) say.",
    ),
    (
        "compiling",
        _MUCH_COMPILING,
        "{} of the time was spent compiling and starting, which a run does once: it is a smaller part of a longer one.",
    ),
    (
        "evaluation",
        _MUCH_TESTING,
        "{} of the time was spent in tests: test_duration= tests on fewer batches.",
    ),
)


def tiles(run: RunData) -> list[Tile]:
    """The figures on top of the page."""
    made: list[Tile] = []
    if len(run.history):
        newest = run.history.elapsed()
        made.append(("steps", f"{newest.steps:,}", "" if newest.epochs is None else f"{newest.epochs:,} epochs"))
        made.append(("samples", f"{newest.samples:,}", ""))
    seconds = wall_time(run)
    made.append(("time", _length(seconds), _ended(run)))
    speed = _speed(run)
    if speed is not None:
        made.append(speed)
    waiting = None if run.times is None else run.times.share("data")
    if waiting is not None:
        made.append(("waiting for data", f"{100 * waiting:.0f} %", "of the time"))
    for name, value, step in best_values(run)[:_MOST_BEST]:
        made.append((f"best {name}", value_text(value), f"at step {step:,.0f}"))
    return made


def wall_time(run: RunData) -> float | None:
    """How long the run took; None if that is not known."""
    logged = run.history.elapsed().time if len(run.history) else 0.0
    measured = 0.0 if run.times is None else float(run.times.seconds.sum())
    seconds = max(logged, measured)
    return seconds if seconds > 0 else None


def _speed(run: RunData) -> Tile | None:
    """How fast it was; None if nothing is known about that."""
    name, seconds = "samples per second", wall_time(run)
    if run.times is not None:
        if not run.times.samples.any():
            return None
        median = run.times.samples_per_second()
        if median is None:
            return name, "unknown", "too short to tell"
        return name, value_text(median), "median, without compiling and tests"
    if seconds is None or not len(run.history):
        return None
    return name, value_text(run.history.elapsed().samples / seconds), "of the whole time, with compiling and tests"


def advice(run: RunData) -> str:
    """What the figures suggest to do, in a sentence."""
    odd = odd_values(run)
    if odd:
        name, count, step = odd[0]
        times = "once" if count == 1 else f"{count:,} times"
        return f"{name} was not finite {times}, first at step {step:,}: ms.terminate_on_nan() stops such a run there."
    if run.times is None:
        return (
            f"This is read from {run.kind}, which does not say what the time was used for, what the data went through "
            'and with which versions: ms.record("run") among the callbacks writes that down.'
        )
    shares = {use: run.times.share(use) or 0.0 for use in run.times.uses}
    for use, much, text in _ADVICE:
        if shares.get(use, 0.0) >= much:
            return text.format(f"{100 * shares[use]:.0f} %")
    return f"{100 * shares['steps']:.0f} % of the time was spent in the steps themselves: the data keep up with them."


def _length(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return time_text(seconds) if seconds < 60 else duration_text(seconds)


def _ended(run: RunData) -> str:
    if run.ended is not None:
        return f"ended: {run.ended}" if run.ended else "ended"
    return "it is running, or was killed" if run.beginnings else ""
