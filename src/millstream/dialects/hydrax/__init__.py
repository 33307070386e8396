"""hydrax, as it is documented: training and validation batches from loader processes, over Millstream's engine.

Importing this loads no JAX, so that loader processes may.
"""

from millstream.dialects.hydrax._batch import Batch as Batch
from millstream.dialects.hydrax._batch import TrainingBatch as TrainingBatch
from millstream.dialects.hydrax._batch import ValidationBatch as ValidationBatch
from millstream.dialects.hydrax._data_group import ArrayLayout as ArrayLayout
from millstream.dialects.hydrax._data_group import DataGroup as DataGroup
from millstream.dialects.hydrax._dataloader import Dataloader as Dataloader
from millstream.errors import WorkerStalled as BatchTimeoutError
from millstream.reading import is_worker as is_worker
from millstream.reading.batch_holders import debug_batch_references as debug_batch_references

__all__ = [
    "ArrayLayout",
    "Batch",
    "BatchTimeoutError",
    "DataGroup",
    "Dataloader",
    "TrainingBatch",
    "ValidationBatch",
    "debug_batch_references",
    "is_worker",
]
