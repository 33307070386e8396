"""The command line: `millstream demo` and `millstream launch`."""
