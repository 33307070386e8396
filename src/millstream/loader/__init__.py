"""The loader: a pipeline with a state, an iterator and a scan."""

from millstream._core.state import LoaderState as LoaderState
from millstream.loader._iterator import BatchIterator as BatchIterator
from millstream.loader._loader import DataLoader as DataLoader
