"""Rows of large arrays, which NumPy reads before a program copies them: the same batches, and only where it helps."""

import math
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import millstream as ms
from millstream.pipeline.rows import RowTouch
from millstream.plan.mixture import Numbering

LARGE = 9 << 20  # bytes


def rows_of(nbytes: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    count = nbytes // (math.prod(shape) * jnp.dtype(dtype).itemsize)
    return np.random.default_rng(0).integers(0, 2**8, (count, *shape)).astype(jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("dtype", "shape"), [("uint8", (28, 28)), ("float32", ()), ("bfloat16", (3,)), ("bool", (500,)), ("int8", (0, 4))]
)
@pytest.mark.parametrize("nested", [False, True])
def test_rows_of_large_arrays_are_the_rows_that_were_planned(key, dtype, shape, nested):
    data = {"x": np.zeros((50, *shape), dtype) if 0 in shape else rows_of(LARGE, dtype, shape)}
    data["y"] = np.arange(len(data["x"]), dtype=np.int32)
    source = ms.views.select(ms.ArraySampleSource(data), np.arange(len(data["y"]))[-3_001:][::-1])
    stages = [ms.BatchTransform(50), ms.BatchTransform(2)] if nested else [ms.BatchTransform(100)]
    loader = ms.DataLoader([source, *stages])
    seen = []
    for batch, mask in loader.iterate(loader.init_state(key)):
        batch, mask = jax.device_get((batch, mask))
        seen.append(batch["y"][mask])
        np.testing.assert_array_equal(batch["x"][mask], data["x"][seen[-1]])
        assert not batch["x"][~mask].any()
    assert len(np.unique(np.concatenate(seen))) == sum(map(len, seen)) == len(source)


def touched(arrays, count=100) -> list[int]:
    """The sizes of the arrays of which rows are read before."""
    return [view.nbytes for view, _ in RowTouch(arrays, count)._arrays]


def test_only_large_arrays_in_the_memory_of_the_host_are_touched():
    large, small = jnp.zeros((LARGE // 100, 100), jnp.uint8), jnp.zeros((100, 100), jnp.uint8)
    assert touched({"large": large, "small": small}) == [large.nbytes]
    assert touched(large, count=10_000) == []  # 1 MB, which threads copy
    assert touched([large] + [small] * 12) == []  # more than a loop copies
    assert touched(jax.random.split(jax.random.key(0), LARGE // 8)) == []
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    over_a_mesh = jax.device_put(large, NamedSharding(mesh, PartitionSpec("data")))
    assert touched(over_a_mesh) == [large.nbytes]  # of one device


def test_what_is_touched_is_the_memory_of_the_array():
    array = jnp.arange(LARGE // 4).reshape(-1, 4)
    touch = RowTouch(array, 2)
    [(view, room)] = touch._arrays
    assert view.ctypes.data == array.unsafe_buffer_pointer()
    touch(np.array([1, len(array) - 1], np.uint32))
    np.testing.assert_array_equal(room, array[jnp.array([1, -1])])


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    offset=st.integers(0, 9),
    dtype=st.sampled_from([np.uint32, np.int64, np.uint64]),
)
def test_rows_of_sources_one_after_the_other_are_the_same_without_their_numbers(sizes, offset, dtype):
    firsts = tuple(int(first) for first in np.cumsum([0, *sizes[:-1]]))
    numbering = Numbering(firsts, tuple(first + offset * at for at, first in enumerate(firsts)))
    indices = np.arange(sum(sizes)).astype(dtype)
    np.testing.assert_array_equal(numbering.rows_at(indices), numbering.at(np, indices)[1])


def test_rows_of_a_mixture_are_touched_where_they_lie(key):
    arrays = {"x": rows_of(LARGE, "uint8", (100,))}
    sources = dict(zip("ab", ms.views.split(ms.ArraySampleSource(arrays), {"a": 0.5, "b": 0.5}), strict=True))
    mixed = ms.views.mix(sources, {"a": 1, "b": 3}, source_field="source")
    loader = ms.DataLoader([mixed, ms.BatchTransform(100)])
    batch, _, _ = loader.next_batch(loader.init_state(key))
    feed: Any = loader._feed
    [(_, room)] = feed._touch._arrays
    np.testing.assert_array_equal(room, batch["x"])
