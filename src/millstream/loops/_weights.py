"""Weights that samples are drawn by, where callbacks change them in a run."""

from typing import Any

import numpy as np

from millstream.loops.callback import Callback


class SampleWeights(Callback):
    """The weights that callbacks have set, which are saved with the run like what any callback remembers.

    Args:
        given: The loader of the loop.

    Attributes:
        given: The same.
        is_new: Whether the next batch comes from a different loader than the last one.
    """

    def __init__(self, given: Any) -> None:
        self.given = self._loader = given
        self.is_new = False
        self._now: np.ndarray | None = None  # the weights that were set; None if none were
        self._before: np.ndarray | None = None  # those in force until then
        self._since = 0  # the step that set them
        self._changes = 0  # how often steps have set some

    def set(self, weights: Any, step: int) -> None:
        """Draw by these weights after a step."""
        self._loader = self.given.drawn_by("set_weights", weights)
        found = np.array(weights, np.float64)
        if not self.is_new:  # of several changes in one step, the earlier ones have given no batch
            self._before, self._changes = self._now, self._changes + 1
        self._now, self._since, self.is_new = found, step, True

    def take(self) -> Any:
        """The loader to draw from now on."""
        self.is_new = False
        return self._loader

    def resume(self, step: int, unfinished: bool) -> Any:
        """The loader of a saved run: that of its last batch, if it was saved in the middle of a step."""
        if self._now is None:
            return self.given
        self._loader = self.given.drawn_by("resume", self._now)
        self.is_new = unfinished and self._since == step
        if not self.is_new:
            return self._loader
        return self.given if self._before is None else self.given.drawn_by("resume", self._before)

    def get_state(self) -> dict[str, Any]:
        if self._now is None:
            return {}
        # In words of 32 bits, which arrays of JAX keep as they are.
        before = np.zeros(0) if self._before is None else self._before
        arrays = {"now": self._now.view(np.uint32), "before": before.view(np.uint32)}
        return {**arrays, "since": self._since, "changes": self._changes}

    def set_state(self, state: dict[str, Any]) -> None:
        if state:
            now, before = (np.array(state[name]).view(np.float64) for name in ("now", "before"))
            self._now, self._before = now, before if before.size else None
            self._since, self._changes = state["since"], state["changes"]
