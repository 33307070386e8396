"""Where samples are read: the executors, and caches on disk. Importing this room does not load JAX."""
