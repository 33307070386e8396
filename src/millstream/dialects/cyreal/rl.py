"""Reinforcement learning in cyreal."""

from millstream.rl import GymnaxSource as GymnaxSource
from millstream.rl import GymnaxSourceState as GymnaxSourceState
from millstream.rl import set_loader_policy_state as set_loader_policy_state
from millstream.rl import set_source_policy_state as set_source_policy_state
