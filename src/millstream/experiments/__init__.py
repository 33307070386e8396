"""Experiments: a ramp of learning rates, and many runs at once."""
