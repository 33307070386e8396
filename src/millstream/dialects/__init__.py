"""The earlier libraries, as they are documented: one module for each, over the same engine."""
