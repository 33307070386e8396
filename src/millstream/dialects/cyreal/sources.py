"""The sources of cyreal, under the names of all its versions."""

from millstream._core.contracts import Stream as Source
from millstream.rl import GymnaxSource as GymnaxSource
from millstream.rl import GymnaxSourceState as GymnaxSourceState
from millstream.sources import ArraySampleSource as ArraySampleSource
from millstream.sources import ArraySampleSource as ArraySource
from millstream.sources import DiskSampleSource as DiskSampleSource
from millstream.sources import DiskSampleSource as DiskSource

__all__ = [
    "ArraySampleSource",
    "ArraySource",
    "DiskSampleSource",
    "DiskSource",
    "GymnaxSource",
    "GymnaxSourceState",
    "Source",
]
