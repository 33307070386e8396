"""Which samples of a source there are."""

from millstream.files.plan_folder import PlanFolder as PlanFolder
from millstream.files.plan_folder import plans as plans
from millstream.reading.view import View as View
from millstream.views.draws import balanced as balanced
from millstream.views.draws import weighted as weighted
from millstream.views.joins import concat as concat
from millstream.views.joins import zip as zip
from millstream.views.lengths import buckets as buckets
from millstream.views.mixtures import levels as levels
from millstream.views.mixtures import mix as mix
from millstream.views.mixtures import ramp as ramp
from millstream.views.mixtures import reweight as reweight
from millstream.views.order import permutation as permutation
from millstream.views.packed import pack as pack
from millstream.views.parts import folds as folds
from millstream.views.parts import split as split
from millstream.views.regrouped import flat_map as flat_map
from millstream.views.regrouped import windows as windows
from millstream.views.subsets import repeat as repeat
from millstream.views.subsets import select as select

__all__: list[str]
