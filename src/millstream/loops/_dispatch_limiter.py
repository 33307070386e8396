"""Keeping the host from running far ahead of the device."""

from typing import Any

import jax

from millstream.loops.log_entries import Logs


class DispatchLimiter:
    """Waits for steps that are too far back, so that never more than two are in flight.

    Without it a loop that logs nothing queues steps until the memory for their batches is gone.

    Attributes:
        older: An array of the step before the last.
    """

    def __init__(self) -> None:
        self.older: Any = None

    def add(self, array: Any) -> None:
        """Another step is about to be dispatched after that which made this array; wait for the one before that."""
        if array is None:
            return
        older, self.older = self.older, array
        if older is not None and not older.is_deleted() and not older.is_ready():
            older.block_until_ready()


def array_of(logs: Logs, state: Any) -> Any:
    """Some array that a step has made; None if there is none."""
    for entries in logs.values():  # written out: at every step a call less is a microsecond less
        for value in entries.values():
            if hasattr(value, "is_ready"):  # a JAX array; asking so is five times as fast as isinstance
                return value
    return _of_tree(state)


def _of_tree(tree: Any) -> Any:
    """Some array of a tree, found without flattening all of it."""
    if isinstance(tree, dict):  # as many states are; JAX need not be called for them
        children: Any = tree.values()
    elif hasattr(tree, "is_ready"):
        return tree
    else:
        flattened = jax.tree_util.default_registry.flatten_one_level(tree)
        children = () if flattened is None else flattened[0]
    for child in children:
        array = _of_tree(child)
        if array is not None:
            return array
    return None
