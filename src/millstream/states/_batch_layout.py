"""Where in a batch the inputs of a model are, what it should say, and which rows are real."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_leaf

_INPUTS = ("inputs", "input", "image", "x")
_TARGETS = ("targets", "target", "labels", "label", "y")

Keys = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """A batch, taken apart.

    Attributes:
        inputs: What the model is called with, by position.
        target: What it should say; None if the batch does not have it.
        mask: Which rows are real; None if all are.
        entries: The entries of a batch that is a dict.
    """

    inputs: tuple[PyTree, ...]
    target: PyTree
    mask: jax.Array | None
    entries: Mapping[str, PyTree]

    @property
    def rows(self) -> int:
        """How many rows the batch has, padding included."""
        return jax.tree.leaves(self.inputs)[0].shape[0]

    def weights(self) -> jax.Array:
        """A bool for each row: whether it counts."""
        return jnp.ones(self.rows, bool) if self.mask is None else self.mask


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """Takes batches apart: (inputs, targets), a dict, or one of these with a mask, as a loader gives it.

    Args:
        input_key: Under which key of a dict the inputs are; several keys are several arguments of the model. None: the
            first there is of those that are usual.
        target_key: Likewise for what the model should say.
    """

    input_key: Keys = None
    target_key: Keys = None

    def parts(self, caller: str, batch: PyTree) -> Parts:
        """A batch, taken apart, or an error that says what there is."""
        batch, mask = batch if is_masked(batch) else (batch, None)
        if isinstance(batch, Mapping):
            inputs = _entry(batch, self.input_key, _INPUTS)
            if inputs is None:
                raise ValueError(
                    f"{caller} cannot tell the inputs of the model from the entries of the batch: "
                    f"{', '.join(map(repr, batch))}. It looks for {_words(self.input_key, _INPUTS)}. "
                    "Say which it is when you create the state: input_key=..."
                )
            return _checked(caller, inputs, _entry(batch, self.target_key, _TARGETS), mask, batch)
        if not isinstance(batch, tuple | list):
            return _checked(caller, batch, None, mask, {})
        if len(batch) != 2:
            raise ValueError(
                f"{caller} needs batches that are (inputs, targets), a dict, one array of inputs, or one of these and "
                f"a mask of bools, as a loader gives it. Got a {type(batch).__name__} of {len(batch)}."
            )
        return _checked(caller, batch[0], batch[1], mask, {})


def is_masked(batch: PyTree) -> bool:
    """Whether a batch is (batch, mask), as loaders give it: a pair whose second part is an array of bools."""
    return type(batch) is tuple and len(batch) == 2 and getattr(batch[1], "dtype", None) == jnp.bool_


def _entry(batch: Mapping[str, PyTree], key: Keys, usual: tuple[str, ...]) -> PyTree:
    if isinstance(key, tuple):
        return tuple(batch[one] for one in key) if all(one in batch for one in key) else None
    return next((batch[one] for one in (usual if key is None else (key,)) if one in batch), None)


def _words(key: Keys, usual: tuple[str, ...]) -> str:
    listed = usual if key is None else key if isinstance(key, tuple) else (key,)
    return ", ".join(map(repr, listed))


def _checked(caller: str, inputs: PyTree, target: PyTree, mask: Any, entries: Mapping[str, PyTree]) -> Parts:
    arguments = inputs if type(inputs) is tuple else (inputs,)
    leaves = jax.tree.leaves(arguments)
    if not leaves or not getattr(leaves[0], "shape", ()):
        found = describe_leaf(leaves[0]) if leaves else "no array"
        raise ValueError(f"{caller} needs inputs with one row per sample along their first axis. Got {found}.")
    return Parts(arguments, target, None if mask is None else jnp.asarray(mask), entries)
