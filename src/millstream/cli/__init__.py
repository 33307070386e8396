"""The command line: `millstream demo`, `millstream launch` and `millstream report`."""
