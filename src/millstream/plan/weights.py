"""Draws by weights that are given as an array."""

import numpy as np

from millstream.plan.selection import Drawn, drawn
from millstream.text.errors import describe_leaf


def drawn_by(caller: str, weights: np.ndarray, samples: int, length: int, *, once: bool) -> tuple[Drawn, np.ndarray]:
    """The function and the table of `length` draws from `samples` by weight.

    Args:
        caller: The caller's name, for errors.
        weights: A number per sample; refused unless they are finite, not negative and not all zero.
        samples: How many there are.
        length: How many draws an epoch has.
        once: Whether no sample may come twice.
    """
    found = _checked(caller, weights, samples)
    return drawn(_limited(caller, found, length), length, once=True) if once else drawn(found, length)


def _checked(caller: str, weights: np.ndarray, length: int) -> np.ndarray:
    if weights.shape != (length,) or weights.dtype.kind not in "biuf":
        raise ValueError(f"{caller} needs a number for each of the {length:,} samples. Got {describe_leaf(weights)}.")
    found = weights.astype(np.float64)
    wrong = ~np.isfinite(found) | (found < 0)
    if wrong.any():
        first = int(np.argmax(wrong))
        raise ValueError(
            f"{caller} needs weights that are finite and not negative. Sample {first:,} has {found[first]}."
        )
    most = found.max()
    if most == 0.0:
        raise ValueError(f"{caller} needs at least one weight above zero. All are zero.")
    return found if 1e-200 < most < 1e200 else found / most  # sums and shares of others would leave the floats


def _limited(caller: str, weights: np.ndarray, count: int) -> np.ndarray:
    """Shares of `count` draws in proportion to the weights, but at most 1 each."""
    positive = np.count_nonzero(weights)
    if count > positive:
        raise ValueError(
            f"{caller} without replacement cannot draw {count:,} samples: {positive:,} have a weight above zero. "
            f"Pass samples={positive} or less, or replacement=True."
        )
    shares = weights * (count / weights.sum())
    while (over := shares > 1.0).any():
        # Those above 1 come once; the others share what is left of the draws.
        full = over | (shares == 1.0)
        rest = weights * ~full
        shares = np.where(full, 1.0, rest * ((count - np.count_nonzero(full)) / max(rest.sum(), np.finfo(float).tiny)))
    return shares
