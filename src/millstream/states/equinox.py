"""States for modules of Equinox."""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax
from jax.typing import ArrayLike

from millstream.loops.metrics import Metrics
from millstream.reading.contracts import PyTree
from millstream.states._batch_layout import Keys
from millstream.states._framework import (
    Applied,
    FrameworkState,
    ModeArguments,
    Network,
    new_framework_state,
    parameters_of,
)
from millstream.states._managed_state import ManagedOptions, Optimizer
from millstream.states._new_arrays import FlatLeaves, copied
from millstream.states.strategies import Strategy
from millstream.text.errors import describe_value, needs, require_bool


class EquinoxState(FrameworkState):
    """The state of an Equinox module. Make one with `create_equinox_state`."""

    def model(self) -> Any:
        """The module with what the state holds; with its `eqx.nn.State` as a pair, if it has one."""
        network: Any = self.network
        params, kept = self.params, self.model_state
        if self.strategy.donate:  # the next step takes over the state's own arrays
            params, kept = jax.tree.map(copied, (params, kept))
        module, state = network.combined(params, kept, training=True)
        return module if state is None else (module, state)


def create_equinox_state(
    module: Callable[..., PyTree],
    tx: Optimizer,
    *,
    losses: Mapping[str, Callable[..., ArrayLike]] | None = None,
    metrics: Mapping[str, object] | Metrics | None = None,
    strategy: str | Strategy = "jit",
    key: jax.Array | None = None,
    input_key: Keys = None,
    target_key: Keys = None,
    state: PyTree = None,
    vmap: bool = True,
    axis_name: str = "batch",
    **options: Unpack[ManagedOptions],
) -> EquinoxState:
    """A state for an Equinox module, with `train_step`, `test_step`, `predict_step` and `reset_step`.

    Example:
        >>> import equinox as eqx, optax
        >>> module = eqx.nn.Linear(4, 3, key=jax.random.key(0))
        >>> state = ms.create_equinox_state(
        ...     module, optax.adam(1e-3), losses={"loss": optax.softmax_cross_entropy_with_integer_labels}
        ... )
        >>> logs, state = state.train_step((np.ones((2, 4), np.float32), np.zeros(2, np.int32)))
        >>> module = state.model()

    Arrays of floats are trained. In test and predict steps the module is in inference mode
    (`eqx.nn.inference_mode`), in training as it was given. If it takes a `key`, each sample gets its own, again at each
    step. A module with state is called as `module(x, state)` and returns a pair; its state is updated in training.
    Padding goes through the module like other rows.

    Args:
        module: The module.
        tx: An optimizer, such as those of optax.
        losses: Functions by name, see `create_flax_state`.
        metrics: What `ms.loops.Metrics` takes, by name, see `create_flax_state`.
        strategy: How steps run, see `ManagedState.create`.
        key: For dropout and anything random. Required if the module insists on one.
        input_key: See `create_flax_state`.
        target_key: See `create_flax_state`.
        state: The `eqx.nn.State` of a module that has one, from `eqx.nn.make_with_state`.
        vmap: Whether the module takes one sample, as is usual, and not a batch.
        axis_name: What the axis of the batch is called, for `eqx.nn.BatchNorm`.
        **options: Anything else that `ManagedState.create` takes: precision, accumulate, clip_norm, ema and so on.
    """
    caller = "create_equinox_state"
    eqx = _equinox(caller)
    if not isinstance(module, eqx.Module) or not callable(module):
        raise TypeError(
            f"{caller} needs a module of Equinox that can be called. Got {describe_value(module)}. "
            "There are create_flax_state, create_nnx_state and create_haiku_state for others."
        )
    if state is not None and not isinstance(state, eqx.nn.State):
        raise TypeError(
            f"{caller} needs state to be an eqx.nn.State, from eqx.nn.make_with_state. Got {describe_value(state)}."
        )
    require_bool(caller, "vmap", vmap)
    network = EquinoxNetwork(eqx, module, state, axis_name if vmap else None)
    if network.needs_key and key is None:
        raise ValueError(
            f"{caller} needs a key for {type(module).__name__}, which is called with one: key=jax.random.key(0)."
        )
    params, kept = network.arrays(module, state)
    return new_framework_state(
        EquinoxState,
        caller,
        tx,
        losses=losses,
        metrics=metrics,
        input_key=input_key,
        target_key=target_key,
        options=options,
        params=params,
        model_state=kept,
        key=key,
        strategy=strategy,
        network=network,
    )


class EquinoxNetwork(Network):
    """An Equinox module without its arrays, in training and in inference mode.

    Args:
        eqx: The package.
        module: The module.
        state: Its state; None if it has none.
        axis_name: What the axis over samples is called; None if the module takes batches.
    """

    def __init__(self, eqx: Any, module: Any, state: Any, axis_name: str | None) -> None:
        self._eqx = eqx
        self._axis_name = axis_name
        params, rest = eqx.partition(module, eqx.is_inexact_array)
        others, fixed = eqx.partition(rest, eqx.is_array)
        self._params, self._others, self._state = FlatLeaves(params), FlatLeaves(others), FlatLeaves(state)
        self._fixed = {True: fixed, False: eqx.nn.inference_mode(fixed)}
        self._mode = ModeArguments.of(type(module).__call__)
        takes = parameters_of(type(module).__call__).get("key")
        self._takes_key = takes is not None
        self.needs_key = takes is not None and takes.default is takes.empty

    def arrays(self, module: Any, state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The parameters of such a module, and all other arrays, those of its state too."""
        params, rest = self._eqx.partition(module, self._eqx.is_inexact_array)
        others = self._eqx.filter(rest, self._eqx.is_array)
        return self._params.flat(params), {"arrays": self._others.flat(others), "state": self._state.flat(state)}

    def combined(self, params: PyTree, kept: PyTree, *, training: bool) -> tuple[Any, Any]:
        """The module of these arrays, and its state."""
        arrays = self._params.tree(params), self._others.tree(kept["arrays"])
        return self._eqx.combine(*arrays, self._fixed[training]), self._state.tree(kept["state"])

    def apply(
        self, params: PyTree, model_state: PyTree, inputs: tuple[PyTree, ...], *, key: jax.Array | None, training: bool
    ) -> Applied:
        module, state = self.combined(params, model_state, training=training)
        mode, key = self._mode.at(training=training), key if self._takes_key else None

        def call(key: Any, *inputs: PyTree) -> tuple[PyTree, Any]:
            named = mode if key is None else {**mode, "key": key}
            return (module(*inputs, **named), None) if state is None else module(*inputs, state, **named)

        if self._axis_name is not None:
            rows = jax.tree.leaves(inputs)[0].shape[0]
            key = None if key is None else jax.random.split(key, rows)
            call = jax.vmap(call, out_axes=(0, None), axis_name=self._axis_name)
        preds, state = call(key, *inputs)
        return Applied(preds, {**model_state, "state": self._state.flat(state)})


def _equinox(caller: str) -> Any:
    with needs(caller, "equinox", "equinox"):
        import equinox
    return equinox
