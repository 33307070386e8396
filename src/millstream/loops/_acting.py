"""The policy of an environment, taken from the state of a loop before every batch."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from millstream.loops.callback import arguments
from millstream.pipeline.policy import as_arrays, get_policy_state, memories, set_policy_state
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value

Policy = Callable[..., PyTree] | Literal["fixed"] | None


@dataclasses.dataclass(frozen=True)
class Acting:
    """Has an environment act with the policy that is in the state of a loop.

    Args:
        caller: The name of the loop, for errors.
        policy: A function of the state, or of the state and the policy state so far.
    """

    caller: str
    policy: Callable[..., PyTree]

    def policy_state(self, state: Any, data_state: PyTree) -> PyTree:
        """The policy state for the next batch: copies, since a step may take over the memory of its state."""
        if arguments(f"{self.caller}: policy", self.policy) > 1:
            found = self.policy(state, get_policy_state(data_state))
        else:
            if own := memories(data_state):
                raise ValueError(
                    f"{self.caller}: this policy has a memory of its own, {', '.join(own)}, which policy= would "
                    "overwrite before every batch. Take it over: policy=lambda state, policy_state: "
                    '{**policy_state, "params": state.params}.'
                )
            found = self.policy(state)
        return _copied(as_arrays(f"{self.caller}: policy=", found))

    def before(self, data_state: PyTree, carry: Any) -> PyTree:
        """The state of a loader with the policy that a fused program carries."""
        found = self.policy_state(carry.state, data_state)
        return set_policy_state(f"{self.caller}: policy=", data_state, found, None)


_copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def has_policy(dataset: Any) -> bool:
    """Whether a policy makes the batches of a dataset."""
    return bool(getattr(dataset, "has_policy", False))


def resolve_policy(caller: str, policy: Policy, dataset: Any) -> Acting | None:
    """What `policy=` of a loop asks for; None if nothing is to be set.

    Args:
        caller: The name of the loop, for errors.
        policy: A function, "fixed", or None if it was not given.
        dataset: A loader or an iterable.
    """
    is_fixed = isinstance(policy, str) and policy == "fixed"
    if policy is not None and not is_fixed and not callable(policy):
        raise TypeError(
            f'{caller} needs policy to be a function of the state, or "fixed". Got {describe_value(policy)}.'
        )
    if policy is None and has_policy(dataset):
        raise ValueError(
            f"{caller} over an environment needs policy=, the part of the state that acts, such as policy=lambda "
            'state: state.params. policy="fixed" acts with the policy that the source has, whatever a step does to '
            "the state."
        )
    if policy is not None and not has_policy(dataset):
        raise ValueError(
            f"{caller} takes policy= for data that come from an environment, such as ms.rl.GymnaxSource. "
            f"{type(dataset).__name__} has no policy. Leave it out."
        )
    return None if policy is None or isinstance(policy, str) else Acting(caller, policy)
