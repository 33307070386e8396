"""Arrays in a folder: one file of bytes for each process, and beside it, in JSON, which part of which array is where.

A process writes the parts of arrays that its devices hold, each part once over all processes. They form a grid, so any
other part can be put together from them, on any number of devices.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from io import BufferedReader
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millstream.checkpoints._leaves import SavedLeaf, is_key
from millstream.errors import DamagedCheckpoint
from millstream.files.safe_path import plain_reader
from millstream.reading.dtypes import kept_dtype, named_dtype
from millstream.text.errors import table

_LONGEST = 1 << 30  # bytes of an index


@dataclasses.dataclass(frozen=True)
class ArrayPart:
    """A part of an array that this process writes.

    Attributes:
        number: Of the leaf.
        start: The index of its first element.
        data: A copy on the host.
    """

    number: int
    start: tuple[int, ...]
    data: np.ndarray


def to_store(leaf: Any) -> Any:
    """A leaf as an array of numbers."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
    # An array of this process alone is the same in all of them, and the first one writes it.
    return np.asarray(leaf) if jax.process_count() > 1 and leaf.is_fully_addressable else leaf


def copy_parts(arrays: Mapping[int, Any]) -> list[ArrayPart]:
    """The parts that this process writes, copied, so that the arrays may be changed or donated."""
    parts = []
    for number, array in arrays.items():
        if isinstance(array, jax.Array):
            shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
            for shard in shards:
                if not _is_on_host(shard.data):  # where there is nothing to copy, newer JAX still opens a file for it
                    shard.data.copy_to_host_async()
            parts += [(number, tuple(part.start or 0 for part in shard.index), shard.data) for shard in shards]
        elif jax.process_index() == 0:
            parts.append((number, (0,) * array.ndim, array))
    return [ArrayPart(number, start, _host_copy(data)) for number, start, data in parts]


def _host_copy(data: Any) -> np.ndarray:
    host = np.asarray(data)
    # What comes from another device is a copy already; on this one it may be the array's own memory.
    shared = not isinstance(data, jax.Array) or _is_on_host(data)
    return np.array(host, order="C") if shared else np.ascontiguousarray(host).reshape(host.shape)


def _is_on_host(array: jax.Array) -> bool:
    return {device.platform for device in array.devices()} == {"cpu"}


def write(folder: pathlib.Path, parts: Iterable[ArrayPart]) -> None:
    """Write the parts of this process."""
    process, offset, index = jax.process_index(), 0, []
    with open(folder / f"{process}.bin", "xb", buffering=1 << 20) as file:
        for part in parts:
            file.write(part.data.reshape(-1).view(np.uint8).data)
            index.append([part.number, offset, part.start, part.data.shape])
            offset += part.data.nbytes
    with open(folder / f"{process}.json", "xb") as file:
        file.write(b"[\n" + ",\n".join(map(json.dumps, index)).encode() + b"\n]\n")


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a part of an array is.

    Attributes:
        file: The name of the file.
        offset: Of its first byte there.
        start: The index of its first element in the array.
        stop: The index after its last one, along each axis.
    """

    file: str
    offset: int
    start: tuple[int, ...]
    stop: tuple[int, ...]


class ArrayFiles:
    """The arrays in a folder, of which any part can be read. At most one file is open.

    Args:
        folder: Where they are.
        saved: The leaves that were saved, in their order.

    Raises:
        ValueError: The files do not hold these leaves.
    """

    def __init__(self, folder: pathlib.Path, saved: Iterable[SavedLeaf]) -> None:
        self._folder = folder
        self._open: tuple[str, BufferedReader] | None = None
        self._layouts = {number: _layout(leaf) for number, leaf in enumerate(saved) if leaf.is_stored}
        self._places: dict[int, list[_Place]] = {number: [] for number in self._layouts}
        names = os.listdir(folder) if self._layouts else []
        for name in sorted(name for name in names if name.endswith(".json")):
            self._read_index(name)
        for number, places in self._places.items():
            _require_grid(number, places, self._layouts[number][0])

    def _read_index(self, name: str) -> None:
        with plain_reader(self._folder / name) as file:
            index = json.loads(file.read(_LONGEST))
        data = f"{name.removesuffix('.json')}.bin"
        size, end = os.stat(self._folder / data, follow_symlinks=False).st_size, 0
        for number, offset, start, shape in index:
            stop = tuple(first + length for first, length in zip(start, shape, strict=True))
            if not all(type(value) is int and value >= 0 for value in (offset, *start, *shape)) or offset != end:
                raise ValueError(f"a part of leaf {number} is not where the one before it ends")
            self._places[number].append(_Place(data, offset, tuple(start), stop))
            end += math.prod(shape) * self._layouts[number][1].itemsize
        if end != size:
            raise ValueError(f"the parts in {data} have {end} bytes, and it has {size}")

    def read(self, number: int, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """A part of an array, or all of it."""
        shape, dtype = self._layouts[number]
        index = tuple(slice(0, size) for size in shape) if index is None else index
        bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
        start, stop = tuple(first for first, _, _ in bounds), tuple(last for _, last, _ in bounds)
        out = np.empty([last - first for first, last in zip(start, stop, strict=True)], dtype)
        for place in self._places[number]:
            low = tuple(map(max, start, place.start))
            high = tuple(map(min, stop, place.stop))
            if all(first < last for first, last in zip(low, high, strict=True)):
                rows = self._rows(place, dtype, low[:1], high[:1])
                if rows.shape == out.shape:
                    return rows
                out[_slices(low, high, start)] = rows[_slices(low, high, (*low[:1], *place.start[1:]))]
        return out

    def _rows(self, place: _Place, dtype: np.dtype, low: tuple[int, ...], high: tuple[int, ...]) -> np.ndarray:
        """The rows of a part from `low` to `high`, which lie one after the other; all of it if it has no axes."""
        shape = [last - first for first, last in zip(place.start, place.stop, strict=True)]
        offset = place.offset
        if shape:
            offset += (low[0] - place.start[0]) * math.prod(shape[1:]) * dtype.itemsize
            shape[0] = high[0] - low[0]
        rows = np.empty(shape, dtype)
        file = self._file(place.file)
        file.seek(offset)
        if file.readinto(rows.reshape(-1).view(np.uint8).data) != rows.nbytes:
            raise DamagedCheckpoint(f"{self._folder.name}/{place.file}: ends too early")
        return rows

    def _file(self, name: str) -> BufferedReader:
        if self._open is None or self._open[0] != name:
            self.close()
            self._open = name, plain_reader(self._folder / name)
        return self._open[1]

    def close(self) -> None:
        """Close the file that is open."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


