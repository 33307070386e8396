"""What every test shares: strict promotion, one key, and a counter of compilations."""

import contextlib
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest
from hypothesis import settings

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiling makes first examples slow, and a fixed seed makes a failure repeat.
settings.register_profile("millstream", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("millstream")

_compilations = 0


def _count(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _compilations
    _compilations += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count)


@pytest.fixture
def count_compilations() -> Callable[[], contextlib.AbstractContextManager[list[int]]]:
    """A context whose value holds, afterwards, how many programs XLA compiled in it."""

    @contextlib.contextmanager
    def counting() -> Iterator[list[int]]:
        count, before = [], _compilations
        yield count
        count.append(_compilations - before)

    return counting


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(7)


def assert_trees_equal(left: object, right: object) -> None:
    """Same structure, same dtypes, same bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
