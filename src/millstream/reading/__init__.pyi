"""Where samples are read: executors and what they are made of, and caches on disk."""

from millstream.plan.planned import Request as Request
from millstream.reading._settings import is_worker as is_worker
from millstream.reading._settings import settings as settings
from millstream.reading.batch_holders import debug_batch_references as debug_batch_references
from millstream.reading.caches import ArrayCache as ArrayCache
from millstream.reading.caches import BatchCache as BatchCache
from millstream.reading.executor import Backend as Backend
from millstream.reading.executor import Executor as Executor
from millstream.reading.executor import InGraph as InGraph
from millstream.reading.processes import Processes as Processes
from millstream.reading.reading import ReadBatch as ReadBatch
from millstream.reading.reading import Reading as Reading
from millstream.reading.reading import Report as Report
from millstream.reading.slots import Layout as Layout
from millstream.reading.threads import Threads as Threads

__all__: list[str]
