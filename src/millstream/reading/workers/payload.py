"""What a worker needs to know, once: functions and sources by cloudpickle, through shared memory as their arrays.

It goes from the main process to its own children alone. Nothing is ever unpickled on the way back.
"""

import contextlib
import functools
import inspect
import io
import mmap
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle
import numpy as np

from millstream.files.plain import decode, encode
from millstream.reading.derived_sources import named_parts
from millstream.reading.host_source import HostSource
from millstream.reading.memory import ALIGNMENT, mapped_file
from millstream.reading.workers.shared_memory import SharedFile, map_private
from millstream.text.errors import describe_value

_DEPTH = 8  # how deep the variable is looked for that cannot be pickled


def pack(value: Any, shared: SharedFile) -> tuple[int, int]:
    """Put a value into a new shared file: its arrays, then all else, whose place is returned.

    Nothing of it goes through the socket: a worker that is slow to start keeps nobody waiting.
    """
    data, views = pickled(value)
    starts = np.cumsum([0, *(-(-view.nbytes // ALIGNMENT) * ALIGNMENT for view in views)]).tolist()
    places = [(start, view.nbytes, view.flags.writeable) for start, view in zip(starts, views, strict=False)]
    rest = np.frombuffer(encode((data, places)), np.uint8)
    memory = shared.grow(starts[-1] + rest.nbytes)
    for start, view in zip(starts, [*views, rest], strict=True):
        memory[start : start + view.nbytes] = view
    return starts[-1], rest.nbytes


def unpack(fd: int, start: int, size: int) -> Any:
    """The value again. Its arrays share the memory of all workers, until one writes into a page, which it then has."""
    memory = map_private(fd, start + size)
    data, places = decode(memory[start:].tobytes())
    views = []
    for start, size, writable in places:
        views.append(memory[start : start + size])
        if not writable:
            views[-1].flags.writeable = False
    return pickle.loads(data, buffers=views)


def pickled(value: Any) -> tuple[bytes, list[np.ndarray]]:
    """A value as bytes, and the memory of its arrays, which is not copied."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return stream.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]


@contextlib.contextmanager
def pickling(caller: str, source: HostSource, startup: Any) -> Iterator[None]:
    """A block that sends a source to workers; its error names the part that cannot be sent.

    Args:
        caller: The name of the executor, for errors.
        source: The source.
        startup: What workers call first.
    """
    try:
        yield
    except OSError:  # no room
        raise
    except Exception as error:
        text = _explain_unpicklable(caller, {**dict(named_parts(source)), "startup": startup})
        if text is None:
            raise
        raise TypeError(text) from error


def _explain_unpicklable(caller: str, parts: Mapping[str, Any]) -> str | None:
    """Which of these parts an executor cannot send to a worker, and what to do; None if it can send all."""
    for name, part in parts.items():
        error = _failure(part)
        if error is not None:
            where, held, error = _innermost(part, error)
            variable = f": {where} ({describe_value(held)})" if where else ""
            return (
                f"{caller} sends {name} to worker processes, and it cannot be pickled{variable}: {error}. Open such a "
                f"thing inside the function when it is first needed, or in {caller}(startup=...); or use Threads, "
                "which share it."
            )
    return None


def _innermost(value: Any, error: Exception) -> tuple[str, Any, Exception]:
    """The variable that keeps a value from being pickled: its path, what it holds, and the error."""
    path = []
    for _ in range(_DEPTH):
        found = ((name, held, _failure(held)) for name, held in _variables(value).items())
        deeper = next((entry for entry in found if entry[2] is not None), None)
        if deeper is None:
            break
        name, value, error = deeper[0], deeper[1], deeper[2] or error
        path.append(name)
    return ", ".join(path), value, error


def _variables(value: Any) -> dict[str, Any]:
    """What a value is made of, by name."""
    if isinstance(value, functools.partial):
        return {
            "function": value.func,
            **{f"argument {i}": held for i, held in enumerate(value.args)},
            **value.keywords,
        }
    if inspect.ismethod(value):
        return {"self": value.__self__, "function": value.__func__}
    if inspect.isfunction(value):
        variables = inspect.getclosurevars(value)
        named = {**variables.nonlocals, **variables.globals}
        return {f"its variable {name!r}": held for name, held in named.items() if not inspect.ismodule(held)}
    if isinstance(value, dict):
        return {f"[{key!r}]": held for key, held in value.items()}
    if isinstance(value, list | tuple):
        return {f"[{number}]": held for number, held in enumerate(value)}
    return {name.lstrip("_"): held for name, held in getattr(value, "__dict__", {}).items()}


def _failure(value: Any) -> Exception | None:
    try:
        pickled(value)
    except Exception as error:
        return error
    return None


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
