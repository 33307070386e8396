"""What is known of a run when a report is made of it."""

import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np

from millstream.callbacks.log_file import SAMPLES_OF
from millstream.loops import History
from millstream.loops.curves import Curve, panels
from millstream.report._media import Media, read_media

# What the time of a run is used for, in the order in which it is shown; the rest of it are steps.
USES = {
    "steps": "steps",
    "data": "waiting for data",
    "evaluation": "tests",
    "callbacks": "callbacks, logging, saving",
    "compiling": "compiling and starting",
}
# What ms.callbacks.throughput logs; a record measures the same.
_MEASURED = {"seconds", "samples_per_second", "steps_per_second", "step_time", "compile_time", "data_wait"}


_LEAST_WINDOWS = 5  # of which the median says how fast a run was
_LITTLE_COMPILING, _LEAST_STEPPING = 0.01, 0.05  # shares of a window that tells how fast steps are


@dataclasses.dataclass(frozen=True, eq=False)
class Times:
    """What the time of a run was used for, window by window.

    Attributes:
        ends: The step at which each window ended.
        seconds: How long each was.
        samples: Samples of its steps.
        uses: Seconds of each use in each window; together they are all seconds. A use that nobody counted is not there.
        busy: Seconds of each window without compiling and tests.
        steady: Which windows tell how fast the steps are: not the first ones, nor those with compiling or little else
            than a test.
        memory: Bytes in use at the end of each window by `host_memory` and `device_memory`, and the most so far by
            `device_memory_peak`; NaN where not known, and no entry if nowhere.
        first: Which windows are those with which the run began, or resumed.
    """

    ends: np.ndarray
    seconds: np.ndarray
    samples: np.ndarray
    uses: dict[str, np.ndarray]
    busy: np.ndarray
    steady: np.ndarray
    memory: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    first: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, bool))

    def share(self, use: str) -> float | None:
        """The part of all time that went into a use, from 0 to 1; None if not counted."""
        total = self.seconds.sum()
        return float(self.uses[use].sum() / total) if use in self.uses and total > 0 else None

    def samples_per_second(self) -> float | None:
        """The median of the steady windows; None if these are too few to tell."""
        if self.steady.sum() < _LEAST_WINDOWS:
            return None
        return float(np.median(self.samples[self.steady] / self.busy[self.steady]))


def times_of(windows: list[dict[str, Any]]) -> Times | None:
    """The windows of a record; None if there are none.

    Args:
        windows: As the record has written them, those marked with which a run began, or resumed.
    """
    windows = [window for window in windows if window["spent"]["seconds"] > 0]
    if not windows:
        return None
    spent = [window["spent"] for window in windows]
    known = [use for use in USES if all(use in window for window in spent)]

    def column(name: str) -> np.ndarray:
        return np.array([window[name] for window in spent], np.float64)

    seconds, uses = column("seconds"), {use: column(use) for use in known if use != "steps"}
    if "data" in uses:
        # Whoever waits for the first batch waits for files to be opened, workers to start and programs to compile.
        starting = np.where([window["first"] for window in windows], uses["data"], 0.0)
        uses["data"], uses["compiling"] = uses["data"] - starting, uses["compiling"] + starting
    # Programs are compiled while batches are drawn and tests run, too. Such a time is counted once, as compiling.
    over = np.maximum(sum(uses.values(), np.zeros(len(spent))) - seconds, 0.0)
    for use in [use for use in uses if use != "compiling"] + ["compiling"]:
        cut = np.minimum(over, uses[use])
        uses[use], over = uses[use] - cut, over - cut
    rest = seconds - sum(uses.values(), np.zeros(len(spent)))
    ends = np.array([window["steps"] for window in windows], np.int64)
    samples, is_first = column("samples"), np.array([window["first"] for window in windows])
    busy = seconds - sum((uses[use] for use in ("compiling", "evaluation") if use in uses), np.zeros(len(spent)))
    # The first window of a run has imports and tracing in it, too, which nobody counts.
    steady = ~is_first & (samples > 0) & (busy > _LEAST_STEPPING * seconds)
    if "compiling" in uses:
        steady &= uses["compiling"] <= _LITTLE_COMPILING * seconds
    memory = {
        name: np.array([window.get(name, np.nan) for window in spent], np.float64)
        for name in ("host_memory", "device_memory", "device_memory_peak")
        if any(name in window for window in spent)
    }
    return Times(ends, seconds, samples, {"steps": np.maximum(rest, 0.0), **uses}, busy, steady, memory, is_first)


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """The shares of the sources of a mixture in a run.

    Attributes:
        planned: By source, the step at which each stretch of the run ends, and its share there by the plan.
        seen: The same for the samples that the loop was given.
    """

    planned: dict[str, tuple[np.ndarray, np.ndarray]]
    seen: dict[str, tuple[np.ndarray, np.ndarray]]


