"""The loader: a pipeline with a state, an iterator and a scan. What it finds out about itself is loaded on demand."""

from typing import TYPE_CHECKING

from millstream._core.lazy import loads_on_demand
from millstream._core.state import LoaderState as LoaderState
from millstream._core.stats import LoaderStats as LoaderStats
from millstream.loader._info import BatchInfo as BatchInfo
from millstream.loader._iterator import BatchIterator as BatchIterator
from millstream.loader._loader import DataLoader as DataLoader
from millstream.loader._mixed import MixedLoader as MixedLoader
from millstream.loader._stream_items import StreamItem as StreamItem
from millstream.loader._stream_items import StreamIterator as StreamIterator
from millstream.loader._train_stream import TrainStream as TrainStream

if TYPE_CHECKING:
    from millstream.loader._explanation.explain import Explanation as Explanation
    from millstream.loader._explanation.stage import ExplainedStage as ExplainedStage
    from millstream.loader._tuning.result import Tuning as Tuning
    from millstream.loader._tuning.stages import TimedStage as TimedStage
    from millstream.loader._tuning.trials import TriedOptions as TriedOptions
    from millstream.loader._verification.result import Difference as Difference
    from millstream.loader._verification.result import Verification as Verification
    from millstream.loader._verification.result import VerificationFailed as VerificationFailed
    from millstream.loader._verification.result import VerificationRow as VerificationRow

_CONTENTS = {
    "_explanation.explain": ["Explanation"],
    "_explanation.stage": ["ExplainedStage"],
    "_tuning.result": ["Tuning"],
    "_tuning.stages": ["TimedStage"],
    "_tuning.trials": ["TriedOptions"],
    "_verification.result": ["Difference", "Verification", "VerificationFailed", "VerificationRow"],
}

__getattr__ = loads_on_demand(__name__, _CONTENTS)
