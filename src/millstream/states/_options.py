"""What `ManagedState.create` can be asked for, checked."""

import dataclasses
import math
from typing import Any

from millstream.states._accumulate import Accumulate
from millstream.states._precision import Precision
from millstream.text.errors import describe_value, require_bool, require_int, require_positive


@dataclasses.dataclass(frozen=True)
class Options:
    """How the steps of a state compute and update; `ManagedState.create` says what each means."""

    precision: Precision | None = None
    accumulate: Accumulate | None = None
    clip_norm: float | None = None
    ema: float | None = None
    skip_nonfinite: bool = False
    log_norms: bool = False


def checked_options(who: str, accumulate: int | Accumulate, **options: Any) -> Options:
    """The options, or an error that says which is wrong."""
    clip_norm, ema = options["clip_norm"], options["ema"]
    if clip_norm is not None:
        require_positive(who, "clip_norm", clip_norm, "a finite number")
    if ema is not None and not (_is_number(ema) and 0 <= ema < 1):
        raise ValueError(
            f"{who} needs ema, the share of the average that is kept at a step, to be from 0 to below 1, such as "
            f"0.999. Got {describe_value(ema)}."
        )
    for name in ("skip_nonfinite", "log_norms"):
        require_bool(who, name, options[name])
    if not isinstance(accumulate, Accumulate):
        require_int(who, "accumulate", accumulate, least=1)
        accumulate = Accumulate(accumulate)
    return Options(accumulate=None if accumulate.microbatches == 1 else accumulate, **options)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
