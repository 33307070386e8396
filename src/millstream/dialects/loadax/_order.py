"""Seeded orders and draws of items: the same on every host, whatever the version of JAX."""

from typing import Any

import numpy as np

from millstream.plan import order
from millstream.plan.keys import fold, named_key
from millstream.text.errors import require_int


def key_words(who: str, key: Any) -> np.ndarray:
    """The raw words of a seed or of a key of JAX; seed 7 is `jax.random.key(7)`."""
    if isinstance(key, int):
        require_int(who, "key", key, least=0)
        if key >> 64:
            raise ValueError(f"{who} needs a seed of at most 64 bits as its key. Got {key}.")
        return np.array([key >> 32, key & 0xFFFFFFFF], np.uint32)
    from millstream.pipeline import state

    return np.asarray(state.key_words(who, key))


def shuffled(size: int, words: np.ndarray, count: int | None = None) -> np.ndarray:
    """The numbers below `size` in the order of a key, or the first `count` of them."""
    positions = np.arange(size if count is None else count, dtype=np.uint32 if size <= 1 << 31 else np.uint64)
    if not len(positions):
        return positions
    return order.shuffled(np, positions, size, order.epoch_key(np, words, np.uint32(0)))


def drawn(size: int, words: np.ndarray, count: int) -> np.ndarray:
    """Numbers below `size`, each drawn from all of them."""
    low, high = fold(np, named_key(words, "millstream draw with replacement 1"), np.arange(count, dtype=np.uint64))
    return ((high.astype(np.uint64) << np.uint64(32)) | low) % np.uint64(size)
