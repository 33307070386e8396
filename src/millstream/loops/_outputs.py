"""Outputs: arrays with a row per sample, of which only the real ones are kept."""

from typing import Any

import jax
import numpy as np

from millstream.loops.column import RealRows
from millstream.loops.logs import Logs


def with_real_rows(logs: Logs, mask: np.ndarray | None) -> Logs:
    """Logs whose outputs have only the rows that a mask counts, as far as they have one for each of its rows."""
    if mask is None:
        return logs
    kept = Logs(logs)
    kept["outputs"] = {name: _real_rows(value, mask) for name, value in logs["outputs"].items()}
    return kept


def _real_rows(value: Any, mask: np.ndarray) -> Any:
    if getattr(value, "shape", ())[: mask.ndim] != mask.shape:
        return value
    return RealRows(value, mask) if isinstance(value, jax.Array) else value[mask]
