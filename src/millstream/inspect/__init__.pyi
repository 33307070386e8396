"""Questions about a loader: what it does, whether it keeps its promises, how it is read fastest, what a step had."""

from millstream.inspect._drift import Drift as Drift
from millstream.inspect._drift import DriftRow as DriftRow
from millstream.inspect._drift import drift as drift
from millstream.inspect._explain import ExplainedStage as ExplainedStage
from millstream.inspect._explain import Explanation as Explanation
from millstream.inspect._explain import explain as explain
from millstream.inspect._length_picture import BucketPadding as BucketPadding
from millstream.inspect._length_picture import LengthDistribution as LengthDistribution
from millstream.inspect._length_picture import lengths as lengths
from millstream.inspect._mixture_plan import MixturePlan as MixturePlan
from millstream.inspect._mixture_plan import mixture as mixture
from millstream.inspect._orders import EpochOrders as EpochOrders
from millstream.inspect._orders import OrderedEpoch as OrderedEpoch
from millstream.inspect._orders import order as order
from millstream.inspect._replay import ReplayedStep as ReplayedStep
from millstream.inspect._replay import replay as replay
from millstream.inspect._show import show as show
from millstream.inspect._shown_batch import ShownBatch as ShownBatch
from millstream.inspect._shown_batch import ShownRow as ShownRow
from millstream.inspect._statistics import LeafStatistics as LeafStatistics
from millstream.inspect._statistics import Statistics as Statistics
from millstream.inspect._statistics import statistics as statistics
from millstream.inspect._tallies import NumberSummary as NumberSummary
from millstream.inspect._tune import tune as tune
from millstream.inspect._tuning import TimedStage as TimedStage
from millstream.inspect._tuning import TriedOptions as TriedOptions
from millstream.inspect._tuning import Tuning as Tuning
from millstream.inspect._verification import Difference as Difference
from millstream.inspect._verification import Verification as Verification
from millstream.inspect._verification import VerificationRow as VerificationRow
from millstream.inspect._verify import verify as verify

__all__: list[str]
