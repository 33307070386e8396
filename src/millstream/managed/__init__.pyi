"""The managed API: a state that knows how its steps run, and decorators that make steps of plain functions."""

from millstream.states._managed_state import ManagedState as ManagedState
from millstream.states._managed_step import ManagedStep as ManagedStep
from millstream.states._managed_step import step as step
from millstream.states._managed_step import train_step as train_step
from millstream.states._parallel import FSDP as FSDP
from millstream.states._parallel import DataParallel as DataParallel
from millstream.states._precision import LossScale as LossScale
from millstream.states._precision import Precision as Precision
from millstream.states._strategy_names import get_strategy as get_strategy
from millstream.states._strategy_names import register_strategy as register_strategy
from millstream.states.gradients import Accumulate as Accumulate
from millstream.states.strategies import Eager as Eager
from millstream.states.strategies import Jit as Jit
from millstream.states.strategies import Strategy as Strategy

__all__: list[str]
