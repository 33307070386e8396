"""What loops can be given besides steps: bars, writers, and watchers that stop or measure."""
