"""What a ramp of learning rates shows: where the loss falls, where it diverges, and what follows."""

import dataclasses
import os
import pathlib
from typing import TYPE_CHECKING, overload

import numpy as np

from millstream.experiments._drawing import draw_rates
from millstream.text.errors import describe_value
from millstream.text.html import html_curves, html_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHARE = 1 / 20  # of the steps, over which losses are averaged
FEWEST = 10  # steps before the loss diverges
_CLEAR = 8.0  # how many times its own noise the smoothed curve has to fall; that of noise alone spans about 4
_FLAT = 0.01  # a fall by less than this share of the loss is none


@dataclasses.dataclass(frozen=True, eq=False)
class LearningRateCurve:
    """The losses of a ramp of learning rates, up to where they diverge; made by `ms.find_learning_rate`.

    Smoothed is the mean over a twentieth of the steps, half of them on each side. The loss diverges where a value is
    not finite, or where the smoothed loss is above its first value and more than three times its lowest value above
    that. The suggestion is the rate at which the smoothed loss falls most steeply over the logarithm of the rate; or a
    tenth of the rate at which it diverges, if that is less. There is none if the smoothed loss falls by less than 1 %
    or by less than eight times its noise, or if it diverges within the first steps: `reason` says which of all it is.

    Example:
        >>> rates = np.geomspace(1e-4, 1.0, 100)
        >>> curve = ms.loops.LearningRateCurve.of(rates, 1 / (1 + (rates / 0.01)))
        >>> curve.reason
        'where the smoothed loss falls most steeply'
        >>> 0.005 < curve.suggestion < 0.02
        True

    Attributes:
        rates: The learning rate of each step.
        losses: The loss of each step, before its update.
        smoothed: The same, averaged.
        suggestion: A rate to begin with; None if the curve does not tell.
        reason: Why it is that rate, or why there is none.
        diverges_at: The rate from which on the loss diverges; None if it does not.
    """

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    suggestion: float | None
    reason: str
    diverges_at: float | None

    @classmethod
    def of(cls, rates: np.ndarray, losses: np.ndarray) -> "LearningRateCurve":
        """The curve of these rates and losses.

        Args:
            rates: In ascending order, all above 0.
            losses: One for each.
        """
        rates, losses = _floats("rates", rates), _floats("losses", losses)
        if rates.shape != losses.shape or len(rates) < FEWEST or not _ascends(rates):
            raise ValueError(
                f"LearningRateCurve.of needs at least {FEWEST} rates above 0 in ascending order, and losses for each. "
                f"Got shapes {rates.shape} and {losses.shape}."
            )
        half = max(int(len(losses) * _SHARE / 2), 1)
        finite = len(losses) if np.isfinite(losses).all() else int(np.argmin(np.isfinite(losses)))
        smoothed = _means(losses[:finite], half)
        end = _divergence(smoothed)
        diverges_at = float(rates[end]) if end < len(losses) else None
        rates, losses, smoothed = rates[:end], losses[:end], _means(losses[:end], half)
        suggestion, reason = _suggestion(rates, losses, smoothed, half, diverges_at)
        return cls(rates, losses, smoothed, suggestion, reason, diverges_at)

    @overload
    def plot(self, path: None = None, *, dpi: int = 150) -> "Figure": ...
    @overload
    def plot(self, path: str | os.PathLike[str], *, dpi: int = 150) -> pathlib.Path: ...
    def plot(self, path: str | os.PathLike[str] | None = None, *, dpi: int = 150) -> "Figure | pathlib.Path":
        """An image of the curve, with the suggestion.

        Args:
            path: Where to write it, as PNG or whatever else its suffix says.
            dpi: Dots per inch of the file.

        Returns:
            The path, or without one a `matplotlib.figure.Figure`, which a notebook shows.
        """
        figure = draw_rates("LearningRateCurve.plot", self)
        return figure if path is None else figure.save("LearningRateCurve.plot", path, dpi)

    def _repr_html_(self) -> str:
        logarithms = np.log10(self.rates).tolist()
        curves = [("loss", logarithms, self.losses.tolist()), ("smoothed", logarithms, self.smoothed.tolist())]
        mark = [] if self.suggestion is None else [(float(np.log10(self.suggestion)), f"{self.suggestion:.2g}")]
        picture = html_curves("loss by learning rate", curves, x_text=lambda x: f"{10**x:.1e}", marks=mark)
        return html_text(str(self)) + f"<div>{picture}</div>"

    def __str__(self) -> str:
        lines = [
            f"learning rate  {self._rate_text(self.suggestion)}: {self.reason}",
            f"tried          {len(self.rates)} rates, {self._ends()}",
        ]
        if len(self.losses):
            lowest = int(np.argmin(self.smoothed))
            lines.append(
                f"loss           {self.losses[0]:.4g} at first, lowest {self.smoothed[lowest]:.4g} (smoothed) at "
                f"{self.rates[lowest]:.2g}"
            )
        return "\n".join(lines)

    def _rate_text(self, rate: float | None) -> str:
        return "cannot be told" if rate is None else f"{rate:.2g}"

    def _ends(self) -> str:
        through = f"{self.rates[0]:.2g} to {self.rates[-1]:.2g}" if len(self.rates) else "none of them finite"
        return f"{through}; " + (
            "it never diverges" if self.diverges_at is None else f"diverges at {self.diverges_at:.2g}"
        )

    def __repr__(self) -> str:
        return (
            f"LearningRateCurve({len(self.rates)} rates, suggestion {self._rate_text(self.suggestion)}: {self.reason})"
        )


