"""Data sets by name, all of one shape: `len`, `[i]`, `as_array_dict()` and `make_disk_source()`."""

from millstream.datasets._celeba import CelebADataset as CelebADataset
from millstream.datasets._cifar import CIFAR10Dataset as CIFAR10Dataset
from millstream.datasets._cifar import CIFAR100Dataset as CIFAR100Dataset
from millstream.datasets._convert import dataset_to_jax as dataset_to_jax
from millstream.datasets._digits import DigitsDataset as DigitsDataset
from millstream.datasets._idx_datasets import EMNISTDataset as EMNISTDataset
from millstream.datasets._idx_datasets import FashionMNISTDataset as FashionMNISTDataset
from millstream.datasets._idx_datasets import KMNISTDataset as KMNISTDataset
from millstream.datasets._idx_datasets import MNISTDataset as MNISTDataset
from millstream.datasets._idx_datasets import MNISTDiskSource as MNISTDiskSource
from millstream.datasets._time_series import DailyMinTemperaturesDataset as DailyMinTemperaturesDataset
from millstream.datasets._time_series import SunspotsDataset as SunspotsDataset
from millstream.datasets._time_series import time_series_windows as time_series_windows

__all__: list[str]
