"""Every stage in a small pipeline: the one list that the contract suite runs through. A new stage is a new line."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import millstream as ms
from millstream.plan.ordering import Shuffle
from millstream.transforms.buffer import BufferTransform
from millstream.transforms.time_series import TimeSeriesBatchTransform

SAMPLES = 11


def data() -> dict[str, np.ndarray]:
    """Eleven tiny images whose label is their row number."""
    pixels = np.random.default_rng(0).integers(0, 256, (SAMPLES, 2, 3, 1), dtype=np.uint8)
    return {"image": pixels, "label": np.arange(SAMPLES, dtype=np.int32)}


def source(ordering: Any = "shuffle") -> ms.ArraySampleSource:
    return ms.ArraySampleSource(data(), ordering=ordering)


def halve(value: Any, mask: jax.Array) -> Any:
    return {"half": value["image"].astype(jnp.float32) / 2, "label": value["label"]}


def jitter(value: Any, mask: jax.Array, key: jax.Array) -> Any:
    return {**value, "noise": jax.random.bits(key, (2,))}


def blur(value: Any, mask: jax.Array, key: jax.Array) -> Any:
    return {**value, "noise": jax.random.normal(key, (2,))}


def sample(index: int) -> dict[str, np.ndarray]:
    return {name: array[index] for name, array in data().items()}


def fill(item: int, arrays: Any, rng: np.random.Generator) -> None:
    arrays["image"][...] = rng.integers(0, 256, (2, 3, 1))
    arrays["label"][...] = item


def shaken(value: Any, rng: np.random.Generator) -> Any:
    return {**value, "noise": rng.random(2, np.float32)}


def doubled(value: Any) -> Any:
    return {"double": value["image"].astype(np.int16) * 2, "label": value["label"]}


def numbered(value: Any, number: int) -> Any:
    return {**value, "number": np.int32(number)}


def first_label(value: Any, mask: jax.Array) -> Any:
    return {**value, "label": value["label"][0]}


def first_labels(value: Any, mask: jax.Array) -> Any:
    return {**value, "label": value["label"][:, 0]}


def brighter(value: Any, mask: np.ndarray) -> Any:
    return {**value, "image": np.where(mask[:, None, None, None], value["image"] // 2 + 100, 0).astype(np.uint8)}


class Echo:
    """A user's own stream: every value of the inner one, with a running count."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.steps_per_epoch = inner.steps_per_epoch

    def init_state(self, key: Any) -> Any:
        return {"inner": self.inner.init_state(key), "count": jnp.int32(0)}

    def next(self, state: Any) -> Any:
        value, mask, inner = self.inner.next(state["inner"])
        return {**value, "count": state["count"]}, mask, {"inner": inner, "count": state["count"] + 1}

    def element_spec(self) -> Any:
        return {**self.inner.element_spec(), "count": jax.ShapeDtypeStruct((), jnp.int32)}


BATCH = ms.BatchTransform(4)

