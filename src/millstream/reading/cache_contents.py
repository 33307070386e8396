"""What a cache is a cache of: written beside its files, and compared before any of them is used."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from millstream.files.safe_path import NotPlainFile, plain_reader
from millstream.reading.dtypes import named_dtype
from millstream.text.errors import differences

MANIFEST = "manifest.json"
_FORMAT = "millstream batches"
_VERSION = 1  # of manifest and files; counts up when either changes
_LONGEST = 16 << 20


@dataclasses.dataclass(frozen=True)
class CacheContents:
    """What the batches of a cache are made of, as far as it decides their bytes.

    Attributes:
        description: Words on where the batches come from: samples, ordering, stages, key, whatever there is to say.
        names: The path of every leaf.
        shapes: The shape of every leaf of a batch.
        dtypes: The dtype of every leaf.
        mask_shape: The shape of a batch's mask.
        structure: The tree that the leaves belong to, in JSON; None if whoever reads them knows it.
    """

    description: Mapping[str, str]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    mask_shape: tuple[int, ...] = ()
    structure: Any = None

    def manifest(self) -> bytes:
        """The manifest, the same bytes for the same contents."""
        return json.dumps(self._facts(), indent=1, sort_keys=True).encode() + b"\n"

    def _facts(self) -> dict[str, Any]:
        leaves = [
            {"name": name, "shape": list(shape), "dtype": dtype.name}
            for name, shape, dtype in zip(self.names, self.shapes, self.dtypes, strict=True)
        ]
        return {
            "format": _FORMAT,
            "format version": _VERSION,
            "byte order": sys.byteorder,
            "description": dict(self.description),
            "leaves": leaves,
            "shape of the mask": list(self.mask_shape),
            "structure": self.structure,
        }

    def require_same(self, caller: str, path: pathlib.Path, found: dict[str, Any]) -> None:
        """Refuse a manifest of other contents, side by side with these."""
        own = json.loads(self.manifest())
        if own == found:
            return
        try:
            here, there = dict(_lines(own)), dict(_lines(found))
        except (AttributeError, KeyError, TypeError):
            raise _no_manifest(caller, path) from None
        names = [name for name in {**there, **here} if here.get(name) != there.get(name)]
        there, here = ({name: _short(values.get(name)) for name in names} for values in (there, here))
        raise ValueError(
            f"{caller}: {path} is a cache of something else. They differ in\n"
            f"{differences(there, here, ('in the cache', 'here'))}\n"
            "Give another folder, or delete this one."
        )


def read_manifest(caller: str, path: pathlib.Path) -> dict[str, Any] | None:
    """The manifest of the cache in a folder; None if there is none."""
    try:
        with plain_reader(path / MANIFEST, follow=True) as file:
            text = file.read(_LONGEST + 1)
        found = json.loads(text) if len(text) <= _LONGEST else None
    except FileNotFoundError:
        return None
    except (NotPlainFile, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise _no_manifest(caller, path)
    return found


def require_manifest(caller: str, path: pathlib.Path, mode: str) -> dict[str, Any]:
    """The manifest of a cache that has to be there."""
    found = read_manifest(caller, path)
    if found is None:
        raise FileNotFoundError(
            f"{caller} with mode={mode!r} needs a cache that is there. {path} has no {MANIFEST}; fill it first, with "
            'mode="read-write".'
        )
    return found


def contents_of(
    caller: str, path: pathlib.Path, found: dict[str, Any], names_in: Callable[[Any, int], list[str]]
) -> CacheContents:
    """The contents that a manifest describes.

    Args:
        caller: The caller's name, for errors.
        path: The folder.
        found: The manifest.
        names_in: The names of the leaves of a structure, if there are as many as the number says.
    """
    try:
        leaves = [(leaf["name"], tuple(leaf["shape"]), named_dtype(leaf["dtype"])) for leaf in found["leaves"]]
        names, shapes, dtypes = zip(*leaves, strict=True)
        if list(names) != names_in(found["structure"], len(names)):
            raise ValueError
        sizes = [size for shape in (*shapes, found["shape of the mask"]) for size in shape]
        if any(type(size) is not int or size < 0 for size in sizes):
            raise ValueError
        return CacheContents(
            found["description"], names, shapes, dtypes, tuple(found["shape of the mask"]), found["structure"]
        )
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        raise _no_manifest(caller, path) from None


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A manifest in words, one line per fact."""
    for name, value in facts.items():
        if name == "description":
            yield from value.items()
        elif name == "leaves":
            yield from ((f"leaf{leaf['name']}", f"shape {tuple(leaf['shape'])}, {leaf['dtype']}") for leaf in value)
        elif value is not None:
            yield name, json.dumps(value)


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _no_manifest(caller: str, path: pathlib.Path) -> ValueError:
    return ValueError(
        f"{caller}: {path / MANIFEST} is damaged, or that of a different kind of cache. "
        "Give another folder, or delete this one."
    )
