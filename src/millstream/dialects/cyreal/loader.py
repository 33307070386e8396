"""The loader of cyreal."""

import functools
from collections.abc import Callable
from typing import Any

import millstream as ms
from millstream.pipeline.state import LoaderState as LoaderState
from millstream.reading.contracts import PyTree


class DataLoader(ms.DataLoader):
    """A `millstream.DataLoader` that also has `next`.

    Example:
        >>> from millstream.dialects.cyreal import ArraySampleSource, BatchTransform, DataLoader
        >>> loader = DataLoader(pipeline=[ArraySampleSource({"x": np.arange(10.0)}), BatchTransform(batch_size=4)])
        >>> state = loader.init_state(jax.random.PRNGKey(0))
        >>> batch, state, mask = jax.jit(loader.next)(state)

    Args:
        pipeline: A list, source first, or a composed source.
        **options: What `millstream.DataLoader` takes besides: executor, prefetch, sharding and so on.
    """

    def __init__(self, pipeline: Any, **options: Any) -> None:
        super().__init__(pipeline, **options)

    # Compiled functions are looked up by function, and a method is a new one whenever it is asked for.
    @functools.cached_property
    def next(self) -> Callable[[PyTree], tuple[PyTree, PyTree, Any]]:
        """`next(state) -> (batch, state, mask)`: the same as `next_batch`."""
        return self.next_batch
