"""The ideas everything else is built on: keys, the order, the plan, the pipeline and the contracts.

Modules here are imported one by one. Most need NumPy only, so a worker process can use them without loading JAX; traced
code is in `pipeline`, `stages`, `rows`, `streams`, `state`, `transform` and `policy`, and in what lies between programs
and the host: `placement`, `callbacks` and `read_in_graph`.
"""
