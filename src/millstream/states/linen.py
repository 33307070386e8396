"""States for modules of flax.linen."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

import jax
from jax.typing import ArrayLike

from millstream.loops.metrics import Metrics
from millstream.reading.contracts import PyTree
from millstream.states._batch_layout import Keys
from millstream.states._framework import Applied, FrameworkState, ModeArguments, Network, new_framework_state, unique
from millstream.states._managed_state import ManagedOptions, Optimizer
from millstream.states._new_arrays import check_key
from millstream.states.strategies import Strategy
from millstream.text.errors import describe_leaf, describe_value, needs, raised_in

if TYPE_CHECKING:
    import flax.linen as nn

_SOWN = ("losses", "metrics")


class FlaxState(FrameworkState):
    """The state of a flax.linen module. Make one with `create_flax_state`."""

    @property
    def variables(self) -> dict[str, PyTree]:
        """What `module.apply` takes: the parameters and all other collections."""
        return {"params": self.params, **self.model_state}

    @property
    def batch_stats(self) -> PyTree:
        """The statistics of batch normalisation."""
        return self.model_state["batch_stats"]


def create_flax_state(
    module: "nn.Module",
    inputs: PyTree,
    tx: Optimizer,
    *,
    losses: Mapping[str, Callable[..., ArrayLike]] | None = None,
    metrics: Mapping[str, object] | Metrics | None = None,
    strategy: str | Strategy = "jit",
    key: jax.Array | None = None,
    input_key: Keys = None,
    target_key: Keys = None,
    method: str | Callable[..., PyTree] | None = None,
    **options: Unpack[ManagedOptions],
) -> FlaxState:
    """A state for a flax.linen module, with `train_step`, `test_step`, `predict_step` and `reset_step`.

    Example:
        >>> import flax.linen as nn, optax
        >>> state = ms.create_flax_state(
        ...     nn.Dense(3),
        ...     inputs=jnp.empty((1, 4)),
        ...     tx=optax.adam(1e-3),
        ...     losses={"loss": optax.softmax_cross_entropy_with_integer_labels},
        ...     metrics={"accuracy": lambda preds, target: preds.argmax(-1) == target},
        ...     key=jax.random.key(0),
        ... )
        >>> logs, state = state.train_step((np.ones((2, 4), np.float32), np.zeros(2, np.int32)))
        >>> sorted(logs.metrics), sorted(logs.stateful_metrics)
        (['loss'], ['accuracy'])

    Losses and metrics get by name what they ask for: preds (also called logits, predictions), target (targets, labels),
    inputs, mask, sample_weight (the mask as floats) and the entries of a batch that is a dict; losses also params,
    batch_stats and key; metrics also every loss by its name, a value per row, and `loss`, the sum of all. Losses say
    one value per row, or one number.

    What the module sows into its collections "losses" and "metrics" is added. All other collections, such as
    batch_stats, are updated in training and only read in tests. A module is told in which of the two it is by an
    argument called training, train, is_training, deterministic or use_running_average, if it has one. Padding goes
    through the module like other rows.

    Args:
        module: The module.
        inputs: An example of what it is called with, any number of rows; a tuple is several arguments.
        tx: An optimizer, such as those of optax.
        losses: Functions by name; their sum is minimised.
        metrics: What `ms.loops.Metrics` takes, by name, or `ms.loops.Metrics`.
        strategy: How steps run, see `ManagedState.create`.
        key: For the first parameters, and for dropout and anything random, again at each step. By default
            `jax.random.key(0)`.
        input_key: Where in a batch that is a dict the inputs are; a tuple of keys is several arguments. By default the
            first there is of inputs, input, image and x.
        target_key: Likewise for what the model should say: targets, target, labels, label or y.
        method: What of the module to call, if it is not `__call__`.
        **options: Anything else that `ManagedState.create` takes: precision, accumulate, clip_norm, ema and so on.
    """
    caller = "create_flax_state"
    _require_module(caller, module)
    if key is not None:
        check_key(caller, key)
    initial, run = jax.random.split(jax.random.key(0) if key is None else key)
    network = LinenNetwork(module, method)
    with raised_in(f"{caller}, which called the module with inputs={describe_leaf(inputs)} and method={method!r}"):
        variables = dict(network.init(initial, inputs if type(inputs) is tuple else (inputs,)))
    return new_framework_state(
        FlaxState,
        caller,
        tx,
        losses=losses,
        metrics=metrics,
        input_key=input_key,
        target_key=target_key,
        options=options,
        params=variables.pop("params", {}),
        model_state={name: tree for name, tree in variables.items() if name not in (*_SOWN, "intermediates")},
        key=run,
        strategy=strategy,
        network=network,
    )


class LinenNetwork(Network):
    """A linen module and how it is called.

    Args:
        module: The module.
        method: What of it is called; None for the module itself.
    """

    def __init__(self, module: Any, method: str | Callable[..., Any] | None) -> None:
        self.module = module
        self._method = method
        if isinstance(method, str) and not hasattr(type(module), method):
            raise ValueError(f"create_flax_state: {type(module).__name__} has no method {method!r}.")
        if not isinstance(method, str | None) and not callable(method):
            found = describe_value(method)
            raise TypeError(f"create_flax_state needs method to be the name of a method, or a function. Got {found}.")
        called = getattr(module, method) if isinstance(method, str) else module.__call__ if method is None else method
        self._mode = ModeArguments.of(called)

    def init(self, key: jax.Array, inputs: tuple[PyTree, ...]) -> Mapping[str, PyTree]:
        """The variables that the module begins with."""
        init = functools.partial(self.module.init, method=self._method, **self._mode.at(training=True))
        return jax.jit(init)(key, *inputs)

    def apply(
        self, params: PyTree, model_state: PyTree, inputs: tuple[PyTree, ...], *, key: jax.Array | None, training: bool
    ) -> Applied:
        kept = [*model_state] if training else []
        preds, changed = self.module.apply(
            {"params": params, **model_state},
            *inputs,
            rngs=key,  # of all streams: flax makes a stream that is not named from this one
            method=self._method,
            mutable=[*kept, *_SOWN],
            **self._mode.at(training=training),
        )
        losses, metrics = (_named(changed.get(collection, {})) for collection in _SOWN)
        known = {"batch_stats": model_state["batch_stats"]} if "batch_stats" in model_state else {}
        return Applied(preds, {**model_state, **{name: changed[name] for name in kept}}, losses, metrics, known)


def _named(sown: Mapping[str, Any]) -> dict[str, Any]:
    """What was sown, each value by the name it was sown under."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(dict(sown)):
        names = [str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey)]
        found[unique(names[-1], found)] = leaf
    return found


def _require_module(caller: str, module: Any) -> None:
    with needs(caller, "flax", "train"):
        import flax.linen
    if not isinstance(module, flax.linen.Module):
        raise TypeError(
            f"{caller} needs a module of flax.linen. Got {describe_value(module)}. "
            "There are create_nnx_state, create_equinox_state and create_haiku_state for others."
        )