def _floats(name: str, values: object) -> np.ndarray:
    try:
        found = np.asarray(values, np.float64)
    except Exception:
        found = np.empty(())
    if found.ndim != 1:
        raise TypeError(f"LearningRateCurve.of needs {name} to be an array of numbers. Got {describe_value(values)}.")
    return found


def _ascends(rates: np.ndarray) -> bool:
    return bool(rates[0] > 0 and np.all(np.diff(rates) > 0) and np.isfinite(rates[-1]))


def _means(values: np.ndarray, half: int) -> np.ndarray:
    """The mean of each value and as many neighbours on each side; fewer near the ends, so that it lags nowhere."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    middle = np.arange(len(values))
    reach = np.minimum(np.minimum(middle, len(values) - 1 - middle), half)
    return (sums[middle + reach + 1] - sums[middle - reach]) / (2 * reach + 1)


def _divergence(smoothed: np.ndarray) -> int:
    """The first step at which the loss diverges; their number if it does not."""
    if not len(smoothed):
        return 0
    lowest = np.minimum.accumulate(smoothed)
    far = (smoothed > smoothed[0]) & (smoothed > lowest + 3 * np.abs(lowest))
    return int(np.argmax(far)) if far.any() else len(smoothed)


def _suggestion(
    rates: np.ndarray, losses: np.ndarray, smoothed: np.ndarray, half: int, diverges_at: float | None
) -> tuple[float | None, str]:
    """A rate and why it is that; or why it is none."""
    if len(rates) < FEWEST:
        return None, f"the loss diverges within {FEWEST} steps; begin with a smaller low="
    # The ends are averaged over fewer values, so they are noisier and count neither as a fall nor as its noise.
    inner = slice(half, len(rates) - half)
    fall = float(smoothed[half] - smoothed[inner].min())
    noise = float(np.std((losses - smoothed)[inner])) / (2 * half + 1) ** 0.5
    if fall < _FLAT * abs(smoothed[half]):
        return None, "the loss is flat; try a higher high=, or look whether the step uses its learning rate"
    if fall < _CLEAR * noise:
        return None, f"the loss falls by {fall:.2g}, too little for its noise; try more steps= or larger batches"
    slopes = np.gradient(smoothed, np.log10(rates))
    steepest = float(rates[inner][np.argmin(slopes[inner])])
    if diverges_at is not None and diverges_at / 10 < steepest:
        return diverges_at / 10, "a tenth of the rate at which the loss diverges"
    return steepest, "where the smoothed loss falls most steeply"
