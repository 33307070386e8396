"""Arrays in a folder, written and read by Orbax under the numbers of their leaves.

Orbax gets plain arrays that are not empty. What it has no notion of, or changes its mind about between versions, is
taken care of here: typed keys, empty arrays, NumPy scalars, arrays that belong to no device in particular.
"""

import asyncio
import concurrent.futures
import fnmatch
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millstream._core.errors import needs
from millstream.checkpoints._leaves import Leaf, is_key


def orbax(who: str) -> Any:
    """The package, or an error that says how to get it."""
    with needs(who, "orbax-checkpoint", "train"):
        import orbax.checkpoint
    return orbax.checkpoint


def _path(folder: pathlib.Path) -> Any:
    from etils import epath  # a part of Orbax's interface

    class Literal(type(epath.Path("/"))):
        """A path whose own characters are no pattern: Orbax lists folders with it, and theirs may have brackets."""

        def glob(self, pattern: str) -> Any:
            return [path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern)]

    return Literal(folder)


def to_store(leaf: Any) -> Any:
    """A leaf as Orbax can store it."""
    if isinstance(leaf, jax.Array):
        leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
        # An array of this process alone is the same in all of them; Orbax refuses it unless it is NumPy's.
        return np.asarray(leaf) if jax.process_count() > 1 and leaf.is_fully_addressable else leaf
    array = np.asarray(leaf)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


class ArrayWriter:
    """Writes arrays into folders, in the background.

    Args:
        who: Who speaks in errors.
    """

    def __init__(self, who: str) -> None:
        self._orbax = orbax(who)
        self._handler = self._orbax.StandardCheckpointHandler()

    def start(self, folder: pathlib.Path, arrays: Mapping[str, Any], copied: Callable[[], object]) -> Any:
        """Copy the arrays and start to write them. It must not be called where an event loop runs.

        Args:
            folder: Where to.
            arrays: Arrays that are not empty, by their names.
            copied: Called as soon as the arrays may be changed or donated. What comes after that here takes its time.
        """
        arguments = self._orbax.args.StandardSave(dict(arrays))

        async def start() -> Any:
            futures = await self._handler.async_save(_path(folder), args=arguments)
            copied()
            return futures

        return asyncio.run(start()) if arrays else None

    def finish(self, started: Any) -> None:
        """Wait until the arrays of this process are written. After an error, too, nothing is written anymore."""
        errors = []
        for future in started or ():
            # Orbax stops waiting at the first error, while other threads go on.
            for part in (*getattr(future, "_futures", ()), future):
                try:
                    part.result()
                except BaseException as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def merge(self, folder: pathlib.Path) -> None:
        """Join what all processes have written; for one of them."""
        self._handler.finalize(_path(folder))


def read(who: str, folder: pathlib.Path, saved: Mapping[str, Leaf], like: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a checkpoint by their paths.

    Args:
        who: Who speaks in errors.
        folder: Where the arrays are.
        saved: The leaves that were saved, in their order.
        like: For each path, a leaf that says where and as what to have it.
    """
    numbered = {str(number): leaf for number, leaf in enumerate(saved.values())}
    targets = {name: _target(leaf, like[leaf.path]) for name, leaf in numbered.items() if leaf.shape is not None}
    stored = {name: target for name, target in targets.items() if numbered[name].is_stored}
    arrays: dict[str, Any] = {}
    if stored:
        ocp = orbax(who)
        handler = ocp.StandardCheckpointHandler()
        arrays = _outside_of_event_loops(lambda: handler.restore(_path(folder), args=ocp.args.StandardRestore(stored)))
    values = {}
    for name, leaf in numbered.items():
        if leaf.shape is None:
            values[leaf.path] = leaf.value
        else:
            array = arrays[name] if leaf.is_stored else _empty(targets[name])
            values[leaf.path] = _as_before(leaf, array, like[leaf.path])
    return values


def _outside_of_event_loops(action: Callable[[], Any]) -> Any:
    """Do something that runs an event loop, in another thread if one runs here already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return action()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result()


def template(leaf: Leaf) -> Any:
    """What to load a leaf as if nobody says: an array of NumPy, or a key on the default device."""
    if leaf.shape is None:
        return None
    if leaf.impl is not None:
        key = jax.eval_shape(lambda: jax.random.key(0, impl=leaf.impl))
        return jax.ShapeDtypeStruct(leaf.shape, key.dtype)
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _target(leaf: Leaf, like: Any) -> Any:
    """What Orbax is asked for: an array on devices if it has to be on certain ones, else one of NumPy."""
    shape, dtype = leaf.shape, like.dtype
    if is_key(like):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(like.shape, like.dtype))
        shape, dtype = data.shape, data.dtype
    sharding = _sharding(like)
    if sharding is not None:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return np.broadcast_to(np.zeros((), dtype), shape or ())


def _sharding(like: Any) -> Any:
    if isinstance(like, jax.Array):
        return like.sharding if like.committed else None
    return getattr(like, "sharding", None)


def _empty(target: Any) -> Any:
    if isinstance(target, np.ndarray):
        return np.empty(target.shape, target.dtype)
    empty = np.empty(target.shape, target.dtype)
    return jax.make_array_from_callback(target.shape, target.sharding, lambda index: empty[index])


def _as_before(leaf: Leaf, array: Any, like: Any) -> Any:
    """A restored array as the kind of leaf that it has to be."""
    if is_key(like):
        impl = jax.random.key_impl(like) if isinstance(like, jax.Array) else leaf.impl
        return jax.random.wrap_key_data(array, impl=impl)
    if isinstance(like, np.generic):
        return array[()]
    if isinstance(array, jax.Array):
        return array
    if isinstance(like, np.ndarray):
        return array if array.flags.writeable else np.array(array)
    return _weak(array) if getattr(like, "weak_type", False) else jnp.asarray(array)


def _weak(array: np.ndarray) -> jax.Array:
    """An array whose dtype gives way to others, as that of a Python number does."""
    default = jnp.full(array.shape, {"f": 0.0, "i": 0, "c": 0j}.get(array.dtype.kind, False))
    return default.at[...].set(array) if default.dtype == array.dtype else jnp.asarray(array)
