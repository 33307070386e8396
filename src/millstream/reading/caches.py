"""Caches of batches, and of arrays made from batches, on disk."""

import dataclasses
import json
import operator
import os
import pathlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from millstream.reading.batch_cache import Mode, OpenCache, open_cache
from millstream.reading.cache_contents import CacheContents, contents_of, read_manifest, require_manifest
from millstream.reading.contracts import PyTree
from millstream.reading.dtypes import dtype_of_array, holds_numbers
from millstream.text.errors import describe_leaf, describe_value, require_choice, require_int, require_path
from millstream.text.summaries import call_text, value_text

_MODES = ("read-write", "read-only", "cache-only")


def flatten(caller: str, tree: Any) -> tuple[Any, dict[str, Any]]:
    """The structure of a tree in JSON, where a star is a leaf, and its leaves by their paths, in JAX's order.

    Example:
        >>> from millstream.reading.caches import flatten
        >>> structure, leaves = flatten("ArrayCache", {"b": [np.ones(2), None], "a": np.zeros(3)})
        >>> structure, list(leaves)
        ({'a': '*', 'b': ['list', '*', None]}, ["['a']", "['b'][0]"])
    """
    leaves: dict[str, Any] = {}
    return _flatten(caller, tree, "", leaves), leaves


def _unflatten(structure: Any, leaves: Iterator[Any]) -> Any:
    """The tree of this structure with these leaves."""
    if structure is None:
        return None
    if structure == "*":
        return next(leaves)
    if isinstance(structure, dict):
        return {key: _unflatten(branch, leaves) for key, branch in structure.items()}
    kind, *branches = structure
    return {"list": list, "tuple": tuple}[kind](_unflatten(branch, leaves) for branch in branches)


def _names_in(structure: Any, count: int) -> list[str]:
    """The paths of the leaves, at most `count`, of a structure that came from a file."""
    leaf = types.SimpleNamespace(shape=(), dtype=np.dtype(bool))
    return list(flatten("", _unflatten(structure, iter([leaf] * count)))[1])


def _flatten(caller: str, tree: Any, name: str, leaves: dict[str, Any]) -> Any:
    if tree is None:
        return None
    if type(tree) is dict and all(type(key) is str for key in tree):
        return {key: _flatten(caller, tree[key], f"{name}[{key!r}]", leaves) for key in sorted(tree)}
    if type(tree) in (list, tuple):
        return [
            type(tree).__name__,
            *(_flatten(caller, branch, f"{name}[{i}]", leaves) for i, branch in enumerate(tree)),
        ]
    dtype = dtype_of_array(tree)
    if dtype is None or not holds_numbers(dtype):
        raise TypeError(
            f"{caller} keeps dicts with words as keys, lists, tuples and None, and in them arrays of numbers or bools. "
            f"Got tree{name}: {describe_leaf(tree)}."
        )
    leaves[name] = tree
    return "*"


@dataclasses.dataclass(frozen=True)
class BatchCache:
    """Keep the batches of a loader on disk: made once, mapped into memory whenever they are wanted again.

    A cache belongs to one data set, spec, order, batch size and key. Used for another, it is refused, and the error
    says what differs. Several processes may fill one cache together, and killing them leaves a good one.

    Example:
        >>> loader = ms.DataLoader(stages, cache=ms.BatchCache("batches"))
        >>> again = ms.DataLoader(stages, cache=ms.BatchCache("batches", mode="cache-only"))

    Args:
        directory: A folder of its own. It is made for this user alone if it is not there.
        mode: "read-write" makes and stores what is missing; a damaged file is replaced, with a warning. "read-only"
            makes what is missing and stores nothing. "cache-only" reads no samples: what is missing is an error.
    """

    directory: str | os.PathLike[str]
    mode: Mode = "read-write"

    def __post_init__(self) -> None:
        require_choice("BatchCache", "mode", self.mode, _MODES)
        _folder("BatchCache", self.directory)

    @property
    def folder(self) -> pathlib.Path:
        """The folder as a path."""
        return _folder("BatchCache", self.directory)

    def __repr__(self) -> str:
        return call_text(self)


class BatchPlace(Protocol):
    """What says which batch is meant, such as its `BatchInfo`."""

    @property
    def epoch(self) -> int:
        """Its epoch."""
        ...

    @property
    def step_in_epoch(self) -> int:
        """Its number in it."""
        ...


