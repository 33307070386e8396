"""States for functions transformed by Haiku."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

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
from millstream.states._new_arrays import check_key
from millstream.states.strategies import Strategy
from millstream.text.errors import describe_leaf, describe_value, needs, raised_in

if TYPE_CHECKING:
    import haiku as hk


class HaikuState(FrameworkState):
    """The state of a function transformed by Haiku. Make one with `create_haiku_state`."""


def create_haiku_state(
    transformed: "hk.Transformed | hk.TransformedWithState",
    inputs: PyTree,
    tx: Optimizer,
    *,
    key: jax.Array,
    losses: Mapping[str, Callable[..., ArrayLike]] | None = None,
    metrics: Mapping[str, object] | Metrics | None = None,
    strategy: str | Strategy = "jit",
    input_key: Keys = None,
    target_key: Keys = None,
    **options: Unpack[ManagedOptions],
) -> HaikuState:
    """A state for a function transformed by Haiku, with `train_step`, `test_step`, `predict_step` and `reset_step`.

    Example:
        >>> import haiku as hk, optax
        >>> state = ms.create_haiku_state(
        ...     hk.transform(lambda x: hk.Linear(3)(x)),
        ...     inputs=jnp.empty((1, 4)),
        ...     tx=optax.adam(1e-3),
        ...     key=jax.random.key(0),
        ...     losses={"loss": optax.softmax_cross_entropy_with_integer_labels},
        ... )
        >>> logs, state = state.train_step((np.ones((2, 4), np.float32), np.zeros(2, np.int32)))

    Haiku's state, such as the averages of `hk.BatchNorm`, is updated in training and only read in tests. A function is
    told in which of the two it is by an argument called is_training, training, train or deterministic, if it has one.
    Padding goes through the model like other rows.

    Args:
        transformed: What `hk.transform` or `hk.transform_with_state` returned.
        inputs: An example of what it is called with, any number of rows; a tuple is several arguments.
        tx: An optimizer, such as those of optax.
        key: For the first parameters, and for dropout and anything random, again at each step.
        losses: Functions by name, see `create_flax_state`.
        metrics: What `ms.loops.Metrics` takes, by name, see `create_flax_state`.
        strategy: How steps run, see `ManagedState.create`.
        input_key: See `create_flax_state`.
        target_key: See `create_flax_state`.
        **options: Anything else that `ManagedState.create` takes: precision, accumulate, clip_norm, ema and so on.
    """
    caller = "create_haiku_state"
    network = HaikuNetwork(_haiku(caller), caller, transformed)
    check_key(caller, key)
    initial, run = jax.random.split(key)
    with raised_in(f"{caller}, which called the function with inputs={describe_leaf(inputs)}"):
        params, kept = network.init(initial, inputs if type(inputs) is tuple else (inputs,))
    return new_framework_state(
        HaikuState,
        caller,
        tx,
        losses=losses,
        metrics=metrics,
        input_key=input_key,
        target_key=target_key,
        options=options,
        params=params,
        model_state=kept,
        key=run,
        strategy=strategy,
        network=network,
    )


class HaikuNetwork(Network):
    """A transformed function and how it is called.

    Args:
        haiku: The package.
        caller: The caller's name, for errors.
        transformed: The function.
    """

    def __init__(self, haiku: Any, caller: str, transformed: Any) -> None:
        if not isinstance(transformed, haiku.Transformed | haiku.TransformedWithState):
            raise TypeError(
                f"{caller} needs what hk.transform or hk.transform_with_state returned. "
                f"Got {describe_value(transformed)}. There are create_flax_state, create_nnx_state and "
                "create_equinox_state for others."
            )
        self._transformed = transformed
        self._has_state = isinstance(transformed, haiku.TransformedWithState)
        self._takes_rng = "rng" in parameters_of(transformed.apply)  # not so after hk.without_apply_rng
        self._mode = ModeArguments.of(transformed.apply)

    def init(self, key: jax.Array, inputs: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        """The parameters and the state that the function begins with."""
        made = jax.jit(functools.partial(self._transformed.init, **self._mode.at(training=True)))(key, *inputs)
        return made if self._has_state else (made, {})

    def apply(
        self, params: PyTree, model_state: PyTree, inputs: tuple[PyTree, ...], *, key: jax.Array | None, training: bool
    ) -> Applied:
        before = (params, model_state) if self._has_state else (params,)
        rng = (key,) if self._takes_rng else ()
        output = self._transformed.apply(*before, *rng, *inputs, **self._mode.at(training=training))
        return Applied(*output) if self._has_state else Applied(output, model_state)


def _haiku(caller: str) -> Any:
    with needs(caller, "dm-haiku", "haiku"):
        import haiku
    return haiku
