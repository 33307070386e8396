"""Which samples come when: keys, orders and batches, as functions of (key, step). Imports no JAX."""
