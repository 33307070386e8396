"""Steps that leave the state they are given usable, whatever its strategy does with it in training."""

import dataclasses
from collections.abc import Callable
from typing import Any

from millstream._core.contracts import PyTree
from millstream.loops import Logs
from millstream.states._managed_step import ManagedStep


class KeepingStep(ManagedStep):
    """A step that minimises nothing and never donates: a training run is tested in between, and then goes on.

    Args:
        fn: As for `managed.step`.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__("managed.step", fn, lambda who, call, state, batch: call(state, batch))

    def __call__(self, state: Any, batch: PyTree, elapsed: Any = None) -> tuple[Logs, Any]:
        strategy = state.strategy
        if not strategy.donate:
            return super().__call__(state, batch, elapsed)
        keeping = state.replace(strategy=dataclasses.replace(strategy, donate=False))
        logs, new = super().__call__(keeping, batch, elapsed)
        return logs, new.replace(strategy=strategy)
