"""The managed API of ciclo."""

from millstream.states.managed import DataParallel as DataParallel
from millstream.states.managed import Eager as Eager
from millstream.states.managed import Jit as JIT
from millstream.states.managed import ManagedState as ManagedState
from millstream.states.managed import Strategy as Strategy
from millstream.states.managed import get_strategy as get_strategy
from millstream.states.managed import register_strategy as register_strategy
from millstream.states.managed import step as step
from millstream.states.managed import train_step as train_step

__all__ = [
    "JIT",
    "DataParallel",
    "Eager",
    "ManagedState",
    "Strategy",
    "get_strategy",
    "register_strategy",
    "step",
    "train_step",
]