class ArrayCache:
    """Keep arrays that you compute from batches, such as the outputs of an encoder.

    Example:
        >>> cache = ms.reading.ArrayCache("latents", of={"encoder": "vit-b, step 10000", "images": "train"})
        >>> for batch, mask, info in loader.iterate(state, steps=6, with_info=True):
        ...     latents = cache.get(info)
        ...     if latents is None:
        ...         latents = jnp.square(batch["x"])
        ...         cache.put(info, latents)

    Args:
        directory: A folder of its own. It is made for this user alone if it is not there.
        spec: What a tree looks like, with anything that has a shape and a dtype as leaves. None takes it from the first
            tree that is put in.
        of: What the arrays are of, in words. A cache with other words is refused.
        mode: "read-write"; or "read-only", which stores nothing; or "cache-only", where what is missing is an error.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        spec: PyTree | None = None,
        *,
        of: Mapping[str, str],
        mode: Mode = "read-write",
    ) -> None:
        require_choice("ArrayCache", "mode", mode, _MODES)
        if not isinstance(of, Mapping) or any(type(word) is not str for pair in of.items() for word in pair):
            raise TypeError(f"ArrayCache needs of to be a mapping of words to words. Got {describe_value(of)}.")
        self._path, self._of = _folder("ArrayCache", directory), dict(of)
        self._mode: Mode = mode
        self._cache: OpenCache | None = None
        self._contents: CacheContents | None = None
        if spec is not None:
            self._open(_flatten_batch(spec, self._of)[0])
        else:
            self._find()

    def get(self, info: BatchPlace | Sequence[int]) -> PyTree | None:
        """The arrays of a batch, read-only; None if they are not there.

        Args:
            info: The batch's info from `iterate(..., with_info=True)`, or its epoch and its number in it.
        """
        epoch, number = _place(info)
        if self._cache is None:
            self._find()
        entry = None if self._cache is None else self._cache.read(epoch, number)
        if entry is None or self._contents is None:
            return None
        return _unflatten(self._contents.structure, iter(entry.leaves))

    def put(self, info: BatchPlace | Sequence[int], tree: PyTree) -> None:
        """Store the arrays of a batch: dicts, lists and tuples of NumPy or JAX arrays. Only "read-write" does.

        Args:
            info: The batch's info from `iterate(..., with_info=True)`, or its epoch and its number in it.
            tree: The arrays, of the same structure, shapes and dtypes every time.
        """
        epoch, number = _place(info)
        if self._mode != "read-write":
            return
        contents, leaves = _flatten_batch(tree, self._of)
        if self._contents is not None:
            contents.require_same("ArrayCache", self._path, json.loads(self._contents.manifest()))
        cache = self._open(contents) if self._cache is None else self._cache
        cache.write(
            epoch, number, [np.asarray(leaf, dtype) for leaf, dtype in zip(leaves, contents.dtypes, strict=True)]
        )

    def _open(self, contents: CacheContents) -> OpenCache:
        self._cache = open_cache("ArrayCache", self._path, self._mode, contents)
        self._contents = contents
        return self._cache

    def _find(self) -> None:
        """Open the cache with the structure it has; one that is yet to be begun gets it from the first tree."""
        if self._mode == "read-write":
            found = read_manifest("ArrayCache", self._path)
        else:
            found = require_manifest("ArrayCache", self._path, self._mode)
        if found is not None:
            contents = contents_of("ArrayCache", self._path, found, _names_in)
            self._open(dataclasses.replace(contents, description=self._of))

    def __repr__(self) -> str:
        return f"ArrayCache({value_text(self._path)}, of={value_text(self._of)})"


def _folder(caller: str, directory: Any) -> pathlib.Path:
    folder = require_path(caller, "directory to be the path of a folder", directory).expanduser()
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{caller} needs directory to be a folder of its own. {folder} is a file.")
    return folder


def _place(info: Any) -> tuple[int, int]:
    """The epoch of a batch and its number in it."""
    try:
        pair = (info.epoch, info.step_in_epoch) if hasattr(info, "step_in_epoch") else tuple(info)
        epoch, number = map(operator.index, pair)
    except (TypeError, ValueError):
        raise TypeError(
            f"ArrayCache needs a batch's info or a pair (epoch, number in the epoch). Got {describe_value(info)}."
        ) from None
    require_int("ArrayCache", "the epoch", epoch, least=0)
    require_int("ArrayCache", "the number of the batch", number, least=0)
    return epoch, number


def _flatten_batch(tree: PyTree, of: Mapping[str, str]) -> tuple[CacheContents, list[Any]]:
    structure, leaves = flatten("ArrayCache", tree)
    if not leaves:
        raise ValueError(f"ArrayCache needs at least one array. Got {describe_value(tree)}.")
    shapes = tuple(tuple(leaf.shape) for leaf in leaves.values())
    dtypes = tuple(np.dtype(leaf.dtype).newbyteorder("=") for leaf in leaves.values())
    return CacheContents(of, tuple(leaves), shapes, dtypes, structure=structure), list(leaves.values())
