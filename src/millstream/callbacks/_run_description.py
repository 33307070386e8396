"""What a run is, in plain values: versions, machine, state, data, and what is done when."""

import platform
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import millstream
from millstream.loader.loader import DataLoader
from millstream.loader.mixed import MixedLoader
from millstream.loader.train_stream import TrainStream
from millstream.loops.loop_state import LoopState
from millstream.loops.overview import Overview, overview
from millstream.loops.schedules import EpochBegins, EpochEnds

_MOST_ROWS = 200  # of a table of arrays; a larger tree is shown by its branches


def describe_run(loop_state: LoopState, loaders: Mapping[str, Any]) -> dict[str, Any]:
    """A run as its record begins, at the moment it does.

    Args:
        loop_state: Of the loop.
        loaders: Further loaders by their names.
    """
    data = {} if loop_state.dataset is None else {loop_state.name: loop_state.dataset}
    return {
        "loop": loop_state.name,
        "date": time.time(),
        "from_step": loop_state.elapsed.steps,
        "versions": _versions(),
        "state": _table(loop_state.state),
        "loaders": {name: _pipeline(loader) for name, loader in {**data, **loaders}.items()},
        "tasks": [[_when(task.schedule), task.name] for task in loop_state.tasks],
        "stop": None if loop_state.stops is None else repr(loop_state.stops),
    }


def _versions() -> dict[str, str]:
    kinds = [f"{device.platform} ({device.device_kind})" for device in jax.devices()]
    return {
        "millstream": millstream.__version__,
        "JAX": jax.__version__,
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "platform": platform.platform(),
        "devices": ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)),
        "processes": str(jax.process_count()),
    }


def _table(state: Any) -> dict[str, Any]:
    """The arrays of a state, by branches where there are many."""
    shown = _shown(state)
    rows = [
        [row.path, row.arrays, None if row.shape is None else list(row.shape), row.dtype, row.count, row.nbytes]
        for row in shown.rows[:_MOST_ROWS]
    ]
    return {"rows": rows, "arrays": shown.arrays, "count": shown.count, "nbytes": shown.nbytes}


def _shown(state: Any) -> Overview:
    table = overview(state)
    for depth in range(6, 0, -1):
        if len(table.rows) <= _MOST_ROWS:
            break
        table = overview(state, depth=depth)
    return table


def _pipeline(loader: Any) -> dict[str, Any]:
    """The stages of a loader; of other data, what they are."""
    if isinstance(loader, DataLoader | MixedLoader | TrainStream):  # others have an `explain` that says something else
        return loader.explain().as_dict()
    return {"stages": [], "plan": {"data": type(loader).__name__}}


def _when(schedule: Any) -> str:
    if schedule is None:
        return "every step"
    if isinstance(schedule, EpochBegins | EpochEnds):
        return "begin of an epoch" if isinstance(schedule, EpochBegins) else "end of an epoch"
    return repr(schedule)
