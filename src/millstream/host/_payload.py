"""What a worker needs to know, once: functions and sources by cloudpickle, through shared memory as their arrays.

It goes from the main process to its own children alone. Nothing is ever unpickled on the way back.
"""

import io
import mmap
import pickle
from typing import Any

import cloudpickle
import numpy as np

from millstream._core.memory import ALIGNMENT, mapped_file
from millstream._core.plain import decode, encode
from millstream.host._shared_memory import SharedFile, map_shared


def pack(value: Any, shared: SharedFile) -> tuple[int, int]:
    """Put a value into a new shared file: its arrays, then all else, whose place is returned.

    Nothing of it goes through the socket: a worker that is slow to start keeps nobody waiting.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    views = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    starts = np.cumsum([0, *(-(-view.nbytes // ALIGNMENT) * ALIGNMENT for view in views)]).tolist()
    places = [(start, view.nbytes) for start, view in zip(starts, views, strict=False)]
    rest = np.frombuffer(encode((stream.getvalue(), places)), np.uint8)
    memory = shared.grow(starts[-1] + rest.nbytes)
    for start, view in zip(starts, [*views, rest], strict=True):
        memory[start : start + view.nbytes] = view
    return starts[-1], rest.nbytes


def unpack(fd: int, start: int, size: int) -> Any:
    """The value again; its arrays are read-only and share the memory of all workers."""
    memory = map_shared(fd, 0, start + size, writable=False)
    data, places = decode(memory[start:].tobytes())
    return pickle.loads(data, buffers=[memory[start : start + size] for start, size in places])


class _Pickler(cloudpickle.Pickler):
    """As cloudpickle's, but memory-mapped arrays travel as the file they come from."""

    def reducer_override(self, obj: Any) -> Any:
        mapped = mapped_file(obj)
        if mapped is not None and obj.flags.c_contiguous and obj.size:
            return _mapped_again, (str(mapped.filename), obj.dtype, obj.shape, _offset_in_file(mapped, obj))
        return super().reducer_override(obj)


def _offset_in_file(mapped: Any, array: np.ndarray) -> int:
    whole = np.frombuffer(mapped._mmap, np.uint8)
    return mapped.offset - mapped.offset % mmap.ALLOCATIONGRANULARITY + array.ctypes.data - whole.ctypes.data


def _mapped_again(path: str, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.memmap:
    return np.memmap(path, dtype, "r", offset, shape)
