"""Where samples come from: one file per kind of source."""

from millstream.sources._array import ArraySampleSource as ArraySampleSource
