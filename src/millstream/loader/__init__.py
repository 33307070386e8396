"""The loader: a pipeline with a state, an iterator and a scan. What it finds out about itself is loaded on demand."""
