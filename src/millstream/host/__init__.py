"""Where batches are made: the executors. Importing this room does not load JAX."""

from millstream.host._in_graph import InGraph as InGraph
