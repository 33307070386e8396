"""Whether a loader keeps its promises, tried on the user's own data."""