PIPELINES: dict[str, Callable[[], Any]] = {
    "samples": lambda: [source()],
    "sequential": lambda: [source("sequential"), BATCH],
    "pad": lambda: [source(), BATCH],
    "drop": lambda: [source(), ms.BatchTransform(4, drop_last=True)],
    "wrap": lambda: [source(), ms.BatchTransform(4, pad_last_batch=False)],
    "shuffled batchwise": lambda: [source(Shuffle("batchwise")), ms.RandomMapTransform(jitter), BATCH],
    "shuffled in blocks": lambda: [
        source(Shuffle("blocks", block_size=3, lanes=2, window=2)),
        ms.RandomMapTransform(jitter),
        BATCH,
    ],
    "host, shuffled in blocks": lambda: [
        ms.HostArraySource(data(), Shuffle("blocks", block_size=2), 8),
        ms.BatchTransform(4, pad_last_batch=False),
    ],
    "repeated order": lambda: [source(Shuffle("repeat")), BATCH, ms.RandomMapTransform(jitter)],
    "repeated order, reseeded": lambda: [
        source(Shuffle("reseed")),
        ms.RandomMapTransform(jitter),
        ms.BatchTransform(4, pad_last_batch=False),
    ],
    "first epoch in sequence": lambda: [source(Shuffle(first_epoch=False)), BATCH],
    "host, shuffled batchwise": lambda: [ms.HostArraySource(data(), Shuffle("batchwise", False), 8), BATCH],
    "one batch": lambda: [source(), ms.BatchTransform(SAMPLES)],
    "larger than the data": lambda: [source(), ms.BatchTransform(16)],
    "batch of batches": lambda: [source(), BATCH, ms.BatchTransform(2)],
    "composed": lambda: ms.BatchTransform(4)(source()),
    "map before": lambda: [source(), ms.MapTransform(halve), BATCH],
    "map after": lambda: [source(), BATCH, ms.MapTransform(halve)],
    "map between": lambda: [source(), BATCH, ms.MapTransform(halve), ms.BatchTransform(2)],
    "random map before": lambda: [source(), ms.RandomMapTransform(blur), BATCH],
    "random map after": lambda: [source(), BATCH, ms.RandomMapTransform(blur)],
    "random map, wrapped": lambda: [
        source(),
        ms.RandomMapTransform(jitter),
        ms.BatchTransform(4, pad_last_batch=False),
    ],
    "normalize": lambda: [source(), BATCH, ms.NormalizeImageTransform(offset=-0.5)],
    "flatten before": lambda: [source(), ms.FlattenImageTransform(), BATCH],
    "flatten after": lambda: [source(), BATCH, ms.FlattenImageTransform()],
    "rename": lambda: [source(), ms.RenameTransform({"image": "pixels"}), BATCH],
    "device put": lambda: [source(), BATCH, ms.DevicePutTransform("cpu")],
    "host arrays": lambda: [ms.HostArraySource(data(), prefetch_size=8), BATCH, ms.NormalizeImageTransform()],
    "host function": lambda: [
        ms.DiskSampleSource(SAMPLES, sample, prefetch_size=6),
        ms.RandomMapTransform(blur),
        BATCH,
    ],
    "host fill": lambda: [
        ms.sources.FillSource(list(range(SAMPLES)), fill, {"image": ((2, 3, 1), np.uint8), "label": ((), np.int32)}),
        ms.BatchTransform(4, pad_last_batch=False),
    ],
    "host random map": lambda: [ms.HostArraySource(data()), ms.RandomHostMapTransform(shaken), BATCH],
    "host dataset": lambda: [ms.DatasetSource([sample(i) for i in range(SAMPLES)], "sequential"), BATCH],
    "host map": lambda: [source(), ms.HostMapTransform(doubled), ms.BatchTransform(4, pad_last_batch=False)],
    "host, batch of batches": lambda: [ms.HostArraySource(data()), BATCH, ms.BatchTransform(2)],
    "view": lambda: [source()[::-1], ms.RandomMapTransform(jitter), BATCH],
    "view of parts": lambda: [ms.views.concat(*ms.views.split(source(), {"a": 0.7, "b": 0.3})), BATCH],
    "host, view": lambda: [
        ms.DiskSampleSource(SAMPLES, sample, prefetch_size=6)[::-1],
        ms.RandomHostMapTransform(shaken),
        BATCH,
    ],
    "host padding": lambda: [
        ms.DatasetSource([{"ids": list(range(i % 4)), "label": i} for i in range(1, SAMPLES)]),
        ms.PadTransform({"ids": 9}, length=3, positions=True),
        ms.RandomMapTransform(jitter),
        BATCH,
    ],
    "host, map of a view": lambda: [source()[::-1].map(shaken, random=True), BATCH],
    "host, fields beside": lambda: [source(), ms.transforms.InfoTransform("image"), BATCH],
    "windows": lambda: [
        ms.views.windows(source(), 3, stride=1, end="pad"),
        ms.RandomMapTransform(jitter),
        ms.MapTransform(first_label),
        BATCH,
    ],
    "host, windows": lambda: [
        ms.views.windows(ms.DiskSampleSource(SAMPLES, sample, prefetch_size=6), 2, stride=1, counts=[5, 6], end="pad"),
        BATCH,
        ms.MapTransform(first_labels),
    ],
    "host, flat map": lambda: [ms.views.flat_map(source(), np.ones(SAMPLES, int), numbered), BATCH],
    "host, packed": lambda: [
        ms.views.pack(ms.DatasetSource([{"label": np.full(4 + i % 3, i)} for i in range(SAMPLES)]), 7, eos=9),
        ms.RandomMapTransform(jitter),
        ms.MapTransform(first_label),
        BATCH,
    ],
    "host callback": lambda: [source(), BATCH, ms.transforms.HostCallbackTransform(brighter)],
    "stream": lambda: [source(), lambda inner: Echo(inner), BATCH],
    "stream, dropped": lambda: [source(), lambda inner: Echo(inner), ms.BatchTransform(4, drop_last=True)],
    "stream, wrapped": lambda: [source(), lambda inner: Echo(inner), ms.BatchTransform(4, pad_last_batch=False)],
    "stream of batches": lambda: [source(), BATCH, lambda inner: Echo(inner), ms.RandomMapTransform(blur)],
    "time series": lambda: [source(), BATCH, TimeSeriesBatchTransform("image")],
    "stream through a buffer of one": lambda: [source(), BufferTransform(1, 1, mode="without_replacement"), BATCH],
    "stream through priorities": lambda: [source(), BufferTransform(1, 1, mode="prioritised")],
}

# What these compute must be the same bits in all programs, as users have them compiled. The others only move samples.
COMPUTED = (
    *("map before", "map after", "map between", "random map before", "random map after", "normalize"),
    *("host arrays", "host function", "stream of batches", "time series", "stream through priorities"),
)
