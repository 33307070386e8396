"""The state of the managed API."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from millstream.managed import Strategy, get_strategy
from millstream.pipeline.state import strong
from millstream.reading.contracts import PyTree
from millstream.text.errors import needs

with needs("ciclo.managed.ManagedState", "flax", "train"):
    import flax.struct
    import optax
    from flax.training.train_state import TrainState


def _no_apply_fn(*args: Any, **kwargs: Any) -> Any:
    raise TypeError(
        "state.apply_fn is what ManagedState.create was given, and it was given none: apply_fn=model.apply."
    )


class ManagedState(TrainState):
    """A `TrainState` of flax that knows how its steps run. Subclasses have fields of their own, of any name.

    A field that is not an array is `flax.struct.field(pytree_node=False)`. `create` takes all of them by name.

    Attributes:
        strategy: How steps run.
    """

    strategy: Strategy = flax.struct.field(pytree_node=False)

    @classmethod
    def create(  # pyright: ignore[reportIncompatibleMethodOverride]  # the function is not needed here
        cls,
        *,
        params: PyTree,
        tx: Any,
        apply_fn: Callable[..., Any] = _no_apply_fn,
        strategy: str | Strategy = "jit",
        **fields: Any,
    ) -> Self:
        """A new state, at step 0.

        Args:
            params: Parameters, any pytree of floats.
            tx: An optimizer of optax.
            apply_fn: Whatever the model is applied with; steps find it in `state.apply_fn`.
            strategy: "eager", "jit", "jit_donate", "data_parallel", "data_parallel_donate", or a `Strategy`.
            **fields: The fields of a subclass.
        """
        run = get_strategy(strategy)
        state = cls(step=0, apply_fn=apply_fn, params=params, tx=tx, opt_state=tx.init(params), strategy=run, **fields)
        return _placed(jax.tree.map(strong, state))

    def apply_gradients(self, *, grads: PyTree, **kwargs: Any) -> Self:
        """The state after one update by the optimizer. A `train_step` does this by itself.

        Args:
            grads: Gradients, shaped like `params`.
            **kwargs: Fields to replace besides.
        """
        if isinstance(grads, Mapping):
            return super().apply_gradients(grads=grads, **kwargs)
        # flax asks whether its own name is a key of the gradients, which no other tree can answer.
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)

    def with_strategy(self, strategy: str | Strategy) -> Self:
        """The same state, whose steps run by another strategy."""
        run = get_strategy(strategy)
        return self if run == self.strategy else _placed(self.replace(strategy=run))


def _placed(state: Any) -> Any:
    """A state where its strategy wants it. If that donates, it owns its arrays, each once."""
    if state.strategy.donate:
        state = jax.tree.map(jnp.copy, state)
    return state.strategy.place(state)
