"""Metrics of every kind in one form: some arrays, and pure functions of them.

Foreign classes are known by what they can do, so none of their packages is imported.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from millstream.loops._dataset import batch_size
from millstream.loops.named_values import asked_for, named_parameters
from millstream.text.errors import describe_leaf, describe_value, function_name, require_callable

Values = dict[str, Any]  # what a step knows, by name; "mask", if there is one, is a bool array
Arrays = tuple[jax.Array, ...]


class Kind(Protocol):
    """What is done with the arrays of a metric. Static and hashable, so compiled programs are found again by it."""

    def update(self, arrays: Arrays, values: Values) -> Arrays:
        """The arrays after one more batch."""
        ...

    def merge(self, arrays: Arrays, other: Arrays) -> Arrays:
        """The arrays of two parts of the data as one."""
        ...

    def compute(self, arrays: Arrays) -> Any:
        """The value of the metric."""
        ...

    def reset(self, arrays: Arrays) -> Arrays:
        """The arrays before the first batch."""
        ...


class MeanOf(NamedTuple):
    """The mean of what a function says, over all rows that are real.

    Sum and count are each kept as two floats, the second of which holds what the first has lost to rounding. So neither
    stops growing in a long epoch: a count in float32 does at 2**24, and a running mean long before.
    """

    fn: Callable[..., Any]

    def update(self, arrays: Arrays, values: Values) -> Arrays:
        given = _arguments(self.fn, values)
        result = jnp.asarray(self.fn(**given))
        mask = values.get("mask")
        if mask is None:
            rows = result.shape[0] if result.ndim else batch_size(given) if _has_rows(given) else batch_size(values)
            mask = jnp.ones(rows, bool)
        elif result.ndim == 0 and given.get("mask") is None and any(_rowwise(mask, given)):
            raise ValueError(
                f"Metrics got one number from {function_name(self.fn)} for a batch with a mask, so padding would "
                "count. Return one value per row instead of their mean, or take mask as an argument and apply it."
            )
        return (_plus(arrays[0], _sum_and_count(self.fn, result.astype(arrays[0].dtype), mask)),)

    def merge(self, arrays: Arrays, other: Arrays) -> Arrays:
        sums, lost = other[0]
        return (_plus(arrays[0], sums).at[1].add(lost),)

    def compute(self, arrays: Arrays) -> jax.Array:
        sums, lost = arrays[0]
        total, count = jnp.where(jnp.isfinite(lost), sums + lost, sums)
        return total / count

    def reset(self, arrays: Arrays) -> Arrays:
        return (jnp.zeros_like(arrays[0]),)


class Merged(NamedTuple):
    """A metric made of each batch and merged, such as those of clu: from_model_output, merge, compute, empty."""

    kind: Any
    structure: Any

    def update(self, arrays: Arrays, values: Values) -> Arrays:
        takes_mask = any(
            parameter.name == "mask" or parameter.kind == parameter.VAR_KEYWORD
            for parameter in _parameters(self._maker)
        )
        return self._update(arrays, _zero_padding(values)) if takes_mask else _row_by_row(self._update, arrays, values)

    def _update(self, arrays: Arrays, values: Values) -> Arrays:
        return self._with(arrays, self._maker(**_arguments(self._maker, values)))

    @property
    def _maker(self) -> Any:
        """What makes a metric of a batch."""
        return getattr(self.kind, "single_from_model_output", None) or self.kind.from_model_output

    def merge(self, arrays: Arrays, other: Arrays) -> Arrays:
        return self._with(arrays, jax.tree.unflatten(self.structure, other))

    def _with(self, arrays: Arrays, other: Any) -> Arrays:
        return _arrays_of(jax.tree.unflatten(self.structure, arrays).merge(other), self.structure, arrays)

    def compute(self, arrays: Arrays) -> Any:
        return jax.tree.unflatten(self.structure, arrays).compute()

    def reset(self, arrays: Arrays) -> Arrays:
        return _arrays_of(self.kind.empty(), self.structure, arrays)


class Updated(NamedTuple):
    """A metric with update, compute and reset, each of which returns a new one or changes it, as those of nnx do.

    What is changed is always a copy made from arrays, so nobody sees it.
    """

    structure: Any
    heeds_mask: bool

    def update(self, arrays: Arrays, values: Values) -> Arrays:
        if self.heeds_mask:
            return self._update(arrays, _zero_padding(values))
        return _row_by_row(self._update, arrays, values)

    def _update(self, arrays: Arrays, values: Values) -> Arrays:
        metric = jax.tree.unflatten(self.structure, arrays)
        new = metric.update(**_arguments(metric.update, values))
        return _arrays_of(metric if new is None else new, self.structure, arrays)

    def merge(self, arrays: Arrays, other: Arrays) -> Arrays:
        metric, second = (jax.tree.unflatten(self.structure, part) for part in (arrays, other))
        if not hasattr(metric, "merge"):
            raise TypeError(f"Metrics cannot merge a {type(metric).__name__}: it has no merge.")
        new = metric.merge(second)
        return _arrays_of(metric if new is None else new, self.structure, arrays)

    def compute(self, arrays: Arrays) -> Any:
        return jax.tree.unflatten(self.structure, arrays).compute()

    def reset(self, arrays: Arrays) -> Arrays:
        metric = jax.tree.unflatten(self.structure, arrays)
        new = metric.reset()
        return _arrays_of(metric if new is None else new, self.structure, arrays)


def as_kind(name: str, metric: Any) -> tuple[Kind, Arrays]:
    """What a metric is, and the arrays it begins with.

    Args:
        name: What it is called, for errors.
        metric: A function, or an object or class of a foreign kind.
    """
    is_class = isinstance(metric, type)
    kind: Any = metric if is_class else type(metric)
    if hasattr(kind, "merge") and (hasattr(kind, "from_model_output") or hasattr(kind, "single_from_model_output")):
        arrays, structure = _copy_arrays(name, metric.empty() if is_class else metric)
        return Merged(kind, structure), arrays
    if all(hasattr(kind, method) for method in ("update", "compute", "reset")):
        metric = metric() if is_class else metric
        arrays, structure = _copy_arrays(name, metric)
        return Updated(structure, _heeds_mask(metric)), arrays
    if is_class or not callable(metric):
        raise TypeError(
            f"Metrics needs {name} to be a function of named values, a clu.metrics class, or an object with update, "
            f"compute and reset. Got {describe_value(metric)}."
        )
    require_callable("Metrics", name, metric)  # and hashable
    _parameters(metric)
    return MeanOf(metric), (jnp.zeros((2, 2)),)


def _arguments(fn: Any, values: Values) -> Values:
    """Those of the values that a function has arguments for."""
    given, missing = asked_for(f"Metrics: {function_name(fn)}", fn, values)
    if missing:
        raise TypeError(
            f"Metrics.update was not given {', '.join(missing)}, which {function_name(fn)} asks for. "
            f"It was given {', '.join(values) or 'nothing'}."
        )
    return given


def _parameters(fn: Any) -> list[inspect.Parameter]:
    return named_parameters(f"Metrics: {function_name(fn)}", fn)


def _sum_and_count(fn: Any, result: jax.Array, mask: jax.Array) -> jax.Array:
    """What a batch adds to the sum and to the number of rows."""
    count = jnp.sum(mask, dtype=jnp.int32).astype(result.dtype)
    if result.ndim == 0:
        total = jnp.where(count > 0, result * count, 0)
    elif all(_rowwise(mask, result)):
        total = jnp.where(mask, result.reshape(*mask.shape, -1).mean(axis=-1), 0).sum()
    else:
        raise ValueError(
            f"Metrics needs one number or one value per row from {function_name(fn)}. The mask has shape "
            f"{mask.shape}; got {describe_leaf(result)}."
        )
    return jnp.stack([total, count])


def _plus(sums: jax.Array, addend: jax.Array) -> jax.Array:
    """Add to the first of two rows, and what that loses to rounding to the second (Knuth's two-sum)."""
    old, lost = sums
    new = old + addend
    added = new - old
    return jnp.stack([new, lost + ((old - (new - added)) + (addend - added))])


def _has_rows(values: Values) -> bool:
    return any(getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(values))


def _rowwise(mask: jax.Array, values: Any) -> list[bool]:
    """Which leaves have a row for each of the mask."""
    return [getattr(leaf, "shape", ())[: mask.ndim] == mask.shape for leaf in jax.tree.leaves(values)]


def _zero_padding(values: Values) -> Values:
    """Values with zeros in place of padding: who multiplies by a mask would make NaN of a NaN there."""
    mask, rest = values.get("mask"), {name: value for name, value in values.items() if name != "mask"}
    if mask is None:
        return rest

    def blank(leaf: Any) -> Any:
        if not all(_rowwise(mask, leaf)):
            return leaf
        return jnp.where(mask.reshape(*mask.shape, *[1] * (leaf.ndim - mask.ndim)), leaf, jnp.zeros_like(leaf))

    return {**jax.tree.map(blank, rest), "mask": mask}


def _row_by_row(update: Callable[[Arrays, Values], Arrays], arrays: Arrays, values: Values) -> Arrays:
    """One update per row, kept if the row is real: the only way to leave rows out of what knows no mask."""
    mask, values = values.get("mask"), _zero_padding(values)
    if mask is None:
        return update(arrays, values)
    del values["mask"]
    leaves, tree = jax.tree.flatten(values)
    rowwise = _rowwise(mask, leaves)
    if not any(rowwise):
        return _select(mask.any(), update(arrays, values), arrays)
    rows = [leaf for leaf, has_rows in zip(leaves, rowwise, strict=True) if has_rows]
    each = [jnp.reshape(row, (mask.size, 1, *row.shape[mask.ndim :])) for row in rows]

    def step(arrays: Arrays, row: Any) -> tuple[Arrays, None]:
        real, parts = row[0], iter(row[1])
        one = [next(parts) if has_rows else leaf for leaf, has_rows in zip(leaves, rowwise, strict=True)]
        return _select(real, update(arrays, jax.tree.unflatten(tree, one)), arrays), None

    return jax.lax.scan(step, arrays, (mask.ravel(), each))[0]


def _select(first: jax.Array, ours: Arrays, theirs: Arrays) -> Arrays:
    return tuple(jnp.where(first, a, b) for a, b in zip(ours, theirs, strict=True))


def _heeds_mask(metric: Any) -> bool:
    """Whether update knows what a mask is; that of a collection does, if all metrics in it do."""
    held = getattr(metric, "__dict__", {}).values()
    parts = [part for part in held if hasattr(type(part), "update") and hasattr(type(part), "compute")]
    if parts:
        return all(map(_heeds_mask, parts))
    return any(parameter.name == "mask" for parameter in _parameters(metric.update))


def _copy_arrays(name: str, metric: Any) -> tuple[Arrays, Any]:
    """The arrays of a metric, as copies: whoever gave it keeps his own, even if these are donated."""
    leaves, structure = jax.tree.flatten(metric)
    if not leaves or jax.tree_util.all_leaves([metric]):
        raise TypeError(
            f"Metrics needs {name} to hold its numbers in arrays that a compiled step can carry. "
            f"{type(metric).__name__} {'holds none' if not leaves else 'is not a pytree'}; what has to collect values "
            "on the host can be computed from logged outputs."
        )
    return tuple(jnp.array(leaf, jnp.asarray(leaf).dtype) for leaf in leaves), structure


def _arrays_of(metric: Any, structure: Any, before: Arrays) -> Arrays:
    """The arrays of a changed metric, with the dtypes they had, so that programs and scans fit again."""
    leaves, found = jax.tree.flatten(metric)
    if found != structure or any(jnp.shape(leaf) != old.shape for leaf, old in zip(leaves, before, strict=True)):
        raise ValueError(
            f"Metrics needs a {type(metric).__name__} to keep its structure and shapes. It was {structure}, "
            f"{[old.shape for old in before]}, and is {found}, {[jnp.shape(leaf) for leaf in leaves]}."
        )
    return tuple(jnp.asarray(leaf).astype(old.dtype) for leaf, old in zip(leaves, before, strict=True))
