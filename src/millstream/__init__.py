"""Millstream: data pipelines and training loops for JAX.

A lazy table of contents: a name loads its room when it is first used, so that importing `millstream` costs nothing
and a worker process can use the NumPy-only rooms without loading JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream import checkpoints as checkpoints
    from millstream import datasets as datasets
    from millstream import rl as rl
    from millstream import sharding as sharding
    from millstream.callbacks import csv_logger as csv_logger
    from millstream.callbacks import early_stopping as early_stopping
    from millstream.callbacks import jsonl_logger as jsonl_logger
    from millstream.callbacks import keras_bar as keras_bar
    from millstream.callbacks import log_learning_rate as log_learning_rate
    from millstream.callbacks import mlflow_logger as mlflow_logger
    from millstream.callbacks import profile as profile
    from millstream.callbacks import record as record
    from millstream.callbacks import rich_bar as rich_bar
    from millstream.callbacks import tensorboard as tensorboard
    from millstream.callbacks import terminate_on_nan as terminate_on_nan
    from millstream.callbacks import throughput as throughput
    from millstream.callbacks import tqdm_bar as tqdm_bar
    from millstream.callbacks import wandb_logger as wandb_logger
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
    from millstream.loader import Difference as Difference
    from millstream.loader import ExplainedStage as ExplainedStage
    from millstream.loader import Explanation as Explanation
    from millstream.loader import LoaderState as LoaderState
    from millstream.loader import LoaderStats as LoaderStats
    from millstream.loader import MixedLoader as MixedLoader
    from millstream.loader import StreamItem as StreamItem
    from millstream.loader import StreamIterator as StreamIterator
    from millstream.loader import TimedStage as TimedStage
    from millstream.loader import TrainStream as TrainStream
    from millstream.loader import TriedOptions as TriedOptions
    from millstream.loader import Tuning as Tuning
    from millstream.loader import Verification as Verification
    from millstream.loader import VerificationFailed as VerificationFailed
    from millstream.loader import VerificationRow as VerificationRow
    from millstream.loops import Callback as Callback
    from millstream.loops import Elapsed as Elapsed
    from millstream.loops import Entries as Entries
    from millstream.loops import History as History
    from millstream.loops import Logs as Logs
    from millstream.loops import LoopOutput as LoopOutput
    from millstream.loops import LoopState as LoopState
    from millstream.loops import Metrics as Metrics
    from millstream.loops import Observer as Observer
    from millstream.loops import Overview as Overview
    from millstream.loops import OverviewRow as OverviewRow
    from millstream.loops import Period as Period
    from millstream.loops import Preempted as Preempted
    from millstream.loops import SavedRun as SavedRun
    from millstream.loops import Schedule as Schedule
    from millstream.loops import after as after
    from millstream.loops import always as always
    from millstream.loops import at as at
    from millstream.loops import checkpoint as checkpoint
    from millstream.loops import elapse as elapse
    from millstream.loops import every as every
    from millstream.loops import first as first
    from millstream.loops import history as history
    from millstream.loops import inner_loop as inner_loop
    from millstream.loops import last as last
    from millstream.loops import logs as logs
    from millstream.loops import loop as loop
    from millstream.loops import never as never
    from millstream.loops import noop as noop
    from millstream.loops import on_epoch_begin as on_epoch_begin
    from millstream.loops import on_epoch_end as on_epoch_end
    from millstream.loops import on_predict_batch_begin as on_predict_batch_begin
    from millstream.loops import on_predict_batch_end as on_predict_batch_end
    from millstream.loops import on_predict_begin as on_predict_begin
    from millstream.loops import on_predict_end as on_predict_end
    from millstream.loops import on_predict_step as on_predict_step
    from millstream.loops import on_reset_step as on_reset_step
    from millstream.loops import on_test_batch_begin as on_test_batch_begin
    from millstream.loops import on_test_batch_end as on_test_batch_end
    from millstream.loops import on_test_begin as on_test_begin
    from millstream.loops import on_test_end as on_test_end
    from millstream.loops import on_test_step as on_test_step
    from millstream.loops import on_train_batch_begin as on_train_batch_begin
    from millstream.loops import on_train_batch_end as on_train_batch_end
    from millstream.loops import on_train_begin as on_train_begin
    from millstream.loops import on_train_end as on_train_end
    from millstream.loops import on_train_step as on_train_step
    from millstream.loops import once as once
    from millstream.loops import overview as overview
    from millstream.loops import piecewise as piecewise
    from millstream.loops import predict_loop as predict_loop
    from millstream.loops import register_adapter as register_adapter
    from millstream.loops import restore as restore
    from millstream.loops import test_loop as test_loop
    from millstream.loops import train_loop as train_loop
    from millstream.sources import ArraySampleSource as ArraySampleSource
    from millstream.sources import CsvSource as CsvSource
    from millstream.sources import DatasetSource as DatasetSource
    from millstream.sources import DiskSampleSource as DiskSampleSource
    from millstream.sources import FileChanged as FileChanged
    from millstream.sources import FillSource as FillSource
    from millstream.sources import HostArraySource as HostArraySource
    from millstream.sources import HostSource as HostSource
    from millstream.sources import IdxSource as IdxSource
    from millstream.sources import ImageFolderSource as ImageFolderSource
    from millstream.sources import IndexedSource as IndexedSource
    from millstream.sources import NpySource as NpySource
    from millstream.sources import Shuffle as Shuffle
    from millstream.sources import Stream as Stream
    from millstream.sources import spec_of as spec_of
    from millstream.states import create_equinox_state as create_equinox_state
    from millstream.states import create_flax_state as create_flax_state
    from millstream.states import create_haiku_state as create_haiku_state
    from millstream.states import create_nnx_state as create_nnx_state
    from millstream.states import managed as managed
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
    "callbacks": [
        "csv_logger",
        "early_stopping",
        "jsonl_logger",
        "keras_bar",
        "log_learning_rate",
        "mlflow_logger",
        "profile",
        "record",
        "rich_bar",
        "tensorboard",
        "terminate_on_nan",
        "throughput",
        "tqdm_bar",
        "wandb_logger",
    ],
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
        "Difference",
        "ExplainedStage",
        "Explanation",
        "LoaderState",
        "LoaderStats",
        "MixedLoader",
        "StreamItem",
        "StreamIterator",
        "TimedStage",
        "TrainStream",
        "TriedOptions",
        "Tuning",
        "Verification",
        "VerificationFailed",
        "VerificationRow",
    ],
    "loops": [
        "Callback",
        "Elapsed",
        "Entries",
        "History",
        "Logs",
        "LoopOutput",
        "LoopState",
        "Metrics",
        "Observer",
        "Overview",
        "OverviewRow",
        "Period",
        "Preempted",
        "SavedRun",
        "Schedule",
        "after",
        "always",
        "at",
        "checkpoint",
        "elapse",
        "every",
        "first",
        "history",
        "inner_loop",
        "last",
        "logs",
        "loop",
        "never",
        "noop",
        "on_epoch_begin",
        "on_epoch_end",
        "on_predict_batch_begin",
        "on_predict_batch_end",
        "on_predict_begin",
        "on_predict_end",
        "on_predict_step",
        "on_reset_step",
        "on_test_batch_begin",
        "on_test_batch_end",
        "on_test_begin",
        "on_test_end",
        "on_test_step",
        "on_train_batch_begin",
        "on_train_batch_end",
        "on_train_begin",
        "on_train_end",
        "on_train_step",
        "once",
        "overview",
        "piecewise",
        "predict_loop",
        "register_adapter",
        "restore",
        "test_loop",
        "train_loop",
    ],
    "sources": [
        "ArraySampleSource",
        "CsvSource",
        "DatasetSource",
        "DiskSampleSource",
        "FileChanged",
        "FillSource",
        "HostArraySource",
        "HostSource",
        "IdxSource",
        "ImageFolderSource",
        "IndexedSource",
        "NpySource",
        "Shuffle",
        "Stream",
        "spec_of",
    ],
    "states": [
        "create_equinox_state",
        "create_flax_state",
        "create_haiku_state",
        "create_nnx_state",
        "managed",
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
_ROOMS = ("checkpoints", "datasets", "rl", "sharding")
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