def _slices(low: tuple[int, ...], high: tuple[int, ...], base: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first - zero, last - zero) for first, last, zero in zip(low, high, base, strict=True))


def _layout(leaf: SavedLeaf) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype in which a leaf is stored."""
    assert leaf.shape is not None
    if leaf.impl is None:
        return leaf.shape, named_dtype(leaf.dtype)
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=leaf.impl)))
    return (*leaf.shape, *data.shape), np.dtype(data.dtype)


def _require_grid(number: int, places: list[_Place], shape: tuple[int, ...]) -> None:
    """Refuse parts that overlap or leave gaps: they have to be all cells of a grid."""
    cells = {(place.start, place.stop) for place in places}
    axes = [sorted({(start[axis], stop[axis]) for start, stop in cells}) for axis in range(len(shape))]
    tiled = all(
        [0, *(stop for _, stop in cuts)] == [*(start for start, _ in cuts), size]
        for cuts, size in zip(axes, shape, strict=True)
    )
    if not tiled or len(cells) != len(places) or len(cells) != math.prod(map(len, axes)):
        raise ValueError(f"the parts of leaf {number} do not make an array of shape {shape}")


def read(caller: str, files: ArrayFiles, saved: Iterable[SavedLeaf], like: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a checkpoint by their paths.

    Args:
        caller: The caller's name, for errors.
        files: Where the arrays are.
        saved: The leaves that were saved, in their order.
        like: For each path, a leaf that says where and as what to have it.
    """
    numbered = list(enumerate(saved))
    _require_exact(caller, [leaf for _, leaf in numbered], like)
    try:
        return {
            leaf.path: leaf.value if leaf.shape is None else _read_leaf(files, number, leaf, like[leaf.path])
            for number, leaf in numbered
        }
    finally:
        files.close()


def _require_exact(caller: str, saved: Iterable[SavedLeaf], like: Mapping[str, Any]) -> None:
    """Refuse to make arrays of JAX of what JAX would cut to 32 bits."""
    rows = []
    for leaf in saved:
        as_numpy = leaf.shape is None or isinstance(like[leaf.path], np.ndarray | np.generic) or is_key(like[leaf.path])
        if not as_numpy and (kept := kept_dtype(named_dtype(leaf.dtype))) != named_dtype(leaf.dtype):
            rows.append((f"tree{leaf.path}", f"{leaf.words()}, which JAX would make {kept}"))
    if rows:
        raise ValueError(
            f"{caller} loads arrays as they were saved, and these have more bits than JAX keeps:\n{table(rows)}\n"
            "Give NumPy arrays for them in the tree that says what the result is like, or set "
            "jax.config.update('jax_enable_x64', True)."
        )


def template(leaf: SavedLeaf) -> Any:
    """What to load a leaf as by default: an array of NumPy, or a key on the default device."""
    if leaf.shape is None:
        return None
    if leaf.impl is not None:
        key = jax.eval_shape(lambda: jax.random.key(0, impl=leaf.impl))
        return jax.ShapeDtypeStruct(leaf.shape, key.dtype)
    return np.broadcast_to(np.zeros((), named_dtype(leaf.dtype)), leaf.shape)


def _read_leaf(files: ArrayFiles, number: int, leaf: SavedLeaf, like: Any) -> Any:
    shape, dtype = _layout(leaf)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        return files.read(number, index) if leaf.is_stored else np.empty(shape, dtype)[() if index is None else index]

    sharding = _sharding(like)
    array = part(None) if sharding is None else jax.make_array_from_callback(shape, sharding, part)
    return _as_before(leaf, array, like)


def _sharding(like: Any) -> Any:
    if isinstance(like, jax.Array):
        return like.sharding if like.committed else None
    return getattr(like, "sharding", None)


def _as_before(leaf: SavedLeaf, array: Any, like: Any) -> Any:
    """A restored array as the kind of leaf that it has to be."""
    if is_key(like):
        impl = jax.random.key_impl(like) if isinstance(like, jax.Array) else leaf.impl
        return jax.random.wrap_key_data(array, impl=impl)
    if isinstance(like, np.generic):
        return array[()]
    if isinstance(array, jax.Array) or isinstance(like, np.ndarray):
        return array
    is_weak = getattr(like, "weak_type", isinstance(like, int | float | complex))
    return _weak(array) if is_weak else jnp.asarray(array)


def _weak(array: np.ndarray) -> jax.Array:
    """An array whose dtype gives way to others, as that of a Python number does."""
    default = jnp.full(array.shape, {"f": 0.0, "i": 0, "c": 0j}.get(array.dtype.kind, False))
    return default.at[...].set(array) if default.dtype == array.dtype else jnp.asarray(array)
