"""Finding out who keeps batches alive."""

from millstream._core.held_batches import describe_holders


def debug_batch_references() -> None:
    """Print which batches are alive, and what holds on to them: variables, lists, a closure, JAX.

    Example:
        >>> source = ms.DiskSampleSource(8, lambda index: {"x": np.float32(index)})
        >>> loader = ms.DataLoader([source, ms.BatchTransform(4)])
        >>> kept = [batch for batch, mask in loader.iterate(loader.init_state(jax.random.key(0)))]
        >>> ms.debug_batch_references()  # doctest: +ELLIPSIS
        2 batches are held:
          batch 0: held by ...
          batch 1: held by ...
    """
    print(describe_holders())
