"""A page about a run: what was logged, what the time was used for, and what the run is."""
