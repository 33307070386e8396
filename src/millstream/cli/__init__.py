"""The command line: `millstream demo`."""
