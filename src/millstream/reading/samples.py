"""Samples as a source's function returns them: their spec, and writing them into a batch.

Only `spec_of` needs JAX, in the process that builds the source; writing needs NumPy alone.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from millstream.reading.contracts import PyTree
from millstream.reading.dtypes import can_become, check_array, dtype_of_array, holds_numbers, kept_dtype, narrowed
from millstream.text.errors import describe_leaf, describe_value, shortened
from millstream.text.summaries import ArrayType, value_text

TRIED = 8  # samples that are tried before it is said that none can be read
_RELEASED, _SMALL = 500, 32 << 10  # numbers beyond which NumPy releases the GIL; bytes that are copied in 2 us
_CODES = frozenset("?bBhHiIlLqQfd")  # of dtypes whose memory Python's memoryview knows
_CHANGEABLE = (np.ndarray, dict, list, tuple)  # a tuple may hold arrays
_SAME = "Return the same shape and dtype every time."
_PAD = (
    "All samples of a batch need one shape: pad it with PadTransform, or resize it in a HostMapTransform after the "
    "source, or make the batch yourself with BatchTransform(n, collate=fn)."
)
_FILL = "None is not a number. Fill the gap with 0 or NaN, say, where samples are read or in a HostMapTransform."
_FILTER = (
    "None does not leave a sample out. Choose samples with ms.views.select(source, keep), before they are changed."
)


class _OtherStructure(Exception):
    """A tree that is not shaped like its template."""


def _flatten_like(template: Any, tree: Any) -> list[Any]:
    """The leaves of a tree of dicts, lists, tuples and None that is shaped like `template`, in JAX's order."""
    leaves: list[Any] = []
    _collect(template, tree, leaves)
    return leaves


def _collect(template: Any, tree: Any, leaves: list[Any]) -> None:
    kind = type(template)
    if kind is dict:
        if type(tree) is not dict or tree.keys() != template.keys():
            raise _OtherStructure
        for key in sorted(template):
            _collect(template[key], tree[key], leaves)
    elif kind is list or isinstance(template, tuple):
        if type(tree) is not kind or len(tree) != len(template):
            raise _OtherStructure
        for inner, branch in zip(template, tree, strict=True):
            _collect(inner, branch, leaves)
    elif template is None:
        if tree is not None:
            raise _OtherStructure
    else:
        leaves.append(tree)


def _unflatten_like(template: Any, leaves: list[Any]) -> Any:
    """The tree whose leaves these are; the leaves of `template` are their numbers."""
    if isinstance(template, dict):
        return {key: _unflatten_like(branch, leaves) for key, branch in template.items()}
    if isinstance(template, tuple) and hasattr(template, "_fields"):
        return type(template)(*(_unflatten_like(branch, leaves) for branch in template))
    if isinstance(template, list | tuple):
        return type(template)(_unflatten_like(branch, leaves) for branch in template)
    return None if template is None else leaves[template]


