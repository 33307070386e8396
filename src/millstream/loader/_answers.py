"""What a loader answers where it is taken for a loader of another library."""

from typing import Any, TypeVar

L = TypeVar("L", bound=type)

_ATTRIBUTES = {
    "batch_size": "The BatchTransform of the pipeline has it; print(loader.explain()) shows the pipeline.",
    "dataset": "The source is loader.pipeline.source.",
    "source": "The source is loader.pipeline.source.",
    "num_batches": "Write loader.steps_per_epoch.",
    "num_samples": "Write len(source), with the source that the loader was built from.",
    "epoch": "The state has the position: int(state.step) // loader.steps_per_epoch.",
    "step": "The state has the position: int(state.step).",
    "state": "loader.init_state(jax.random.key(0)) makes a state, and an iterator has it as its .state.",
    "shape": "Write loader.element_spec().",
    "spec": "Write loader.element_spec().",
    "shuffle": 'The source decides the order: ordering="shuffle" or ordering="sequential".',
    "next": "Write batch, state, mask = loader.next_batch(state).",
    "map": "Put ms.MapTransform(fn) into the list of stages.",
    "batch": "Put ms.BatchTransform(32) into the list of stages.",
}


def answer_habits(kind: L) -> L:
    """Have a class of loaders say what to write in place of `for ... in loader`, `len(loader)` and some attributes.

    They are set here and not written in the class, so that a type checker still knows that they do not work.
    """
    methods = {"__iter__": _iter, "__len__": _len, "__bool__": _bool, "__getattr__": _getattr}
    for name, method in methods.items():
        setattr(kind, name, method)
    return kind


def _iter(loader: Any) -> Any:
    # A default key would make every loop the first epoch again, in the same order.
    raise TypeError(
        f"A {type(loader).__name__} is iterated from a state, which holds the key and the step:\n"
        "  batches = loader.iterate(loader.init_state(jax.random.key(0)))\n"
        "  for batch, mask in batches: ...\n"
        "For the next epoch, write loader.iterate(batches.state)."
    )


def _len(loader: Any) -> int:
    length = loader.steps_per_epoch
    here = "unknown (None)" if length is None else f"{length:,}"
    raise TypeError(
        f"A {type(loader).__name__} has no len(): batches come epoch after epoch. loader.steps_per_epoch is the number "
        f"of batches in one epoch, here {here}; len(source) is the number of samples."
    )


def _bool(loader: Any) -> bool:
    return True  # which Python would ask the length for


def _getattr(loader: Any, name: str) -> Any:
    if name not in _ATTRIBUTES:
        return object.__getattribute__(loader, name)  # raises Python's error, or again what a property has raised
    message = f"{type(loader).__name__!r} object has no attribute {name!r}. {_ATTRIBUTES[name]}"
    raise AttributeError(message, name=name, obj=loader)
