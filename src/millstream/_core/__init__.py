"""The ideas everything else is built on: keys, the order, the plan, the pipeline and the contracts.

Modules here are imported one by one. `keys`, `order`, `plan`, `sources` and `errors` need NumPy only, so a
worker process can use them without loading JAX; `pipeline`, `streams` and `state` are traced code.
"""
