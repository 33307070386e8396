"""Finding out what keeps batches alive."""

from millstream.reading.held_batches import describe_holders


def debug_batch_references() -> None:
    """Print which batches are alive, and which variable holds each of them, also through lists, dicts and attributes.

    It looks up to twelve levels up, and names local variables of running functions and generators, global variables,
    attributes of classes and what functions close over. It keeps nothing alive itself.

    Example:
        >>> source = ms.DiskSampleSource(8, lambda index: {"x": np.float32(index)})
        >>> loader = ms.DataLoader([source, ms.BatchTransform(4)])
        >>> kept = [batch for batch, mask in loader.iterate(loader.init_state(jax.random.key(0)))]
        >>> ms.debug_batch_references()  # doctest: +ELLIPSIS
        2 batches are held:
          batch 0: item 0 of the list `kept`, a global variable of ...
          batch 1: item 1 of the list `kept`, a global variable of ...
    """
    print(describe_holders())
