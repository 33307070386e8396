"""What executors are made of."""

from millstream.plan.planned import Request as Request
from millstream.reading.executor import Backend as Backend
from millstream.reading.executor import Executor as Executor
from millstream.reading.reading import ReadBatch as ReadBatch
from millstream.reading.reading import Reading as Reading
from millstream.reading.reading import Report as Report
from millstream.reading.slots import Layout as Layout

__all__: list[str]
