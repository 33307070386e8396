"""Which executor, how many workers, how much prefetch: found out on the user's own data."""

import contextlib
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from millstream.loader._tuning.ladder import present_executor
from millstream.loader._tuning.reason import reason
from millstream.loader._tuning.result import Tuning
from millstream.loader._tuning.search import Search
from millstream.loader._tuning.stages import (
    TimedReading,
    TimedStage,
    time_delivery,
    time_program,
    time_reading,
    unread_batch,
)
from millstream.loader._tuning.trials import SKIPPING, Step
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.state import key_words
from millstream.text.errors import require_callable, require_positive
from millstream.text.progress_line import ProgressLine

if TYPE_CHECKING:
    from millstream.loader.loader import DataLoader

_STAGES = 0.15  # of the time: for the stages, each alone


def tune(loader: "DataLoader", key: Any, seconds: float, step: Step | None, progress: bool) -> Tuning:
    """Measure and advise; see `DataLoader.tune`."""
    _require_tunable(loader, seconds, step)
    words = np.asarray(key_words("tune", jax.random.key(0) if key is None else key))
    line = ProgressLine("tune", shown=progress)
    try:
        with contextlib.ExitStack() as opened:
            line.say("timing the stages")
            timed, reading = _time_stages(loader, words, _STAGES * seconds)
            search = Search(loader, words, seconds * (1 - _STAGES), step, reading, line, opened)
            best = search.run()
    finally:
        line.close()
    tried = search.results()
    present = next((row for row in tried if row.executor == present_executor(loader)), None)
    options = {"executor": best.executor, "prefetch": best.prefetch}
    return Tuning(timed, tried, options, reason(best, present, tried, reading), _others(loader))


def _require_tunable(loader: "DataLoader", seconds: Any, step: Any) -> None:
    require_positive("tune", "seconds", seconds)
    if step is not None:
        require_callable("tune", "step", step)
    loader._built("tune")
    if not isinstance(loader._source, Pipeline):
        raise TypeError(
            f"tune has nothing to choose for {type(loader._source).__name__}: a stream is computed step by step in one "
            "compiled program, without executor and prefetch."
        )
    if loader._mesh_placement is not None and not loader._mesh_placement.is_local:
        raise ValueError(
            "tune ends its turns by the clock, which differs from process to process, and batches over several "
            "processes are made by all of them together. Tune in one process: loader.replace(sharding=None).tune()."
        )


def _time_stages(
    loader: "DataLoader", words: np.ndarray, seconds: float
) -> tuple[list[TimedStage], TimedReading | None]:
    """What the stages cost, and what reading costs if samples are read in this process."""
    if loader._host is None:
        return time_program(loader, words, seconds), None
    if getattr(loader._host.executor, "startup", None) is not None:  # what it prepares is there in workers alone
        return time_delivery(loader, words, unread_batch(loader, words), seconds), None
    try:
        reading, filled = time_reading(loader, words, 0.6 * seconds)
    except Exception as error:
        error.add_note(f"tune was timing the stages. {SKIPPING}")
        raise
    return [*reading.stages(), *time_delivery(loader, words, filled, 0.4 * seconds)], reading


def _others(loader: "DataLoader") -> dict[str, str]:
    """The options that tuning does not choose, as code."""
    _, known = loader._built("tune")
    words = {} if known["on_error"] == "raise" else {"on_error": repr(known["on_error"])}
    return words | {name: name for name in ("cache", "sharding") if known[name] is not None}
