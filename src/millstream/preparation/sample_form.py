"""What prepared samples are made of: their leaves as columns, and how a sample is taken apart and put together again.

It loads no JAX: worker processes take samples apart.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_leaf, describe_value, shortened

TEXT, BYTES = "text", "bytes"
_NUMBERS = re.compile(r"\|b1|\|[iu]1|<[iu][248]|<f[248]")
_AXES = 32
_PYTHON = (bool, int, float, list)  # whose dtype is that of the samples before them
_NO_GAPS = "None is not kept. Fill the gap, or have the function return None for the whole sample, which leaves it out."


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of all samples.

    Attributes:
        name: Of its column.
        path: Where it is in a sample, such as "['ids']".
        of: What it holds: "text", "bytes", or the dtype of numbers, such as "<i4".
        axes: How many axes it has; text and bytes have none, a list of them one.
        shape: The shape that it has in all samples; None if that may differ.
    """

    name: str
    path: str
    of: str
    axes: int
    shape: tuple[int, ...] | None = None

    @functools.cached_property
    def is_numbers(self) -> bool:
        """Whether it is a number or an array of numbers or bools."""
        return self.of not in (TEXT, BYTES)

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """Of its numbers."""
        return np.dtype(self.of)

    @property
    def has_length(self) -> bool:
        """Whether `len` of it says something that the form does not."""
        return self.shape is None and (self.axes > 0 or not self.is_numbers)

    def value(self, found: Any) -> Any:
        """What is stored of a leaf of a sample: text, bytes, a list of them, or an array; None for another kind."""
        if self.is_numbers:
            array = self._array(found)
            return array if array is not None and self.shape in (None, array.shape) else None
        kind = str if self.of == TEXT else bytes
        if self.axes:
            return found if type(found) is list and all(isinstance(item, kind) for item in found) else None
        return found if isinstance(found, kind) else None

    def _array(self, found: Any) -> np.ndarray | None:
        if isinstance(found, _PYTHON):
            array = _numbers(found)
            if array is None:
                return None
            if not array.size and isinstance(found, list):
                shape = (*array.shape, *(0,) * self.axes)[: self.axes]
                return np.zeros(shape, self.dtype) if array.ndim <= self.axes else None
            if array.ndim != self.axes or not _becomes(array.dtype, self.dtype):
                return None
            if array.dtype == self.dtype:
                return array
            with np.errstate(all="ignore"):
                converted = array.astype(self.dtype)
            return converted if np.array_equal(converted, array, equal_nan=array.dtype.kind == "f") else None
        array = _numbers(found)
        return array if array is not None and array.dtype == self.dtype and array.ndim == self.axes else None

    def words(self) -> str:
        """What it holds, for people."""
        if not self.is_numbers:
            return f"a list of {self.of}" if self.axes else self.of
        if self.shape is not None:
            return f"shape {self.shape}, {self.dtype}"
        return f"{self.axes} {'axis' if self.axes == 1 else 'axes'}, {self.dtype}" if self.axes else f"{self.dtype}"


def _becomes(found: np.dtype, kept: np.dtype) -> bool:
    """Whether Python's own numbers, as NumPy has them, may become numbers of a dtype if no value changes."""
    return found.kind == kept.kind or (found.kind in "iu" and kept.kind in "iuf")


def _numbers(found: Any) -> np.ndarray | None:
    """A number, a list of them or an array of any library as an array; None if it is anything else."""
    if isinstance(found, np.ma.MaskedArray) or not (isinstance(found, _PYTHON) or hasattr(found, "__array__")):
        return None
    try:
        array = np.asarray(found)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
    except Exception:  # a list of lists of different lengths; a key of JAX
        return None
    return array if _is_kept(array.dtype) else None


@functools.cache
def _is_kept(dtype: np.dtype) -> bool:
    return _NUMBERS.fullmatch(dtype.str) is not None


_Keys = tuple[str | int, ...]


class _Different(Exception):
    """A sample that is not like those before it."""


