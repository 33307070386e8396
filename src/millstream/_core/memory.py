"""Host memory that JAX can use without a copy."""

import math

import numpy as np

ALIGNMENT = 64  # what JAX asks of NumPy memory before it shares it


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array whose first byte is aligned for JAX."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
