"""Host memory: what JAX can use without a copy, and what lies in a mapped file."""

import math
from typing import Any

import numpy as np

ALIGNMENT = 64  # what JAX asks of NumPy memory before it shares it


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array whose first byte is aligned for JAX."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def nbytes(tree: Any) -> int:
    """Bytes of the arrays in a tree, or of those it describes."""
    import jax

    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def mapped_file(array: Any) -> np.memmap | None:
    """The memory-mapped file that an array is a view of, if it is one."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and array.filename is not None:
            return array
        array = array.base
    return None