@dataclasses.dataclass(frozen=True)
class SampleForm:
    """The structure of samples and the kinds of their leaves.

    Attributes:
        structure: In JSON: a star for a leaf, a dict, or a list of the word "tuple" and its items.
        leaves: In the order of the structure.
    """

    structure: Any
    leaves: tuple[Leaf, ...]

    def values(self, caller: str, position: int, sample: PyTree) -> list[Any]:
        """What is stored of a sample, by leaf; refuses one of a different kind."""
        if self._keys is not None and type(sample) is dict and len(sample) == len(self._keys):  # the usual case
            found = [sample.get(key) for key in self._keys]
        else:
            found = self._flattened(caller, position, sample)
        values = []
        for leaf, part in zip(self.leaves, found, strict=True):
            value = leaf.value(part)
            if value is None:
                raise _refused(caller, position, leaf, part)
            values.append(value)
        return values

    def sample(self, values: Iterable[Any]) -> PyTree:
        """The sample with these leaves."""
        if self._keys is not None:
            return dict(zip(self._keys, values, strict=True))
        return _built(self.structure, iter(values))

    @functools.cached_property
    def _keys(self) -> tuple[str, ...] | None:
        """The keys of samples that are dicts of leaves."""
        structure = self.structure
        flat = isinstance(structure, dict) and all(part == "*" for part in structure.values())
        return tuple(structure) if flat else None

    def _flattened(self, caller: str, position: int, sample: PyTree) -> list[Any]:
        try:
            return [part for _, part in _flatten(self.structure, sample)]
        except _Different:
            raise TypeError(
                f"{caller}: sample {position} has a different structure.\n  found:  {describe_value(sample)}\n"
                f"  others: {shortened(self.structure)}\nReturn the same keys for every sample."
            ) from None

    def to_json(self) -> dict[str, Any]:
        """As an index has it."""
        return {"structure": self.structure, "leaves": [dataclasses.asdict(leaf) for leaf in self.leaves]}

    @classmethod
    def from_json(cls, found: Any) -> "SampleForm | None":
        """The form that was written; None if it is none."""
        match found:
            case {"structure": structure, "leaves": list(entries)}:
                leaves = [_leaf_of(entry) for entry in entries]
            case _:
                return None
        known = tuple(leaf for leaf in leaves if leaf is not None)
        try:
            paths = [_path(keys) for keys, _ in _flatten(structure, _built(structure, iter(known)))]
        except (_Different, StopIteration, RecursionError):
            return None
        names = {leaf.name for leaf in known}
        good = len(known) == len(leaves) == len(names) > 0 and paths == [leaf.path for leaf in known]
        return cls(structure, known) if good else None


def _leaf_of(entry: Any) -> Leaf | None:
    match entry:
        case {"name": str(name), "path": str(path), "of": str(of), "axes": int(axes), "shape": shape}:
            pass
        case _:
            return None
    numbers = _NUMBERS.fullmatch(of) is not None
    if not (0 <= axes <= (_AXES if numbers else 1)) or not (numbers or of in (TEXT, BYTES)):
        return None
    if shape is None:
        return Leaf(name, path, of, axes)
    fixed = isinstance(shape, list | tuple) and numbers and len(shape) == axes
    if not fixed or not all(type(size) is int and size >= 0 for size in shape):
        return None
    return Leaf(name, path, of, axes, tuple(shape))


def _refused(caller: str, position: int, leaf: Leaf, found: Any) -> TypeError:
    fix = _NO_GAPS if found is None else "Return the same kind for every sample."
    if leaf.shape is not None and found is not None:
        fix = "Shards of .npy files hold arrays of one shape: pad it, or pass format='arrow'."
    shown = "None" if found is None else describe_leaf(found)
    return TypeError(
        f"{caller}: sample {position} does not match the others.\n  found{leaf.path}:  {shown}\n"
        f"  others{leaf.path}: {leaf.words()}\n{fix}"
    )


