"""Loops whose `batch_size_fn` gets the shapes of a batch, and logs that begin with something."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax

import millstream as ms
from millstream.loops.elapsed import Elapsed
from millstream.loops.logs import Logs

P = ParamSpec("P")
R = TypeVar("R")
Shapes = list[tuple[int, ...]]


def _by_shapes(batch_size_fn: Callable[[Shapes], int]) -> Callable[[Any], int]:
    """How many samples a batch has, by the shapes of its leaves; one without axes counts as one row."""

    def size_of(batch: Any) -> int:
        shapes: Shapes = [tuple(getattr(leaf, "shape", ())) or (1,) for leaf in jax.tree.leaves(batch)]
        return batch_size_fn(shapes) if shapes else 1

    return size_of


def _counting_by_shapes(loop: Callable[P, R]) -> Callable[P, R]:
    """A loop whose `batch_size_fn` gets the shapes."""

    @functools.wraps(loop)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs.get("batch_size_fn") is not None:
            kwargs["batch_size_fn"] = _by_shapes(kwargs["batch_size_fn"])  # pyright: ignore[reportArgumentType]
        return loop(*args, **kwargs)

    return run


loop = _counting_by_shapes(ms.loop)
train_loop = _counting_by_shapes(ms.train_loop)
test_loop = _counting_by_shapes(ms.test_loop)
predict_loop = _counting_by_shapes(ms.predict_loop)


def elapse(
    dataset: Any,
    initial: Elapsed | None = None,
    stop: Any = None,
    batch_size_fn: Callable[[Shapes], int] | None = None,
    **options: Any,
) -> Iterator[tuple[Elapsed, Any]]:
    """Go through batches by hand: (elapsed, batch), one after the other.

    Args:
        dataset: An iterable of batches.
        initial: How far an earlier run had come.
        stop: When to end: a number of steps, or `at(...)`. None: with the data.
        batch_size_fn: How many samples a batch has, by the shapes of its arrays. By default, the longest first axis.
        **options: What `ms.elapse` takes besides.
    """
    size_of = None if batch_size_fn is None else _by_shapes(batch_size_fn)
    return ms.elapse(dataset, initial=initial, stop=stop, batch_size_fn=size_of, **options)


def logs(*args: Any, **kwargs: Any) -> Logs:
    """Logs, empty or with collections to begin with: `logs({"metrics": {"loss": 0.5}})`."""
    return Logs().merge(dict(*args, **kwargs))
