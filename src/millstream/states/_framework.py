"""States that know their model, losses and metrics, whatever framework the model is written in."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from millstream.loops.log_entries import Logs
from millstream.loops.metrics import Metrics
from millstream.loops.named_values import asked_for, named_parameters
from millstream.reading.contracts import PyTree
from millstream.states import _managed_step
from millstream.states._batch_layout import BatchLayout, Keys, Parts
from millstream.states._managed_state import ManagedOptions, ManagedState
from millstream.states._precision import at_least_32_bits
from millstream.text.errors import describe_leaf, describe_value, raised_in, require_callable

_TRAINING = ("training", "train", "is_training")
_TESTING = ("deterministic", "use_running_average", "inference")
Losses = tuple[tuple[str, Any], ...]
_OF_NO_ROWS = frozenset({"params", "batch_stats", "key"})
_MASKS = frozenset({"mask", "sample_weight"})
_STATIC = {"static": True}
_OPTIONS = [
    name
    for name, parameter in inspect.signature(ManagedState.create).parameters.items()
    if parameter.kind == parameter.KEYWORD_ONLY and name not in ("strategy", "key", "apply_fn")
]


class Applied(NamedTuple):
    """What came of applying a model to a batch.

    Attributes:
        preds: What it says.
        model_state: What it keeps besides its parameters, afterwards.
        losses: Losses of its own, by name: numbers, or a value per row.
        metrics: Metrics of its own, likewise.
        known: What else losses may ask for.
    """

    preds: PyTree
    model_state: PyTree
    losses: Mapping[str, Any] = {}
    metrics: Mapping[str, Any] = {}
    known: Mapping[str, Any] = {}


class Network:
    """A model without its arrays; static, and equal only to itself, so it may be made of anything."""

    def apply(
        self, params: PyTree, model_state: PyTree, inputs: tuple[PyTree, ...], *, key: jax.Array | None, training: bool
    ) -> Applied:
        """Apply the model to a batch.

        Args:
            params: Its parameters.
            model_state: What else it keeps.
            inputs: What it is called with, by position.
            key: For whatever is random; None if the state has none.
            training: Whether it is trained, and not tested.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ModeArguments:
    """The arguments that tell a model whether it is trained, found by their names.

    Args:
        training: Those that are True then.
        testing: Those that are False then.
    """

    training: tuple[str, ...]
    testing: tuple[str, ...]

    @classmethod
    def of(cls, fn: Any) -> "ModeArguments":
        """Those of a function or a method."""
        names = parameters_of(fn)
        return cls(tuple(name for name in _TRAINING if name in names), tuple(n for n in _TESTING if n in names))

    def at(self, *, training: bool) -> dict[str, bool]:
        """The arguments for one of the two modes."""
        return dict.fromkeys(self.training, training) | dict.fromkeys(self.testing, not training)


