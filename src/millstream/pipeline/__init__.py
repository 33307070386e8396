"""What happens to samples, as pure functions that JAX can trace: stages, the pipeline, streams and their states."""
