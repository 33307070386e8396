"""cereal, the first form of cyreal: change `from cereal` to `from millstream.dialects.cereal`, and the rest stays."""

from millstream.datasets import CIFAR10Dataset as CIFAR10Dataset
from millstream.datasets import MNISTDataset as MNISTDataset
from millstream.datasets import dataset_to_jax as dataset_to_jax
from millstream.dialects._bare_sources import ArraySampleSource as ArraySampleSource
from millstream.dialects.cereal._batch import Batch as Batch
from millstream.dialects.cereal._loader import DataLoader as DataLoader
from millstream.dialects.cereal._sources import DiskSampleSource as DiskSampleSource
from millstream.dialects.cereal._sources import GymnaxSource as GymnaxSource
from millstream.dialects.cereal._sources import MNISTDiskSource as MNISTDiskSource
from millstream.dialects.cereal._transforms import BatchTransform as BatchTransform
from millstream.dialects.cereal._transforms import DevicePutTransform as DevicePutTransform
from millstream.dialects.cereal._transforms import FlattenImageTransform as FlattenImageTransform
from millstream.dialects.cereal._transforms import HostCallbackTransform as HostCallbackTransform
from millstream.dialects.cereal._transforms import MapTransform as MapTransform
from millstream.dialects.cereal._transforms import NormalizeImageTransform as NormalizeImageTransform
from millstream.pipeline.state import LoaderState as LoaderState
from millstream.reading.contracts import Stream as Source

__all__ = [
    "ArraySampleSource",
    "Batch",
    "BatchTransform",
    "CIFAR10Dataset",
    "DataLoader",
    "DevicePutTransform",
    "DiskSampleSource",
    "FlattenImageTransform",
    "GymnaxSource",
    "HostCallbackTransform",
    "LoaderState",
    "MNISTDataset",
    "MNISTDiskSource",
    "MapTransform",
    "NormalizeImageTransform",
    "Source",
    "dataset_to_jax",
]
