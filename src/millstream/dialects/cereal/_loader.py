"""The loader of cereal."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

import millstream as ms
from millstream.dialects.cereal._batch import AsBatch
from millstream.loader.build import build
from millstream.pipeline.convolutions import with_fast_convolutions
from millstream.pipeline.state import is_traced
from millstream.pipeline.static_part import StaticPart, settled, split_carry
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_value, require_callable
from millstream.transforms.host import HostCallbackTransform


class DataLoader(ms.DataLoader):
    """A `millstream.DataLoader` whose batches, where they are dicts, can be taken apart: `images, labels = batch`.

    Example:
        >>> from millstream.dialects.cereal import ArraySampleSource, BatchTransform, DataLoader
        >>> data = {"image": np.zeros((10, 2, 2)), "label": np.arange(10)}
        >>> loader = DataLoader(pipeline=[ArraySampleSource(data), BatchTransform(batch_size=4)])
        >>> batch, state, mask = loader.next_batch(loader.init_state(jax.random.PRNGKey(0)))
        >>> images, labels = batch
        >>> images.shape, batch["label"].shape
        ((4, 2, 2), (4,))

    Args:
        pipeline: A list, source first, or a composed source.
        batch_transform: `batch_transform(batch) -> batch`, a Python function that every batch goes through last. It
            gets NumPy arrays and returns such of the same shapes and dtypes.
        **options: What `millstream.DataLoader` takes besides: executor, prefetch, sharding and so on.
    """

    def __init__(
        self, pipeline: Any, *, batch_transform: Callable[[PyTree], PyTree] | None = None, **options: Any
    ) -> None:
        source = build(pipeline)
        if batch_transform is not None:
            require_callable("DataLoader", "batch_transform", batch_transform)
            source = HostCallbackTransform(_without_mask(batch_transform))(source)
        if isinstance(source.element_spec(), dict):
            source = AsBatch()(source)
        super().__init__(source, **options)

    def scan_epoch(
        self, state: PyTree, carry: Any, body_fn: Callable[..., Any], *, unroll: int | bool = 1
    ) -> tuple[Any, ...]:
        """Run `steps_per_epoch` steps as one compiled program, in either of two forms.

        Example:
            >>> from millstream.dialects import cereal
            >>> loader = cereal.DataLoader(stages)
            >>> def body_fn(carry, _):
            ...     total, loader_state = carry
            ...     batch, loader_state, mask = loader.next_batch(loader_state)
            ...     return (total + jnp.sum(batch["x"] * mask), loader_state), None
            >>> carry = 0.0, loader.init_state(jax.random.PRNGKey(0))
            >>> (total, loader_state), _ = loader.scan_epoch(carry, None, body_fn)
            >>> float(total)
            45.0

        Args:
            state: The loader's state; in the second form, the carry, in which the loader's state is.
            carry: What `body_fn` hands from step to step; in the second form, None.
            body_fn: `body_fn(carry, batch, mask) -> (carry, output)`; or, the second form, `body_fn(carry, _) ->
                (carry, output)`, which draws its batches itself. Programs are looked up by function: define it once.
            unroll: Steps per turn of the loop, as in `lax.scan`.

        Returns:
            The new state, the last carry and the outputs stacked; in the second form, the last two of these.
        """
        if not _draws_itself(body_fn):
            return super().scan_epoch(state, carry, body_fn, unroll=unroll)
        if carry is not None:
            raise TypeError(
                "scan_epoch got body_fn(carry, _), which draws its batches itself: it needs (carry, None, body_fn), "
                f"with the loader's state in the carry. In place of None it got {describe_value(carry)}. To be given "
                "batches, write body_fn(carry, batch, mask)."
            )
        return self._scan(state, body_fn, unroll)

    def _scan(self, carry: Any, body_fn: Callable[..., Any], unroll: int | bool) -> tuple[Any, Any]:
        static, carried = settled(carry, functools.partial(_part_after.eval_shape, body_fn))
        body = _of_arrays(body_fn, static)
        scan = functools.partial(lax.scan, length=self.steps_per_epoch, unroll=unroll)
        if is_traced(carry):
            carried, outputs = scan(body, carried)
            return static.join(carried), outputs
        self._warn_of_fresh_functions(body_fn)
        try:
            carried, outputs = self._run(scan, body, carried)
        finally:
            self.end_steps()
        return static.join(carried), outputs


@functools.lru_cache(maxsize=8)  # a scan is compiled again for a function that it has not seen
def _of_arrays(body_fn: Callable[[Any, None], tuple[Any, Any]], static: StaticPart) -> Callable[..., Any]:
    """The body of a scan that carries the arrays of what `body_fn` carries."""

    def body(carried: list[Any], _: None) -> tuple[list[Any], Any]:
        carry, output = body_fn(static.join(carried), None)
        return static.arrays_of(carry, carried), output

    return with_fast_convolutions(body)


@functools.partial(jax.jit, static_argnums=0)
def _part_after(body_fn: Callable[[Any, None], tuple[Any, Any]], static: StaticPart, carried: list[Any]) -> StaticPart:
    return split_carry(body_fn(static.join(carried), None)[0])[0]


def _without_mask(batch_transform: Callable[[PyTree], PyTree]) -> Callable[[PyTree, Any], PyTree]:
    @functools.wraps(batch_transform)
    def transform(batch: PyTree, mask: Any) -> PyTree:
        return batch_transform(batch)

    return transform


def _draws_itself(body_fn: Any) -> bool:
    """Whether a body takes (carry, _) and not (carry, batch, mask)."""
    try:
        parameters = inspect.signature(body_fn).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variable = any(p.kind == p.VAR_POSITIONAL for p in parameters)
    return len(positional) == 2 and not variable
