"""The soak: random pipelines, executors and faults against an oracle, and trials of single faults."""
