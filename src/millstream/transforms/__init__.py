"""What happens to samples and batches: one file per idea."""

from millstream._core.transform import Transform as Transform
from millstream.transforms._batch import BatchTransform as BatchTransform
from millstream.transforms._buffer import BufferTransform as BufferTransform
from millstream.transforms._buffer_stream import set_buffer_priorities as set_buffer_priorities
from millstream.transforms._device import DevicePutTransform as DevicePutTransform
from millstream.transforms._host import HostCallbackTransform as HostCallbackTransform
from millstream.transforms._host import HostMapTransform as HostMapTransform
from millstream.transforms._host import RandomHostMapTransform as RandomHostMapTransform
from millstream.transforms._image import FlattenImageTransform as FlattenImageTransform
from millstream.transforms._image import NormalizeImageTransform as NormalizeImageTransform
from millstream.transforms._map import MapTransform as MapTransform
from millstream.transforms._map import RandomMapTransform as RandomMapTransform
from millstream.transforms._rename import RenameTransform as RenameTransform
from millstream.transforms._time_series import TimeSeriesBatchTransform as TimeSeriesBatchTransform
