"""Millstream: data pipelines and training loops for JAX.

A lazy table of contents: a name loads its room when it is first used, so that importing `millstream` costs nothing
and a worker process can use the NumPy-only rooms without loading JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream import datasets as datasets
    from millstream import rl as rl
    from millstream import sharding as sharding
    from millstream.host import ArrayCache as ArrayCache
    from millstream.host import BatchCache as BatchCache
    from millstream.host import InGraph as InGraph
    from millstream.host import Processes as Processes
    from millstream.host import SharedMemoryFull as SharedMemoryFull
    from millstream.host import Threads as Threads
    from millstream.host import WorkerCrashed as WorkerCrashed
    from millstream.host import WorkerStalled as WorkerStalled
    from millstream.host import debug_batch_references as debug_batch_references
    from millstream.host import is_worker as is_worker
    from millstream.host import settings as settings
    from millstream.loader import BatchInfo as BatchInfo
    from millstream.loader import BatchIterator as BatchIterator
    from millstream.loader import DataLoader as DataLoader
    from millstream.loader import LoaderState as LoaderState
    from millstream.loader import LoaderStats as LoaderStats
    from millstream.loader import MixedLoader as MixedLoader
    from millstream.loader import StreamItem as StreamItem
    from millstream.loader import StreamIterator as StreamIterator
    from millstream.loader import TrainStream as TrainStream
    from millstream.sources import ArraySampleSource as ArraySampleSource
    from millstream.sources import CsvSource as CsvSource
    from millstream.sources import DatasetSource as DatasetSource
    from millstream.sources import DiskSampleSource as DiskSampleSource
    from millstream.sources import FillSource as FillSource
    from millstream.sources import HostArraySource as HostArraySource
    from millstream.sources import IdxSource as IdxSource
    from millstream.sources import ImageFolderSource as ImageFolderSource
    from millstream.sources import NpySource as NpySource
    from millstream.sources import Shuffle as Shuffle
    from millstream.transforms import BatchTransform as BatchTransform
    from millstream.transforms import BufferTransform as BufferTransform
    from millstream.transforms import DevicePutTransform as DevicePutTransform
    from millstream.transforms import FlattenImageTransform as FlattenImageTransform
    from millstream.transforms import HostCallbackTransform as HostCallbackTransform
    from millstream.transforms import HostMapTransform as HostMapTransform
    from millstream.transforms import MapTransform as MapTransform
    from millstream.transforms import NormalizeImageTransform as NormalizeImageTransform
    from millstream.transforms import RandomHostMapTransform as RandomHostMapTransform
    from millstream.transforms import RandomMapTransform as RandomMapTransform
    from millstream.transforms import RenameTransform as RenameTransform
    from millstream.transforms import TimeSeriesBatchTransform as TimeSeriesBatchTransform
    from millstream.transforms import Transform as Transform
    from millstream.transforms import set_buffer_priorities as set_buffer_priorities

__version__ = "0.1.0.dev0"

_CONTENTS = {
    "host": [
        "ArrayCache",
        "BatchCache",
        "InGraph",
        "Processes",
        "SharedMemoryFull",
        "Threads",
        "WorkerCrashed",
        "WorkerStalled",
        "debug_batch_references",
        "is_worker",
        "settings",
    ],
    "loader": [
        "BatchInfo",
        "BatchIterator",
        "DataLoader",
        "LoaderState",
        "LoaderStats",
        "MixedLoader",
        "StreamItem",
        "StreamIterator",
        "TrainStream",
    ],
    "sources": [
        "ArraySampleSource",
        "CsvSource",
        "DatasetSource",
        "DiskSampleSource",
        "FillSource",
        "HostArraySource",
        "IdxSource",
        "ImageFolderSource",
        "NpySource",
        "Shuffle",
    ],
    "transforms": [
        "BatchTransform",
        "BufferTransform",
        "DevicePutTransform",
        "FlattenImageTransform",
        "HostCallbackTransform",
        "HostMapTransform",
        "MapTransform",
        "NormalizeImageTransform",
        "RandomHostMapTransform",
        "RandomMapTransform",
        "RenameTransform",
        "TimeSeriesBatchTransform",
        "Transform",
        "set_buffer_priorities",
    ],
}
_ROOMS = ("datasets", "rl", "sharding")
_HOMES = {name: room for room, names in _CONTENTS.items() for name in names}

__all__ = [*_ROOMS, *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"millstream.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"millstream.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'millstream' has no attribute {name!r}. It has: {', '.join(sorted(__all__))}.")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
