"""Stages after a stream, whose values can only be drawn one after the other."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from millstream.pipeline.stages import apply_stage, element_key, stage_names
from millstream.pipeline.state import key_words
from millstream.reading.contracts import PyTree, Stream
from millstream.text.summaries import fields_text, never_raising

if TYPE_CHECKING:
    from millstream.pipeline.transform import Transform
    from millstream.plan.plan import Batching


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StageState:
    """The state of a stage after a stream.

    Attributes:
        inner: The state of what lies below.
        key: The raw data of the run's key, uint32.
        step: Elements this stage has given so far, uint32.
    """

    inner: PyTree
    key: jax.Array
    step: jax.Array

    @never_raising
    def __repr__(self) -> str:
        return fields_text(self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Stage:
    inner: Stream
    transform: "Transform" = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        from millstream.pipeline.summary import pipeline_text  # which knows all kinds of pipelines

        return pipeline_text(self)

    def init_state(self, key: Any) -> StageState:
        return StageState(self.inner.init_state(key), key_words("init_state", key), jnp.zeros((), np.uint32))

    def element_spec(self) -> PyTree:
        state = jax.eval_shape(self.init_state, jax.random.key(0))
        return jax.eval_shape(lambda state: self.next(state)[0], state)

    def next(self, state: StageState) -> tuple[PyTree, jax.Array, StageState]:
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class MappedStream(_Stage):
    """A stream whose every value goes through a transform."""

    @property
    def steps_per_epoch(self) -> int:
        return self.inner.steps_per_epoch

    def next(self, state: StageState) -> tuple[PyTree, jax.Array, StageState]:
        value, mask, inner = self.inner.next(state.inner)
        name = stage_names(stages_of(self))[-1]
        epoch, element = jnp.divmod(state.step, np.uint32(self.steps_per_epoch))
        key = element_key(state.key, name, epoch, element) if self.transform.keyed else None
        value, mask = apply_stage(name, self.transform, 0, value, mask, key)
        return value, mask, StageState(inner, state.key, state.step + np.uint32(1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class BatchedStream(_Stage):
    """A stream whose values are drawn and stacked, with the same three endings as an indexed pipeline."""

    @property
    def batching(self) -> "Batching":
        return self.transform.batching(self.inner.steps_per_epoch)

    @property
    def steps_per_epoch(self) -> int:
        return self.batching.length

    def next(self, state: StageState) -> tuple[PyTree, jax.Array, StageState]:
        batching = self.batching
        batch = state.step % np.uint32(batching.length)
        value_spec, mask_spec, _ = jax.eval_shape(self.inner.next, state.inner)

        def draw(inner: PyTree) -> tuple[PyTree, tuple[PyTree, jax.Array]]:
            value, mask, inner = self.inner.next(inner)
            return inner, (value, mask)

        def pad(inner: PyTree) -> tuple[PyTree, tuple[PyTree, jax.Array]]:
            return inner, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (value_spec, mask_spec))

        def row(inner: PyTree, number: jax.Array) -> tuple[PyTree, tuple[PyTree, jax.Array]]:
            if not batching.pads:
                return draw(inner)
            return lax.cond(batch * np.uint32(batching.size) + number < np.uint32(batching.inner), draw, pad, inner)

        inner, (value, mask) = lax.scan(row, state.inner, jnp.arange(batching.size, dtype=np.uint32))
        rest = batching.inner % batching.size
        if batching.ending == "drop" and rest:
            drop = np.uint32(rest) * (batch == np.uint32(batching.length - 1)).astype(np.uint32)
            inner = lax.fori_loop(np.uint32(0), drop, lambda _, inner: draw(inner)[0], inner)
        return value, mask, StageState(inner, state.key, state.step + np.uint32(1))


def stages_of(stream: Any) -> tuple["Transform", ...]:
    """The transforms stacked on a stream, first to last."""
    found = []
    while isinstance(stream, _Stage):
        found.append(stream.transform)
        stream = stream.inner
    return tuple(found[::-1])