def _outline(tree: Any) -> str:
    """A tree in words, with a star for every leaf."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {_outline(branch)}" for key, branch in tree.items()) + "}"
    if isinstance(tree, list | tuple):
        name = "" if type(tree) in (list, tuple) else type(tree).__name__
        inside = ", ".join(map(_outline, tree))
        return f"{name}[{inside}]" if isinstance(tree, list) else f"{name}({inside})"
    return "None" if tree is None else "*"


@dataclasses.dataclass(frozen=True)
class SampleSpec:
    """The structure of a sample: its tree, and name, shape and dtype of every leaf.

    Attributes:
        template: The tree, with the number of a leaf in its place.
        plain: Whether it is made of dicts, lists, tuples and None alone; others need JAX to be taken apart.
        names: The path of each leaf.
        shapes: The shape of each leaf.
        dtypes: The dtype of each leaf in a batch.
        given: The dtype of each leaf in the source, which functions on the host get.
    """

    template: Any
    plain: bool
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    given: tuple[np.dtype, ...] = dataclasses.field(compare=False)

    def __hash__(self) -> int:
        return hash((self.names, self.shapes, self.dtypes))

    def tree(self) -> PyTree:
        """As a pytree of `jax.ShapeDtypeStruct`."""
        import jax

        return self.unflatten([jax.ShapeDtypeStruct(*leaf) for leaf in zip(self.shapes, self.dtypes, strict=True)])

    def unflatten(self, leaves: list[Any]) -> PyTree:
        """The tree with these leaves."""
        if self.plain:
            return _unflatten_like(self.template, leaves)
        import jax

        return jax.tree.map(leaves.__getitem__, self.template)

    def flatten(self, caller: str, tree: PyTree) -> list[Any]:
        """The leaves of a tree, which must have this structure."""
        if self.plain:
            try:
                return _flatten_like(self.template, tree)
            except _OtherStructure:
                found, expected = _outline(tree), _outline(self.template)
        else:
            import jax

            leaves, found = jax.tree.flatten(tree)
            expected = jax.tree.structure(self.template)
            if found == expected:
                return leaves
        raise TypeError(
            f"{caller} does not match the structure of the spec.\n  found: {shortened(found)}\n"
            f"  spec:  {shortened(expected)}\n{_structure_fix(tree, self.template)}"
        )

    def write(self, caller: str, out: Sequence[np.ndarray], row: int, index: int | None, sample: PyTree) -> None:
        """Write a sample into one row of a batch, refusing a different structure, shape or dtype.

        Args:
            caller: The caller's name, for errors.
            out: One array per leaf; or one array of objects, which gets the sample as it is.
            row: Which of their rows to fill.
            index: The sample's number; None if it is not a sample but what a function returned.
            sample: What to write.
        """
        if out[0].dtype.hasobject:
            out[0][row] = sample
            return
        for number, leaf in enumerate(self._leaves(caller, index, sample)):
            shape, dtype, target = self.shapes[number], self.dtypes[number], out[number]
            if isinstance(leaf, np.ma.MaskedArray):
                check_array(f"{_subject(caller, index)}{self.names[number]}", leaf)
            array = _as_array(leaf) if isinstance(leaf, list) else np.asarray(leaf)
            if array.shape == shape and array.dtype == dtype:
                _copy_row(target, row, array)
                continue
            name = self.names[number]
            if array.shape != shape or not can_become(array.dtype, dtype):
                fix = _SAME if array.shape == shape or index is None else _PAD
                raise _other_array(_subject(caller, index), name, array, shape, dtype, fix)
            target[row] = narrowed(f"{_subject(caller, index)}{name}", array, dtype)

    def _leaves(self, caller: str, index: int | None, sample: PyTree) -> list[Any]:
        if type(sample) is dict and len(sample) == len(self.fields):  # the usual case, and the fastest
            try:
                return [sample[key] for key in self.fields]
            except KeyError:
                pass
        return self.flatten(_subject(caller, index), sample)

    def write_rows(self, caller: str, out: Sequence[np.ndarray], rows: PyTree, fix: str = _SAME) -> None:
        """Write the rows of a batch, refusing a different structure, shape or dtype.

        Args:
            caller: The caller's name, for errors.
            out: One array per leaf.
            rows: A tree of arrays with as many rows as those.
            fix: What to do about a different shape or dtype, in errors.
        """
        for name, target, leaf in zip(self.names, out, self.flatten(caller, rows), strict=True):
            check_array(f"{caller}{name}", leaf)
            array = np.asarray(leaf)
            if array.shape != target.shape or not can_become(array.dtype, target.dtype):
                raise _other_array(caller, name, array, target.shape, target.dtype, fix)
            target[...] = narrowed(f"{caller}{name}", array, target.dtype)

    def samples(self, leaves: Sequence[np.ndarray]) -> list[PyTree]:
        """The rows of a batch as samples: views of its arrays, and numbers."""
        rows = zip(*leaves, strict=True)
        match self.fields:  # the usual cases: 0.2 us for a dict that is written out, 0.8 us for one of a zip
            case [key]:
                return [{key: value} for (value,) in rows]
            case [one, two]:
                return [{one: first, two: second} for first, second in rows]
            case [one, two, three]:
                return [{one: first, two: second, three: third} for first, second, third in rows]
        return [self.unflatten(list(row)) for row in rows]

    def empty(self, rows: int, *, given: bool = False) -> list[np.ndarray]:
        """Arrays to write that many samples into, one per leaf, in the dtypes of a batch or in those of the source."""
        dtypes = self.given if given else self.dtypes
        return [np.empty((rows, *shape), dtype) for shape, dtype in zip(self.shapes, dtypes, strict=True)]

    @functools.cached_property
    def fields(self) -> tuple[Any, ...]:
        """The keys of a dict that holds nothing but leaves, in the order of the leaves; otherwise nothing."""
        flat = self.plain and type(self.template) is dict
        if not flat or not all(type(place) is int for place in self.template.values()):
            return ()
        return tuple(sorted(self.template, key=self.template.__getitem__))

    def __str__(self) -> str:
        leaves = list(map(ArrayType, self.shapes, self.dtypes))
        return value_text(self.unflatten(leaves) if self.plain else dict(zip(self.names, leaves, strict=True)))


def _subject(caller: str, index: int | None) -> str:
    return f"{caller}: the result" if index is None else f"{caller}: sample {index}"


def _other_array(
    caller: str, name: str, found: np.ndarray, shape: tuple[int, ...], dtype: np.dtype, fix: str = _SAME
) -> ValueError:
    absent = found.shape == () and found.dtype.hasobject and found.item() is None
    return ValueError(
        f"{caller} does not match the spec.\n  found{name}: {'None' if absent else describe_leaf(found)}\n"
        f"  spec{name}:  shape {shape}, {dtype}\n{_FILL if absent else fix}"
    )


def _structure_fix(found: Any, spec: Any) -> str:
    """What to do about samples that differ in structure."""
    if found is None:
        return _FILTER
    if type(found) is type(spec) is dict:
        if found.keys() != spec.keys():
            return "Return the same keys every time."
        pairs = [(found[key], spec[key]) for key in spec]
        if any((one is None) != (other is None) for one, other in pairs):
            return _FILL
        if any(isinstance(one, list) and isinstance(other, list) and len(one) != len(other) for one, other in pairs):
            return f"A list is a tree of its items; make it an array, as in np.asarray(...). {_PAD}"
    return "Return the same structure every time."


@dataclasses.dataclass(frozen=True)
class ObjectSpec:
    """The spec of samples that are Python objects: they are handed out as lists, and enter no compiled program.

    Attributes:
        found: What about the first sample is not an array.
        refusal: Why they cannot be handed out either; None if they can.
    """

    found: str
    refusal: str | None = None
    shapes: ClassVar[tuple[tuple[int, ...], ...]] = ((),)
    dtypes: ClassVar[tuple[np.dtype, ...]] = (np.dtype(object),)

    def tree(self) -> None:
        """There is none."""

    def write(self, caller: str, out: Sequence[np.ndarray], row: int, index: int | None, sample: Any) -> None:
        """Put a sample into one row of a batch."""
        out[0][row] = sample

    def empty(self, rows: int) -> list[np.ndarray]:
        """An array to put that many samples into."""
        return [np.empty(rows, object)]

    def require_samples(self) -> None:
        """Refuse samples with nothing in them, which no function on the host has filled."""
        if self.refusal is not None:
            raise ValueError(self.refusal)

    def require_host(self, caller: str) -> None:
        """Refuse to continue in a compiled program."""
        raise TypeError(
            f"{caller} is compiled, and these samples are Python objects ({self.found}). Turn them into arrays with a "
            "HostMapTransform after the source, or keep to iterate and BatchTransform."
        )

    def __str__(self) -> str:
        return "Python objects"


class NotAnArray(TypeError):
    """A sample has something in it that is not an array of numbers."""

    def __str__(self) -> str:
        return self.args[0]


class _NothingInIt(ValueError):
    """A sample has neither arrays nor objects in it."""


def own_copy(sample: Any) -> Any:
    """A sample as functions on the host get it: what it is, with containers and arrays that the function may change."""
    kind = type(sample)
    if kind is np.ndarray:
        return sample.copy() if sample.ndim else sample[()]
    if kind is dict:
        return {key: own_copy(value) if isinstance(value, _CHANGEABLE) else value for key, value in sample.items()}
    if kind is list or isinstance(sample, tuple):
        items = [own_copy(value) if isinstance(value, _CHANGEABLE) else value for value in sample]
        return items if kind is list else kind(*items) if hasattr(kind, "_fields") else kind(items)
    return sample


def first_sample(read: Callable[[int], Any], indices: Sequence[int]) -> tuple[int, Any]:
    """The first sample that can be read, of the first few, and its index; if none can be, what the first one raised.

    One broken file need not keep all others from being used, with `on_error="skip item"`.
    """
    try:
        return indices[0], read(indices[0])
    except Exception:
        for index in indices[1:TRIED]:
            with contextlib.suppress(Exception):
                return index, read(index)
        raise


def spec_or_objects(caller: str, sample: Any) -> SampleSpec | ObjectSpec:
    """The spec of a sample, whatever it is."""
    try:
        return spec_of(caller, sample)
    except NotAnArray as error:
        return ObjectSpec(error.args[1])
    except _NothingInIt as error:
        return ObjectSpec(describe_value(sample), str(error))


def spec_of(caller: str, sample: PyTree) -> SampleSpec:
    """The spec of a sample, or of a tree of anything with shape and dtype; dtypes become those JAX will give.

    Example:
        >>> spec = ms.sources.spec_of("Letters", {"letter": np.uint8(0), "count": np.int64(0)})
        >>> spec.names, [str(dtype) for dtype in spec.dtypes]
        (("['count']", "['letter']"), ['int32', 'uint8'])

    Args:
        caller: The caller's name, for errors.
        sample: A sample, or a tree of `jax.ShapeDtypeStruct`.
    """
    import jax

    paths, structure = jax.tree_util.tree_flatten_with_path(sample)
    if not paths:
        fix = f" {_FILTER}" if sample is None else ""
        raise _NothingInIt(f"{caller} needs samples with at least one array. Got {describe_value(sample)}.{fix}")
    names, shapes, given = [], [], []
    for path, leaf in paths:
        names.append(jax.tree_util.keystr(path))
        check_array(f"{caller}: sample{names[-1]}", leaf)
        leaf = _as_array(leaf) if dtype_of_array(leaf) is None else leaf
        if not holds_numbers(np.dtype(leaf.dtype)):
            found = f"sample{names[-1]}: {describe_value(leaf.tolist() if isinstance(leaf, np.ndarray) else leaf)}"
            raise NotAnArray(f"{caller} needs arrays of numbers or bools. Got {found}.", found)
        shapes.append(tuple(leaf.shape))
        given.append(np.dtype(leaf.dtype).newbyteorder("="))
    template, dtypes = structure.unflatten(range(len(paths))), map(kept_dtype, given)
    plain = _is_plain(template, len(paths))
    return SampleSpec(template, plain, tuple(names), tuple(shapes), tuple(dtypes), tuple(given))


def _copy_row(target: np.ndarray, row: int, array: np.ndarray) -> None:
    """Copy an array into a row of the same shape and dtype.

    NumPy releases the GIL for more than 500 numbers. Where several threads read, getting it back takes longer than a
    small copy: with 16 of them, samples of 3 kB came every 21 us, and not every 25, when it was kept.
    """
    if _RELEASED < array.size and array.nbytes <= _SMALL and array.dtype.char in _CODES:
        try:
            target[row].data.cast("B")[:] = array.data.cast("B")
            return
        except TypeError:  # memory that lies apart, or another byte order
            pass
    target[row] = array


def _as_array(leaf: Any) -> np.ndarray:
    """A leaf as an array; an array of objects if it is not a number."""
    try:
        return np.asarray(leaf)
    except Exception:  # a key of JAX, or a list of lists of different lengths
        found = np.empty((), object)
        found[()] = leaf
        return found


def _is_plain(template: PyTree, leaves: int) -> bool:
    try:
        return _flatten_like(template, template) == list(range(leaves))
    except TypeError:  # keys that cannot be sorted
        return False
