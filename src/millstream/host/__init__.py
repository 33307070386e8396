"""Where samples are read: the executors, and caches on disk. Importing this room does not load JAX."""

from millstream._core.faults import SharedMemoryFull as SharedMemoryFull
from millstream._core.faults import WorkerCrashed as WorkerCrashed
from millstream._core.faults import WorkerStalled as WorkerStalled
from millstream._core.settings import settings as settings
from millstream.host._cache import ArrayCache as ArrayCache
from millstream.host._cache import BatchCache as BatchCache
from millstream.host._in_graph import InGraph as InGraph
from millstream.host._processes import Processes as Processes
from millstream.host._references import debug_batch_references as debug_batch_references
from millstream.host._role import is_worker as is_worker
from millstream.host._threads import Threads as Threads
