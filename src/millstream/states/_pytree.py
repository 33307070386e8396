"""State classes as pytrees: dataclasses whose static fields are part of the structure."""

import dataclasses
import functools
import inspect
import operator
from typing import Any

import jax


class Layout:
    """The fields of a state class, looked up when the first state is made: its decorator runs after its registration.

    Args:
        kind: The class.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind

    @functools.cached_property
    def dynamic(self) -> tuple[str, ...]:
        """The names of the fields that hold arrays."""
        return tuple(field.name for field in fields_of(self._kind) if not field.metadata.get("static", False))

    @functools.cached_property
    def static(self) -> tuple[str, ...]:
        """The names of the others."""
        return tuple(field.name for field in fields_of(self._kind) if field.metadata.get("static", False))

    @functools.cached_property
    def own(self) -> tuple[str, ...]:
        """The names of the fields that a subclass adds, dynamic ones first."""
        return (*self.dynamic[6:], *self.static[4:])

    @functools.cached_property
    def get_dynamic(self) -> Any:
        """Gives the values of the dynamic fields of a state."""
        return operator.attrgetter(*self.dynamic)

    @functools.cached_property
    def get_static(self) -> Any:
        """Gives the values of the static fields of a state."""
        return operator.attrgetter(*self.static)


def fields_of(kind: type) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a state class; those it inherits come first."""
    annotations = inspect.get_annotations(kind)
    own = [name for name, annotation in annotations.items() if "ClassVar" not in str(annotation)]
    if own and "__dataclass_fields__" not in kind.__dict__:
        raise TypeError(
            f"{kind.__name__} has fields of its own ({', '.join(own)}), and so must be a dataclass. "
            "Write @dataclasses.dataclass(frozen=True, kw_only=True) above it."
        )
    return dataclasses.fields(kind)


def register_state(kind: type) -> None:
    """Make a state class a pytree."""
    layout = Layout(kind)

    def flatten(state: Any) -> tuple[Any, Any]:
        return layout.get_dynamic(state), layout.get_static(state)

    def flatten_with_keys(state: Any) -> tuple[Any, Any]:
        keys = map(jax.tree_util.GetAttrKey, layout.dynamic)
        return tuple(zip(keys, layout.get_dynamic(state), strict=True)), layout.get_static(state)

    def unflatten(static: Any, dynamic: Any) -> Any:
        # Every step does this. Names written out take a third of the time of a loop or of a dataclass's constructor.
        state = object.__new__(kind)
        to = state.__dict__
        to["params"], to["opt_state"], to["step"], to["key"], to["ema_params"], to["loss_scale"], *dynamic = dynamic
        to["tx"], to["apply_fn"], to["strategy"], to["options"], *static = static
        if layout.own:
            to.update(zip(layout.own, (*dynamic, *static), strict=True))
        return state

    jax.tree_util.register_pytree_with_keys(kind, flatten_with_keys, unflatten, flatten)
