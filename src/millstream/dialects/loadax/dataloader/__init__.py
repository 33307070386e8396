"""Loaders, under the modules that loadax keeps them in."""

from millstream.dialects.loadax._builder import DataLoader as DataLoader
from millstream.dialects.loadax._builder import DataloaderBuilder as DataloaderBuilder
from millstream.dialects.loadax._loader import Dataloader as Dataloader
