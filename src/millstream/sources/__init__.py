"""Where samples come from: one file per kind of source."""

from millstream._core.contracts import IndexedSource as IndexedSource
from millstream._core.contracts import Stream as Stream
from millstream._core.faults import FileChanged as FileChanged
from millstream._core.host_source import HostSource as HostSource
from millstream._core.ordering import Shuffle as Shuffle
from millstream._core.samples import spec_of as spec_of
from millstream.sources._array import ArraySampleSource as ArraySampleSource
from millstream.sources._csv import CsvSource as CsvSource
from millstream.sources._disk import DatasetSource as DatasetSource
from millstream.sources._disk import DiskSampleSource as DiskSampleSource
from millstream.sources._fill import FillSource as FillSource
from millstream.sources._host_array import HostArraySource as HostArraySource
from millstream.sources._idx import IdxSource as IdxSource
from millstream.sources._image_folder import ImageFolderSource as ImageFolderSource
from millstream.sources._npy import NpySource as NpySource