def parameters_of(fn: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a function that have names; none, if it does not tell."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name: parameter for parameter in parameters if parameter.kind in named}


def as_losses(caller: str, losses: Mapping[str, Any] | None) -> Losses:
    """Losses by name, checked."""
    if losses is None:
        return ()
    if not isinstance(losses, Mapping):
        raise TypeError(
            f'{caller} needs losses as a dict of functions by name: losses={{"loss": fn}}. '
            f"Got {describe_value(losses)}."
        )
    for name, fn in losses.items():
        if not isinstance(name, str):
            raise TypeError(f"{caller} needs names of losses to be text. Got {describe_value(name)}.")
        require_callable(caller, f"losses[{name!r}]", fn)
        named_parameters(f"losses[{name!r}]", fn)
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
        caller = f"The loss {name!r}"
        given = _arguments(caller, fn, values)
        try:
            value = jnp.asarray(fn(**given))
        except Exception as error:
            error.add_note(f"Raised in the loss {name!r}, which was given {', '.join(given)}.")
            raise
        if padded and value.ndim == 0 and given.keys() - _OF_NO_ROWS and not given.keys() & _MASKS:
            raise ValueError(
                f"{caller} gave one number for a batch with a mask, so padding would count. Return one value per row "
                "instead of their mean, or take mask or sample_weight as an argument and heed it."
            )
        found[name] = in_rows(caller, value, weights)
    return found


def in_rows(caller: str, value: Any, weights: jax.Array) -> jax.Array:
    """A value for each row, in at least 32 bits; what a row has several of is averaged."""
    value = at_least_32_bits(jnp.asarray(value))
    if value.ndim == 0:
        return jnp.broadcast_to(value, weights.shape)
    if value.shape[: weights.ndim] != weights.shape:
        raise ValueError(
            f"{caller} must give one number, or one value per row. The rows have shape {weights.shape}; "
            f"got {describe_leaf(value)}."
        )
    return jnp.mean(jnp.reshape(value, (*weights.shape, -1)), axis=-1)


def mean_of_rows(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """The mean over the rows that count; 0 if there are none."""
    count = jnp.sum(weights, dtype=jnp.int32)
    return jnp.sum(jnp.where(weights, rows, jnp.zeros_like(rows))) / jnp.maximum(count, 1).astype(rows.dtype)


def _arguments(caller: str, fn: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that a function has arguments for."""
    given, missing = asked_for(caller, fn, values)
    if missing:
        raise ValueError(
            f"{caller} asks for {', '.join(missing)}. There are: {', '.join(values)}. Targets are the second part of a "
            "pair (inputs, targets), or an entry of the batch that target_key=... names when the state is created."
        )
    return given


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FrameworkState(ManagedState):
    """A managed state with steps of its own, made by `create_flax_state` and its like.

    A batch is (inputs, targets), a dict, one array of inputs, or one of these and a mask of bools, as a loader gives
    it: rows that are not real count neither in losses nor in metrics.

    Attributes:
        model_state: What the model keeps besides its parameters, such as the statistics of batch normalisation.
        metrics: Metrics over all batches since `reset_step`.
        network: The model without its arrays.
        losses: What is minimised.
        layout: Where in a batch inputs and targets are.
    """

    model_state: PyTree
    metrics: Metrics
    network: Network = dataclasses.field(metadata=_STATIC)
    losses: Losses = dataclasses.field(metadata=_STATIC)
    layout: BatchLayout = dataclasses.field(metadata=_STATIC)

    @_managed_step.train_step
    def train_step(self, batch: PyTree) -> tuple[Logs, Self]:
        """Minimise the losses on a batch: (logs, state). Losses are logged as metrics, too."""
        parts = self.layout.parts("train_step", batch)
        applied = self._applied(parts, training=True)
        losses, metrics = self._evaluated(parts, applied)
        if not losses:
            raise ValueError(
                f"train_step of a {type(self).__name__} needs something to minimise. Give losses when you create the "
                'state: losses={"loss": fn}.'
            )
        logs = self._logs(losses, metrics, applied, parts).add_losses(losses)
        return logs, self.replace(model_state=as_before(applied.model_state, self.model_state), metrics=metrics)

    @_managed_step.step
    def test_step(self, batch: PyTree) -> tuple[Logs, Self]:
        """Evaluate the losses and metrics on a batch: (logs, state). Nothing but the metrics changes."""
        parts = self.layout.parts("test_step", batch)
        applied = self._applied(parts, training=False)
        losses, metrics = self._evaluated(parts, applied)
        return self._logs(losses, metrics, applied, parts), self.replace(metrics=metrics)

    @_managed_step.step
    def predict_step(self, batch: PyTree) -> Logs:
        """What the model says about a batch, as the output `preds`: (logs, state)."""
        preds = self._applied(self.layout.parts("predict_step", batch), training=False).preds
        named = {_name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(preds)}
        return Logs().add_outputs({f"preds_{name}" if name else "preds": leaf for name, leaf in named.items()})

    def reset_step(self) -> Self:
        """The state with its metrics as before the first batch; loops do this when an epoch or a test begins."""
        return self.replace(metrics=self.strategy.place(self.metrics.reset()))

    def _applied(self, parts: Parts, *, training: bool) -> Applied:
        key = None if self.key is None else jax.random.fold_in(self.step_key(), 0)
        return self.network.apply(self.params, self.model_state, parts.inputs, key=key, training=training)

    def _evaluated(self, parts: Parts, applied: Applied) -> tuple[dict[str, jax.Array], Metrics]:
        """The losses, those of the model too, and the metrics after this batch."""
        weights, values = parts.weights(), _values(parts, applied)
        known = {"mask": weights, "params": self.params, **applied.known}
        if self.key is not None:
            known["key"] = jax.random.fold_in(self.step_key(), 1)
        rows = loss_rows(self.losses, values | known, weights, padded=parts.mask is not None)
        for name, value in applied.losses.items():
            rows[unique(name, rows)] = in_rows(f"The model's own loss {name!r}", value, weights)
        total = {"loss": sum(rows.values())} if rows else {}
        metrics = self.metrics.update(**{**total, **rows, **values, "mask": parts.mask})
        return {name: mean_of_rows(row, weights) for name, row in rows.items()}, metrics

    def _logs(self, losses: dict[str, jax.Array], metrics: Metrics, applied: Applied, parts: Parts) -> Logs:
        stateful, weights = metrics.compute(), parts.weights()
        batch = {name: loss for name, loss in losses.items() if name not in stateful}
        for name, value in applied.metrics.items():
            rows = in_rows(f"The model's own metric {name!r}", value, weights)
            batch[unique(name, batch | stateful)] = mean_of_rows(rows, weights)
        logs = Logs().add_metrics(batch) if batch else Logs()
        return logs.add_stateful_metrics(stateful) if stateful else logs


def new_framework_state(
    kind: type[FrameworkState],
    caller: str,
    tx: Any,
    *,
    losses: Mapping[str, Any] | None,
    metrics: Mapping[str, Any] | Metrics | None,
    input_key: Keys,
    target_key: Keys,
    options: ManagedOptions,
    **fields: Any,
) -> Any:
    """A new state of such a kind, its arguments checked.

    Args:
        kind: The class.
        caller: The caller's name, for errors.
        tx: The optimizer.
        losses: Functions by name.
        metrics: What `ms.loops.Metrics` takes, by name.
        input_key: See `BatchLayout`.
        target_key: See `BatchLayout`.
        options: For `ManagedState.create`.
        **fields: Parameters, key, strategy and the fields that the framework knows.
    """
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise TypeError(f"{caller} knows no argument {', '.join(unknown)}. It passes on: {', '.join(_OPTIONS)}.")
    if metrics is not None and not isinstance(metrics, Mapping | Metrics):
        raise TypeError(
            f'{caller} needs metrics as a dict by name, metrics={{"accuracy": fn}}, or ms.loops.Metrics. '
            f"Got {describe_value(metrics)}."
        )
    for name, key in (("input_key", input_key), ("target_key", target_key)):
        if key is not None and not all(isinstance(one, str) for one in (key if isinstance(key, tuple) else (key,))):
            raise TypeError(
                f"{caller} needs {name} to be a key of the batches, or a tuple of them. Got {describe_value(key)}."
            )
    if isinstance(metrics, Mapping) and not all(isinstance(name, str) for name in metrics):
        raise TypeError(f"{caller} needs metrics with names that are str. Got {describe_value(metrics)}.")
    functions, passed_on = as_losses(caller, losses), dict[str, Any](options)
    with raised_in(caller):
        return kind.create(
            tx=tx,
            losses=functions,
            metrics=metrics if isinstance(metrics, Metrics) else Metrics(**({} if metrics is None else metrics)),
            layout=BatchLayout(input_key, target_key),
            **fields,
            **passed_on,
        )


def as_before(new: PyTree, old: PyTree) -> PyTree:
    """What a model keeps, with the dtypes that it had, so that the next step needs no other program."""
    found, expected = jax.tree.structure(new), jax.tree.structure(old)
    if found != expected:
        raise ValueError(
            "train_step needs a model that keeps in training what it was created with. Besides its parameters it had\n"
            f"  {expected}\nand now has\n  {found}"
        )
    return jax.tree.map(lambda leaf, like: leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype), new, old)


def unique(name: str, taken: Mapping[str, Any]) -> str:
    """The name, with a number after it if it is taken."""
    number, found = 2, name
    while found in taken:
        number, found = number + 1, f"{name}_{number}"
    return found


def _name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="_")


def _values(parts: Parts, applied: Applied) -> dict[str, Any]:
    """What is known of each row, by all names that losses and metrics ask for it by; the batch's own come first."""
    inputs = parts.inputs[0] if len(parts.inputs) == 1 else parts.inputs
    target = {} if parts.target is None else dict.fromkeys(("labels", "target", "targets"), parts.target)
    usual = {"logits": applied.preds, "predictions": applied.preds, **target}
    ours = {"preds": applied.preds, "inputs": inputs, "sample_weight": parts.weights().astype("float32")}
    return {**usual, **parts.entries, **ours, **{name: target[name] for name in ("target", "targets") if target}}