def find_form(caller: str, samples: Iterable[tuple[int, PyTree]], *, fixed: bool) -> SampleForm | None:
    """The form of samples, by the first of them; None if there is none.

    Args:
        caller: The caller's name, for errors.
        samples: The samples, each with its number. As many are looked at as it takes to know what empty lists hold.
        fixed: Whether all samples have the shapes of the first.
    """
    structure: Any = None
    known: list[Leaf | None] = []
    places: list[_Keys] = []
    for position, sample in samples:
        if structure is None:
            structure = _structure_of(sample)
            places = [keys for keys, _ in _flatten(structure, sample)]
            known = [None] * len(places)
            _require_names(caller, places)
        try:
            parts = [part for _, part in _flatten(structure, sample)]
        except _Different:
            break  # which is refused by its number when it is stored
        for number, part in enumerate(parts):
            if known[number] is None:
                known[number] = _leaf(caller, position, places[number], part, fixed)
        if None not in known:
            break
    if structure is None:
        return None
    unknown = [_path(keys) for keys, leaf in zip(places, known, strict=True) if leaf is None]
    if unknown:
        raise TypeError(
            f"{caller} cannot tell what sample{unknown[0]} holds: it is an empty list in every sample. Return an array "
            "that says it, such as np.asarray(ids, np.int32)."
        )
    return SampleForm(structure, tuple(leaf for leaf in known if leaf is not None))


def _leaf(caller: str, position: int, keys: _Keys, found: Any, fixed: bool) -> Leaf | None:
    """What a leaf is; None for an empty list, which may hold anything."""
    name, path = _column(keys), _path(keys)
    if isinstance(found, str | bytes):
        return Leaf(name, path, TEXT if isinstance(found, str) else BYTES, 0)
    if type(found) is list and found and isinstance(found[0], str | bytes):
        leaf = Leaf(name, path, TEXT if isinstance(found[0], str) else BYTES, 1)
        if leaf.value(found) is not None:
            return leaf
    array = _numbers(found)
    if array is None:
        fix = _NO_GAPS if found is None else "Turn it into one of these in the function."
        raise TypeError(
            f"{caller} keeps numbers, bools, arrays of them, text, bytes, and lists of these, in dicts and tuples. "
            f"Sample {position} has sample{path}: {describe_leaf(found)}. {fix}"
        )
    if type(found) is list and not array.size:
        return None
    return Leaf(name, path, array.dtype.str, array.ndim, array.shape if fixed else None)


def _structure_of(sample: Any) -> Any:
    if type(sample) is dict and sample and all(type(key) is str for key in sample):
        return {key: _structure_of(part) for key, part in sample.items()}
    if type(sample) is tuple and sample:
        return ["tuple", *map(_structure_of, sample)]
    return "*"


def _flatten(structure: Any, sample: Any, keys: _Keys = ()) -> Iterator[tuple[_Keys, Any]]:
    """The leaves of a sample of this structure, each with the keys that lead to it."""
    match structure:
        case "*":
            yield keys, sample
        case dict() if type(sample) is dict and sample.keys() == structure.keys():
            for key, part in structure.items():
                yield from _flatten(part, sample[key], (*keys, key))
        case ["tuple", *parts] if type(sample) is tuple and len(sample) == len(parts):
            for number, (part, item) in enumerate(zip(parts, sample, strict=True)):
                yield from _flatten(part, item, (*keys, number))
        case _:
            raise _Different


def _built(structure: Any, leaves: Iterator[Any]) -> Any:
    match structure:
        case "*":
            return next(leaves)
        case dict():
            return {key: _built(part, leaves) for key, part in structure.items()}
        case ["tuple", *parts]:
            return tuple([_built(part, leaves) for part in parts])
        case _:
            raise _Different


def _path(keys: _Keys) -> str:
    return "".join(f"[{key!r}]" for key in keys)


def _column(keys: _Keys) -> str:
    """The name of a column: the keys that lead to it, or "value" if samples are nothing but this leaf."""
    return ".".join(map(str, keys)) if keys else "value"


def _require_names(caller: str, places: list[_Keys]) -> None:
    names = [_column(keys) for keys in places]
    wrong = sorted({name for name in names if names.count(name) > 1 or not name})
    if wrong:
        raise ValueError(f"{caller} needs a name of its own for every leaf. {wrong[0]!r} is not one; rename the keys.")
