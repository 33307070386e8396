"""The sources of cyreal, under the names of all its versions."""

from millstream.dialects._bare_sources import ArraySampleSource as ArraySampleSource
from millstream.dialects._bare_sources import ArraySampleSource as ArraySource
from millstream.dialects._bare_sources import DiskSampleSource as DiskSampleSource
from millstream.dialects._bare_sources import DiskSampleSource as DiskSource
from millstream.reading.contracts import Stream as Source
from millstream.rl import GymnaxSource as GymnaxSource
from millstream.rl import GymnaxSourceState as GymnaxSourceState

__all__ = [
    "ArraySampleSource",
    "ArraySource",
    "DiskSampleSource",
    "DiskSource",
    "GymnaxSource",
    "GymnaxSourceState",
    "Source",
]
