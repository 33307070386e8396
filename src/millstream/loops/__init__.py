"""Loops: what drives a run, when callbacks are due, what is logged, and what becomes of it."""
