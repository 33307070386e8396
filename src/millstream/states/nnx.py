"""States for modules of flax.nnx."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

import jax
from jax.typing import ArrayLike

from millstream.loops.metrics import Metrics
from millstream.reading.contracts import PyTree
from millstream.states._batch_layout import Keys
from millstream.states._framework import Applied, FrameworkState, ModeArguments, Network, new_framework_state
from millstream.states._managed_state import ManagedOptions, Optimizer
from millstream.states._new_arrays import FlatLeaves, copied
from millstream.states.strategies import Strategy
from millstream.text.errors import describe_value, needs, raised_in

if TYPE_CHECKING:
    from flax import nnx


class NnxState(FrameworkState):
    """The state of a flax.nnx module. Make one with `create_nnx_state`."""

    def model(self) -> Any:
        """A new nnx module with what the state holds, in the mode it was given in."""
        network: Any = self.network
        params, kept = self.params, self.model_state
        if self.strategy.donate:  # the next step takes over the state's own arrays
            params, kept = jax.tree.map(copied, (params, kept))
        return network.merged("given", params, kept)


def create_nnx_state(
    model: "nnx.Module",
    tx: Optimizer,
    *,
    losses: Mapping[str, Callable[..., ArrayLike]] | None = None,
    metrics: Mapping[str, object] | Metrics | None = None,
    strategy: str | Strategy = "jit",
    key: jax.Array | None = None,
    input_key: Keys = None,
    target_key: Keys = None,
    wrt: object = None,
    **options: Unpack[ManagedOptions],
) -> NnxState:
    """A state for a flax.nnx module, with `train_step`, `test_step`, `predict_step` and `reset_step`.

    Example:
        >>> from flax import nnx
        >>> import optax
        >>> model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        >>> state = ms.create_nnx_state(
        ...     model, optax.adam(1e-3), losses={"loss": optax.softmax_cross_entropy_with_integer_labels}
        ... )
        >>> logs, state = state.train_step((np.ones((2, 4), np.float32), np.zeros(2, np.int32)))
        >>> model = state.model()

    The module is split once, and its arrays are carried as plain dicts, so a step costs what a compiled function of
    arrays does. The module that was given stays as it is; `state.model()` is one with what was learned.

    In training steps the module is in the mode of its `train()`, in others in that of its `eval()`. Its own streams of
    random numbers continue from step to step. All it holds besides parameters is updated in training, and only read in
    tests. Padding goes through the module like other rows.

    Args:
        model: The module.
        tx: An optimizer, such as those of optax.
        losses: Functions by name, see `create_flax_state`.
        metrics: What `ms.loops.Metrics` takes, by name, see `create_flax_state`.
        strategy: How steps run, see `ManagedState.create`.
        key: What losses that ask for a key get one from, again at each step.
        input_key: See `create_flax_state`.
        target_key: See `create_flax_state`.
        wrt: What is trained: a filter of nnx, by default `nnx.Param`.
        **options: Anything else that `ManagedState.create` takes: precision, accumulate, clip_norm, ema and so on.
    """
    caller = "create_nnx_state"
    nnx = _nnx(caller)
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"{caller} needs a module of flax.nnx. Got {describe_value(model)}. "
            "There are create_flax_state, create_equinox_state and create_haiku_state for others."
        )
    with raised_in(f"{caller}, which split the model by wrt={describe_value(wrt)}"):
        network = NnxNetwork(nnx, model, nnx.Param if wrt is None else wrt)
        params, kept = network.arrays(model)
    return new_framework_state(
        NnxState,
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


class NnxNetwork(Network):
    """An nnx module without its arrays, in its modes.

    Args:
        nnx: The package.
        model: The module.
        wrt: Which of its variables are parameters.
    """

    def __init__(self, nnx: Any, model: Any, wrt: Any) -> None:
        self._nnx = nnx
        self._wrt = wrt
        given, params, kept = nnx.split(model, wrt, ...)
        self._params, self._kept = FlatLeaves(params), FlatLeaves(kept)
        self._graphs = {"given": given}
        for mode in ("train", "eval"):
            copy = nnx.clone(model)
            getattr(copy, mode)()
            self._graphs[mode] = nnx.split(copy, wrt, ...)[0]
        self._mode = ModeArguments.of(type(model).__call__)

    def arrays(self, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The parameters of such a module, and all else it holds."""
        _, params, kept = self._nnx.split(model, self._wrt, ...)
        return self._params.flat(params), self._kept.flat(kept)

    def merged(self, mode: str, params: PyTree, kept: PyTree) -> Any:
        """A module of these arrays."""
        return self._nnx.merge(self._graphs[mode], self._params.tree(params), self._kept.tree(kept))

    def apply(
        self, params: PyTree, model_state: PyTree, inputs: tuple[PyTree, ...], *, key: jax.Array | None, training: bool
    ) -> Applied:
        model = self.merged("train" if training else "eval", params, model_state)
        preds = model(*inputs, **self._mode.at(training=training))
        self._nnx.pop(model, self._nnx.Intermediate)
        return Applied(preds, self.arrays(model)[1])


def _nnx(caller: str) -> Any:
    with needs(caller, "flax", "train"):
        from flax import nnx
    return nnx
