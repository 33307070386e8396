"""Reinforcement learning: environments as streams of transitions, and the policy inside their state."""

from millstream._lazy import table_of_contents

__getattr__, __dir__, __all__ = table_of_contents(__name__, __file__)
