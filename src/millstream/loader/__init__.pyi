"""Loaders: a pipeline with a state, an iterator and a scan, and what they give."""

from millstream.loader.batch_info import BatchInfo as BatchInfo
from millstream.loader.iterator import BatchIterator as BatchIterator
from millstream.loader.loader import DataLoader as DataLoader
from millstream.loader.mixed import MixedLoader as MixedLoader
from millstream.loader.phased import phases as phases
from millstream.loader.train_stream import StreamItem as StreamItem
from millstream.loader.train_stream import StreamIterator as StreamIterator
from millstream.loader.train_stream import TrainStream as TrainStream
from millstream.pipeline.state import LoaderState as LoaderState
from millstream.reading.stats import LoaderStats as LoaderStats

__all__: list[str]
