"""The stream behind a replay buffer, its state, and the priorities in it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from millstream.pipeline.stages import element_key, stage_names
from millstream.pipeline.streams import MappedStream, StageState, stages_of
from millstream.reading.contracts import PyTree
from millstream.text.errors import describe_leaf, raised_in
from millstream.transforms import _replay as replay

if TYPE_CHECKING:
    from millstream.transforms.buffer import BufferTransform

Rows = tuple[PyTree, jax.Array]  # values and their masks, stacked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class BufferState(StageState):
    """The state of a replay buffer and of what lies below.

    Attributes:
        items: The stored values and their masks, stacked.
        count: Values stored, int32.
        write_index: Where the next value goes in mode "fifo", int32.
        read_index: Where reading continues in mode "sequential", int32.
        seen: Values that came by, uint32; it stays at its largest number.
        priorities: One per slot in mode "prioritised", otherwise None.
    """

    items: Rows
    count: jax.Array
    write_index: jax.Array
    read_index: jax.Array
    seen: jax.Array
    priorities: jax.Array | None


def set_buffer_priorities(
    state: PyTree, indices: ArrayLike | Sequence[int], priorities: ArrayLike | Sequence[float]
) -> PyTree:
    """The state of a pipeline with a prioritised buffer, with other priorities.

    Example:
        >>> replay = ms.BufferTransform(capacity=8, prefill=4, sample_size=4, mode="prioritised")
        >>> loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(10.0)}), replay])
        >>> batch, state, mask = loader.next_batch(loader.init_state(jax.random.key(0)))
        >>> state = ms.transforms.set_buffer_priorities(state, batch["buffer_index"], jnp.abs(batch["x"]))

    Args:
        state: A loader's or a stream's state.
        indices: The `buffer_index` of values given out. Rows of padding are ignored.
        priorities: One for each, taken as from 1e-6 to 1e30; NaN counts as the least. If an index comes twice, one of
            its priorities is taken.
    """
    found = [node for node in jax.tree.leaves(state, is_leaf=_is_prioritised) if _is_prioritised(node)]
    if len(found) != 1:
        raise ValueError(
            "set_buffer_priorities needs the state of a pipeline with one BufferTransform(mode='prioritised'). "
            f"Got {type(state).__name__} with {len(found)} of them."
        )
    with raised_in("set_buffer_priorities, which needs arrays of numbers as indices and priorities"):
        indices, priorities = jnp.asarray(indices), replay.usable(jnp.asarray(priorities, np.float32))
    if indices.shape != priorities.shape:
        raise ValueError(
            f"set_buffer_priorities needs one priority per index. Got indices of shape {indices.shape} "
            f"and priorities of shape {priorities.shape}."
        )
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(
            "set_buffer_priorities needs indices that are whole numbers, such as batch['buffer_index']. "
            f"Got {describe_leaf(indices)}."
        )
    changed = found[0].priorities.at[indices.reshape(-1)].set(priorities.reshape(-1), mode="drop")
    node = dataclasses.replace(found[0], priorities=changed)
    return jax.tree.map(lambda leaf: node if _is_prioritised(leaf) else leaf, state, is_leaf=_is_prioritised)


def _is_prioritised(node: Any) -> bool:
    return isinstance(node, BufferState) and node.priorities is not None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class BufferedStream(MappedStream):
    """A stream seen through a replay buffer."""

    transform: "BufferTransform" = dataclasses.field(metadata={"static": True})

    def init_state(self, key: jax.Array) -> BufferState:
        stage, below = self.transform, super().init_state(key)
        rows = jax.eval_shape(lambda state: self._rows(*self.inner.next(state)[:2]), below.inner)
        self._check_rows(*rows)
        zero = jnp.zeros((), np.int32)
        return BufferState(
            inner=below.inner,
            key=below.key,
            step=below.step,
            items=jax.tree.map(lambda row: jnp.zeros((stage.capacity, *row.shape[1:]), row.dtype), rows),
            count=zero,
            write_index=zero,
            read_index=zero,
            seen=jnp.zeros((), np.uint32),
            priorities=jnp.zeros(stage.capacity, np.float32) if stage.mode == "prioritised" else None,
        )

    def next(self, state: StageState) -> tuple[PyTree, jax.Array, BufferState]:
        assert isinstance(state, BufferState)
        stage = self.transform
        name = stage_names(stages_of(self))[-1]
        write_key, read_key = jax.random.split(element_key(state.key, name, np.uint32(0), state.step))
        value, mask, inner = self.inner.next(state.inner)
        rows = self._rows(value, mask)
        valid = rows[1].reshape(len(rows[1]), -1).any(axis=1)
        if stage.write_mode == "fifo":
            slots = replay.fifo_slots(valid, state.write_index, stage.capacity)
        else:
            slots = replay.reservoir_slots(valid, state.seen, stage.capacity, write_key)

        ready = state.count >= stage.prefill
        after = dataclasses.replace(self._written(state, rows, valid, slots), inner=inner)
        drawn, weights = self._drawn(after, read_key)
        after = dataclasses.replace(
            after,
            read_index=jnp.where(ready, (drawn[-1] + 1) % jnp.maximum(after.count, 1), state.read_index),
            step=state.step + np.uint32(1),
        )

        size = stage.sample_size
        passing = jax.tree.map(lambda row: replay.fit(row, size), rows)
        value, mask = jax.tree.map(lambda stored, row: jnp.where(ready, stored[drawn], row), after.items, passing)
        if stage.mode == "prioritised":
            index = jnp.where(ready, drawn, replay.fit(slots, size, fill=stage.capacity))
            weight = jnp.where(ready, weights, replay.fit(valid.astype(np.float32), size))
            value = {**value, "buffer_index": index, "importance_weight": weight}
        if size == 1:
            value, mask = jax.tree.map(lambda leaf: leaf[0], (value, mask))
        return value, mask, after

    def _written(self, state: BufferState, rows: Rows, valid: jax.Array, slots: jax.Array) -> BufferState:
        """The state after these rows went to these slots."""
        capacity, priorities = self.transform.capacity, state.priorities
        if priorities is not None:
            highest = jnp.where(state.count > 0, priorities.max(), np.float32(1))
            priorities = priorities.at[slots].set(highest, mode="drop")
        arrived = jnp.sum(valid, dtype=np.int32)
        return dataclasses.replace(
            state,
            items=jax.tree.map(lambda stored, row: stored.at[slots].set(row, mode="drop"), state.items, rows),
            count=jnp.minimum(state.count + arrived, capacity),
            write_index=(state.write_index + arrived) % capacity,
            seen=replay.saturating_add(state.seen, arrived),
            priorities=priorities,
        )

    def _drawn(self, state: BufferState, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The slots to read now, and the importance weights of what is in them."""
        stage, size = self.transform, self.transform.sample_size
        if stage.mode == "prioritised":
            assert state.priorities is not None
            exponents = (stage.priority_exponent, stage.importance_exponent)
            return replay.by_priority(key, size, state.priorities, state.count, *exponents)
        if stage.mode == "sequential":
            drawn = (state.read_index + jnp.arange(size, dtype=np.int32)) % jnp.maximum(state.count, 1)
        elif stage.mode == "uniform":
            drawn = jax.random.randint(key, (size,), 0, state.count)
        else:
            drawn = replay.distinct(key, size, state.count)
        return drawn, jnp.ones(size, np.float32)

    def _rows(self, value: PyTree, mask: jax.Array) -> Rows:
        """What arrives in one step, as rows to store."""
        if not self.transform.by_row:
            return jax.tree.map(lambda leaf: leaf[None], (value, mask))
        if mask.ndim == 0:
            raise ValueError(
                "BufferTransform(by_row=True) needs batches whose rows it can store. Got single values; "
                "leave by_row out, or put a BatchTransform before it."
            )
        return value, mask

    def _check_rows(self, value: PyTree, mask: Any) -> None:
        stage = self.transform
        if len(mask.shape) > 0 and mask.shape[0] > stage.capacity:
            raise ValueError(
                f"BufferTransform needs a capacity of at least the {mask.shape[0]} rows that arrive in one step. "
                f"Got capacity={stage.capacity}."
            )
        if stage.mode != "prioritised":
            return
        if not isinstance(value, Mapping) or {"buffer_index", "importance_weight"} & set(value):
            found = f"the keys {sorted(value)}" if isinstance(value, Mapping) else f"a {type(value).__name__}"
            raise TypeError(
                "BufferTransform(mode='prioritised') needs values that are dicts, to which it adds 'buffer_index' and "
                f"'importance_weight'. Got {found}."
            )
