"""Arrow arrays and NumPy's over the same memory.

What pyarrow has for this loads pandas wherever it is installed: 0.4 s in every worker process.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np


def numbers_of(array: Any) -> np.ndarray:
    """The numbers or bools of an Arrow array without gaps, as an array that nobody can write to."""
    import pyarrow as pa

    count, start, memory = len(array), array.offset, array.buffers()[1]
    is_bits = pa.types.is_boolean(array.type)
    dtype = np.dtype(bool if is_bits else array.type.to_pandas_dtype())
    if not count:
        return np.empty(0, dtype)
    if array.null_count:
        raise pa.ArrowInvalid(f"{array.null_count:,} of {count:,} values of {array.type} are missing")
    needed = -(-(start + count) // 8) if is_bits else (start + count) * dtype.itemsize
    if memory is None or memory.size < needed:
        raise pa.ArrowInvalid(f"{count:,} values of {array.type} need {needed:,} bytes, and there are fewer")
    if is_bits:
        bits = np.frombuffer(memory, np.uint8)[start // 8 : needed]
        found = np.unpackbits(bits, bitorder="little")[start % 8 :][:count].view(bool)
    else:
        found = np.frombuffer(memory, dtype, count, start * dtype.itemsize)
    found.flags.writeable = False
    return found


def array_of(values: np.ndarray) -> Any:
    """Numbers or bools as an Arrow array, which shares the memory of numbers."""
    import pyarrow as pa

    kind = pa.from_numpy_dtype(values.dtype)
    memory = np.packbits(values, bitorder="little") if values.dtype == bool else np.ascontiguousarray(values)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(memory)])


def bytes_array_of(values: Sequence[bytes], ends: np.ndarray, kind: Any) -> Any:
    """Bytes as an Arrow array of `pa.binary()` or `pa.string()`, with what `ends_of` gives for their lengths."""
    import pyarrow as pa

    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))])


def ends_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Where parts with these lengths begin, and where the last one ends, as lists of Arrow have it.

    Raises:
        OverflowError: These lists can have no more than 2,147,483,647 numbers or bytes.
    """
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    if ends[-1] >= 1 << 31:
        raise OverflowError("a list of Arrow holds fewer than 2,147,483,648 numbers or bytes")
    return ends.astype(np.int32)
