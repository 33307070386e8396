"""The API of loadax, over the engine of Millstream."""

from millstream.dialects.loadax._builder import DataLoader as DataLoader
from millstream.dialects.loadax._builder import DataloaderBuilder as DataloaderBuilder
from millstream.dialects.loadax._dataset import Dataset as Dataset
from millstream.dialects.loadax._dataset import FilteredDataset as FilteredDataset
from millstream.dialects.loadax._dataset import Indexable as Indexable
from millstream.dialects.loadax._dataset import MappedBatchDataset as MappedBatchDataset
from millstream.dialects.loadax._dataset import MappedDataset as MappedDataset
from millstream.dialects.loadax._loader import Batcher as Batcher
from millstream.dialects.loadax._loader import Dataloader as Dataloader
from millstream.dialects.loadax._loader import DistributedDataLoader as DistributedDataLoader
from millstream.dialects.loadax._loader import FixedBatchStrategy as FixedBatchStrategy
from millstream.dialects.loadax._loader import ListBatcher as ListBatcher
from millstream.dialects.loadax._loader import Loader as Loader
from millstream.dialects.loadax._loader import LoaderIterator as LoaderIterator
from millstream.dialects.loadax._loader import Progress as Progress
from millstream.dialects.loadax._loader import StackBatcher as StackBatcher
from millstream.dialects.loadax._memory import InMemoryDataset as InMemoryDataset
from millstream.dialects.loadax._memory import RangeDataset as RangeDataset
from millstream.dialects.loadax._memory import SimpleDataset as SimpleDataset
from millstream.dialects.loadax._parts import CombinedDataset as CombinedDataset
from millstream.dialects.loadax._parts import PartialDataset as PartialDataset
from millstream.dialects.loadax._parts import Shardable as Shardable
from millstream.dialects.loadax._parts import ShardedDataset as ShardedDataset
from millstream.dialects.loadax._parts import compute_shard_boundaries as compute_shard_boundaries
from millstream.dialects.loadax._random import SampledDataset as SampledDataset
from millstream.dialects.loadax._random import SampledDatasetWithoutReplacement as SampledDatasetWithoutReplacement
from millstream.dialects.loadax._random import SampledDatasetWithReplacement as SampledDatasetWithReplacement
from millstream.dialects.loadax._random import Shuffleable as Shuffleable
from millstream.dialects.loadax._random import ShuffledDataset as ShuffledDataset
from millstream.dialects.loadax._sharding import JaxShardingStrategy as JaxShardingStrategy

__all__: list[str]
