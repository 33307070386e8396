"""The managed API of ciclo."""

from typing import TYPE_CHECKING, Any

from millstream.dialects.ciclo._managed_step import ManagedStep as ManagedStep
from millstream.dialects.ciclo._managed_step import step as step
from millstream.dialects.ciclo._managed_step import train_step as train_step
from millstream.managed import DataParallel as DataParallel
from millstream.managed import Eager as Eager
from millstream.managed import Jit as JIT
from millstream.managed import Strategy as Strategy
from millstream.managed import get_strategy as get_strategy
from millstream.managed import register_strategy as register_strategy

if TYPE_CHECKING:
    from millstream.dialects.ciclo._managed_state import ManagedState as ManagedState

__all__ = [
    "JIT",
    "DataParallel",
    "Eager",
    "ManagedState",
    "ManagedStep",
    "Strategy",
    "get_strategy",
    "register_strategy",
    "step",
    "train_step",
]


def __getattr__(name: str) -> Any:
    if name != "ManagedState":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. It has: {', '.join(__all__)}.")
    from millstream.dialects.ciclo._managed_state import ManagedState  # it needs flax

    return ManagedState
