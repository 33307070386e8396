"""Keeping the host from running far ahead of the device."""

import collections
from typing import Any

import jax

from millstream.loops._column import IN_FLIGHT
from millstream.loops._logs import Logs


class InFlight:
    """Waits for steps that are too far back, so that never more than two are under way.

    Without it a loop that logs nothing queues steps until the memory for their batches is gone.
    """

    def __init__(self) -> None:
        self._arrays: collections.deque[Any] = collections.deque()

    def add(self, logs: Logs, state: Any) -> None:
        """A step has been dispatched; wait for the one that was dispatched too many before it."""
        array = _of_logs(logs)
        if array is None:
            array = _of_tree(state)
            if array is None:
                return
        arrays = self._arrays
        arrays.append(array)
        if len(arrays) >= IN_FLIGHT:
            oldest = arrays.popleft()
            if not oldest.is_deleted() and not oldest.is_ready():
                oldest.block_until_ready()


def _of_logs(logs: Logs) -> Any:
    for entries in logs.values():
        for value in entries.values():
            if hasattr(value, "is_ready"):  # a JAX array; asking so is five times as fast as isinstance
                return value
    return None


def _of_tree(tree: Any) -> Any:
    """Some array of a tree, found without flattening all of it."""
    if hasattr(tree, "is_ready"):
        return tree
    flattened = jax.tree_util.default_registry.flatten_one_level(tree)
    if flattened is not None:
        for child in flattened[0]:
            array = _of_tree(child)
            if array is not None:
                return array
    return None