def mixture_of(windows: list[dict[str, Any]], beginnings: list[dict[str, Any]]) -> Mixture | None:
    """The mixture of a run; None if it had none.

    Args:
        windows: As the record has written them.
        beginnings: What it was each time it was begun or resumed.
    """
    plans = [(run["from_step"], run["mixture"]) for run in beginnings if run.get("mixture") is not None]
    if not plans:
        return None
    names = plans[-1][1]["sources"]
    rows: dict[int, list[int]] = {}
    for first, plan in plans:  # a later one holds from where the run was resumed
        rows = {step: counts for step, counts in rows.items() if step <= first}
        rows |= dict(zip(plan["steps"], plan["samples"], strict=True)) if plan["sources"] == names else {}
    seen = {}
    for window in windows:
        counts = [window["spent"].get(f"{SAMPLES_OF}{name}", 0) for name in names]
        if sum(counts):
            seen[window["steps"]] = counts
    return Mixture(_shares(names, rows), _shares(names, seen))


def _shares(names: list[str], counts: dict[int, list[int]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    steps, table = np.array(list(counts), np.int64), np.array(list(counts.values()), np.float64).reshape(-1, len(names))
    shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1.0)
    return {name: (steps, shares[:, number]) for number, name in enumerate(names)}


@dataclasses.dataclass(eq=False)
class RunData:
    """All that is known of a run.

    Attributes:
        name: What it is called in the report.
        kind: What it was read from, in words.
        history: What was logged.
        times: What its time was used for; None if not recorded.
        beginnings: What it was each time it was begun or resumed, as its record says it.
        ended: Why it ended; None if that is not known.
        mixture: The shares of the sources that its samples came from; None if they are not a mixture.
        ended_at: When it ended, as a timestamp; None if that is not known.
        media_file: The file with its images and histograms; None if there is none.
    """

    name: str
    kind: str
    history: History
    times: Times | None = None
    beginnings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    ended: str | None = None
    mixture: Mixture | None = None
    ended_at: float | None = None
    media_file: pathlib.Path | None = None

    @functools.cached_property
    def media(self) -> Media:
        """Its images, histograms and first samples."""
        return Media() if self.media_file is None else read_media(self.media_file)

    @functools.cached_property
    def panels(self) -> dict[str, list[Curve]]:
        """The curves of what was logged, by the entry that they are about."""
        if not any(column.single and len(column) for column in self.history.columns().values()):
            return {}
        found = panels(self.history, None, None)
        return {subject: found[subject] for subject in found if self.times is None or subject not in _MEASURED}

    @property
    def skip(self) -> list[list[int]]:
        """The batches that it left out: the first of each range, the first after it, and the step before it."""
        return self.beginnings[-1].get("skip", []) if self.beginnings else []

    @functools.cached_property
    def epoch_ends(self) -> dict[int, int]:
        """The step at which each epoch ended, as far as that was logged."""
        units = self.history.units()
        ends: dict[int, int] = {}
        for step, epoch in zip(units["steps"], units["epochs"], strict=True):
            if epoch:
                ends.setdefault(epoch, step)
        return ends
