"""What a framework has to know how to do: apply a model, and give back what it keeps besides its parameters."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from millstream.reading.contracts import PyTree

_TRAINING = ("training", "train", "is_training")
_TESTING = ("deterministic", "use_running_average", "inference")


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
