"""What happens to samples and batches: one file per idea."""

from millstream.pipeline.transform import Transform as Transform
from millstream.transforms.batch import BatchTransform as BatchTransform
from millstream.transforms.buffer import BufferTransform as BufferTransform
from millstream.transforms.buffer_stream import set_buffer_priorities as set_buffer_priorities
from millstream.transforms.device import DevicePutTransform as DevicePutTransform
from millstream.transforms.host import HostCallbackTransform as HostCallbackTransform
from millstream.transforms.host import HostMapTransform as HostMapTransform
from millstream.transforms.host import InfoTransform as InfoTransform
from millstream.transforms.host import RandomHostMapTransform as RandomHostMapTransform
from millstream.transforms.image import FlattenImageTransform as FlattenImageTransform
from millstream.transforms.image import NormalizeImageTransform as NormalizeImageTransform
from millstream.transforms.map import MapTransform as MapTransform
from millstream.transforms.map import RandomMapTransform as RandomMapTransform
from millstream.transforms.pad import PadTransform as PadTransform
from millstream.transforms.rename import RenameTransform as RenameTransform
from millstream.transforms.segments import segment_mask as segment_mask
from millstream.transforms.segments import segment_positions as segment_positions
from millstream.transforms.time_series import TimeSeriesBatchTransform as TimeSeriesBatchTransform

__all__: list[str]
