"""Reinforcement learning: environments as streams of transitions, and the policy inside their state."""

from millstream.pipeline.policy import get_policy_state as get_policy_state
from millstream.rl._combine import CombinedStream as CombinedStream
from millstream.rl._combine import combine as combine
from millstream.rl._gymnax import GymnaxSource as GymnaxSource
from millstream.rl._gymnax import GymnaxSourceState as GymnaxSourceState
from millstream.rl._policy import set_loader_policy_state as set_loader_policy_state
from millstream.rl._policy import set_source_policy_state as set_source_policy_state

__all__: list[str]
