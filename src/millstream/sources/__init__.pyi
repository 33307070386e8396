"""Where samples come from: one file per kind of source."""

from millstream.plan.ordering import Shuffle as Shuffle
from millstream.preparation.prepared_source import PreparedSource as PreparedSource
from millstream.reading.contracts import IndexedSource as IndexedSource
from millstream.reading.contracts import Stream as Stream
from millstream.reading.host_source import HostSource as HostSource
from millstream.reading.iterable import IterableSource as IterableSource
from millstream.reading.samples import spec_of as spec_of
from millstream.sources.array import ArraySampleSource as ArraySampleSource
from millstream.sources.csv import CsvSource as CsvSource
from millstream.sources.disk import DatasetSource as DatasetSource
from millstream.sources.disk import DiskSampleSource as DiskSampleSource
from millstream.sources.fill import FillSource as FillSource
from millstream.sources.host_array import HostArraySource as HostArraySource
from millstream.sources.idx import IdxSource as IdxSource
from millstream.sources.image_folder import ImageFolderSource as ImageFolderSource
from millstream.sources.lines import JsonlSource as JsonlSource
from millstream.sources.lines import TextLinesSource as TextLinesSource
from millstream.sources.mds import MdsSource as MdsSource
from millstream.sources.npy import NpySource as NpySource
from millstream.sources.tfrecord import TFRecordSource as TFRecordSource
from millstream.sources.token_file import TokenFileSource as TokenFileSource

__all__: list[str]
