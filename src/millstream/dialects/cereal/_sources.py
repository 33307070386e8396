"""Sources whose arguments stand in a different order than in Millstream."""

import os
from collections.abc import Callable
from typing import Any

from millstream import datasets, rl
from millstream.dialects import _bare_sources
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree


def DiskSampleSource(
    length: int,
    sample_fn: Callable[[int], PyTree],
    sample_spec: Any = None,
    prefetch_size: int = 64,
    ordering: Ordering = "shuffle",
) -> _bare_sources.DiskSampleSource:
    """The samples of any function from an index to a pytree of arrays.

    Example:
        >>> from millstream.dialects.cereal import DiskSampleSource
        >>> source = DiskSampleSource(100, lambda index: np.float32(index), jax.ShapeDtypeStruct((), np.float32), 32)

    Args:
        length: Number of samples.
        sample_fn: `sample_fn(index) -> sample`. It is called from several threads.
        sample_spec: The shapes and dtypes of a sample; by default those of sample 0.
        prefetch_size: How many samples are read before they are needed.
        ordering: "shuffle" or "sequential".
    """
    return _bare_sources.DiskSampleSource(length, sample_fn, sample_spec, ordering, prefetch_size)


def MNISTDiskSource(
    split: str = "train",
    prefetch_size: int = 64,
    cache_dir: str | os.PathLike[str] | None = None,
    ordering: Ordering = "shuffle",
) -> Any:
    """MNIST as a source whose images stay on disk.

    Example:
        >>> from millstream.dialects.cereal import MNISTDiskSource
        >>> source = MNISTDiskSource(split="train", prefetch_size=1024)  # doctest: +SKIP

    Args:
        split: "train" or "test".
        prefetch_size: How many samples are read before they are needed.
        cache_dir: Where the files are, or are downloaded to; by default `~/.cache/millstream`.
        ordering: "shuffle" or "sequential".
    """
    return datasets.MNISTDiskSource(split, cache_dir, ordering, prefetch_size)


def GymnaxSource(
    env: Any,
    env_params: Any,
    policy_fn: Callable[[Any, PyTree, Any], Any],
    policy_params: PyTree = None,
    steps_per_epoch: int = 1024,
) -> rl.GymnaxSource:
    """Transitions of a policy without memory in a Gymnax environment.

    Example:
        >>> import gymnax
        >>> from millstream.dialects.cereal import GymnaxSource
        >>> env, env_params = gymnax.make("CartPole-v1")
        >>> def policy(obs, params, key):
        ...     return jax.random.categorical(key, obs @ params)
        >>> source = GymnaxSource(env, env_params, policy, jnp.zeros((4, 2)))

    Args:
        env: A Gymnax environment.
        env_params: Its parameters.
        policy_fn: `policy_fn(obs, params, key) -> action`.
        policy_params: A pytree of arrays; `set_loader_policy_state` of `millstream.rl` puts in new ones.
        steps_per_epoch: Steps in an epoch.
    """
    return rl.GymnaxSource(
        env, env_params, policy_fn=policy_fn, policy_params=policy_params, steps_per_epoch=steps_per_epoch
    )
