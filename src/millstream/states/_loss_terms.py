"""Losses: functions of named values, averaged over the rows that are real."""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from millstream.states._precision import at_least_32_bits
from millstream.text.errors import describe_leaf, describe_value, require_callable

Losses = tuple[tuple[str, Any], ...]

_OF_NO_ROWS = frozenset({"params", "batch_stats", "key"})
_MASKS = frozenset({"mask", "sample_weight"})


def as_losses(who: str, losses: Mapping[str, Any] | None) -> Losses:
    """Losses by name, checked."""
    if losses is None:
        return ()
    if not isinstance(losses, Mapping):
        raise TypeError(
            f'{who} needs losses as a dict of functions by name: losses={{"loss": fn}}. Got {describe_value(losses)}.'
        )
    for name, fn in losses.items():
        if not isinstance(name, str):
            raise TypeError(f"{who} needs names of losses to be text. Got {describe_value(name)}.")
        require_callable(who, f"losses[{name!r}]", fn)
        _parameters(f"losses[{name!r}]", fn)
    return tuple(losses.items())


def loss_rows(losses: Losses, values: Mapping[str, Any], weights: jax.Array, *, padded: bool) -> dict[str, jax.Array]:
    """What each loss says, for each row: one number for the whole batch is that of every row.

    Args:
        losses: Functions by name.
        values: What they may ask for.
        weights: A bool for each row: whether it counts.
        padded: Whether some rows may be padding.
    """
    found = {}
    for name, fn in losses:
        who = f"The loss {name!r}"
        given = asked_for(who, fn, values)
        try:
            value = jnp.asarray(fn(**given))
        except Exception as error:
            error.add_note(f"Raised in the loss {name!r}, which was given {', '.join(given)}.")
            raise
        if padded and value.ndim == 0 and given.keys() - _OF_NO_ROWS and not given.keys() & _MASKS:
            raise ValueError(
                f"{who} gave one number for a batch with a mask, so padding would count. Return one value per row "
                "instead of their mean, or take mask or sample_weight as an argument and heed it."
            )
        found[name] = in_rows(who, value, weights)
    return found


def in_rows(who: str, value: Any, weights: jax.Array) -> jax.Array:
    """A value for each row, in at least 32 bits; what a row has several of is averaged."""
    value = at_least_32_bits(jnp.asarray(value))
    if value.ndim == 0:
        return jnp.broadcast_to(value, weights.shape)
    if value.shape[: weights.ndim] != weights.shape:
        raise ValueError(
            f"{who} must give one number, or one value per row. The rows have shape {weights.shape}; "
            f"got {describe_leaf(value)}."
        )
    return jnp.mean(jnp.reshape(value, (*weights.shape, -1)), axis=-1)


def mean_of_rows(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """The mean over the rows that count; 0 if there are none."""
    count = jnp.sum(weights, dtype=jnp.int32)
    return jnp.sum(jnp.where(weights, rows, jnp.zeros_like(rows))) / jnp.maximum(count, 1).astype(rows.dtype)


def asked_for(who: str, fn: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that a function has arguments for."""
    parameters = _parameters(who, fn)
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        return dict(values)
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    missing = [name for name in needed if name not in values]
    if missing:
        raise ValueError(
            f"{who} asks for {', '.join(missing)}. There are: {', '.join(values)}. Targets are the second part of a "
            "pair (inputs, targets), or an entry of the batch that target_key=... names when the state is created."
        )
    return {parameter.name: values[parameter.name] for parameter in parameters if parameter.name in values}


def _parameters(who: str, fn: Any) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = None
    if parameters is None or any(parameter.kind == parameter.POSITIONAL_ONLY for parameter in parameters):
        raise TypeError(f"{who} is given values by name, and does not take them so. Wrap it: lambda preds, target: ...")
    return [parameter for parameter in parameters if parameter.kind != parameter.VAR_POSITIONAL]
