"""Preparing data once for many runs: samples through a function into shards, and reading them."""
