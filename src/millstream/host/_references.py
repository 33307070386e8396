"""Finding out who keeps batches alive."""

from millstream._core.held_batches import describe_holders


def debug_batch_references() -> None:
    """Print which batches are alive, and what holds on to them: variables, lists, a closure, JAX."""
    print(describe_holders())
