"""The data sets of cyreal."""

from millstream.datasets import CelebADataset as CelebADataset
from millstream.datasets import CIFAR10Dataset as CIFAR10Dataset
from millstream.datasets import CIFAR100Dataset as CIFAR100Dataset
from millstream.datasets import DailyMinTemperaturesDataset as DailyMinTemperaturesDataset
from millstream.datasets import EMNISTDataset as EMNISTDataset
from millstream.datasets import FashionMNISTDataset as FashionMNISTDataset
from millstream.datasets import KMNISTDataset as KMNISTDataset
from millstream.datasets import MNISTDataset as MNISTDataset
from millstream.datasets import SunspotsDataset as SunspotsDataset
