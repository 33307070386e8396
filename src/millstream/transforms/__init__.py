"""What happens to samples and batches: one file per idea."""
