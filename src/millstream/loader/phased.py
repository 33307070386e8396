"""Loaders that take over from one another at given steps of a run."""

from collections.abc import Mapping
from typing import Any

from millstream.loader._part_checks import require_indexed
from millstream.loader.loader import DataLoader
from millstream.pipeline.phased import phased
from millstream.reading.contracts import B
from millstream.text.errors import require_steps


def phases(loaders: Mapping[int, DataLoader[B]]) -> DataLoader[B]:
    """Loaders that take over from one another at given steps, as one loader: longer sequences, larger images, new data.

    A loader with as many samples in the same order continues in the middle of the epoch, where the one before it ended,
    so that every sample still comes once per epoch. Any other begins an epoch of its own.

    A run that was saved with the first loaders alone can be resumed with more: what has come before must be the same,
    what comes later need not. So a run is changed at a step, and the change is saved with it.

    Example:
        >>> source = ms.ArraySampleSource({"x": np.zeros((10, 8, 8))})
        >>> halved = ms.MapTransform(lambda sample, mask: {"x": sample["x"][::2, ::2]})
        >>> small = ms.DataLoader([source, halved, ms.BatchTransform(4)])
        >>> large = ms.DataLoader([source, ms.BatchTransform(2)])
        >>> loader = ms.phases({0: small, 2: large})
        >>> state = loader.init_state(jax.random.key(0))
        >>> [(batch["x"].shape, int(mask.sum())) for batch, mask in loader.iterate(state)]
        [((4, 4, 4), 4), ((4, 4, 4), 4), ((2, 8, 8), 2)]

    Args:
        loaders: By the step at which each begins; one of them is 0. Their executors, shardings and caches are kept.
    """
    require_steps("phases", "loaders", loaders, "{0: small, 50_000: large}")
    parts: dict[int, Any] = {}
    for step, loader in loaders.items():
        parts[step] = require_indexed("phases", f"loaders[{step}]", loader).pipeline
    if len(parts) == 1:
        return loaders[0]
    return DataLoader(phased(parts), prefetch=max(loader.options["prefetch"] for loader in loaders.values()))
