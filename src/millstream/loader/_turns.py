"""Whose turn it is: several loaders in one stream, spread as evenly as whole batches can be."""

import functools
import math
from collections.abc import Sequence

import numpy as np


class Turns:
    """Which loader gives the batch of a step: a function of the step alone.

    At every step each loader has given its share of the batches so far, rounded down or up. The order repeats after
    `period` steps.

    Example:
        >>> turns = Turns([3, 1, 2])
        >>> [turns.at(step) for step in range(6)], turns.before(8)
        ([0, 2, 0, 1, 2, 0], [4, 1, 3])

    Args:
        weights: How many batches of each loader come together in one period; brought to lowest terms.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        divisor = math.gcd(*weights)
        self.weights = tuple(weight // divisor for weight in weights)
        self.period = sum(self.weights)

    def at(self, step: int) -> int:
        """The loader whose turn it is."""
        return int(self._order[step % self.period])

    def before(self, step: int) -> list[int]:
        """How many batches each loader has given before this step."""
        periods, place = divmod(step, self.period)
        given = np.bincount(self._order[:place], minlength=len(self.weights))
        return [periods * weight + int(count) for weight, count in zip(self.weights, given, strict=True)]

    @functools.cached_property
    def _order(self) -> np.ndarray:
        # Every batch of a loader has a window of steps: outside of it, the loader would be a whole batch away from its
        # share. Among the windows that are open, the one that closes first comes first. As the shares add up to one
        # batch per step, every batch gets a step in its window.
        # Of windows that close together, the rarer loader's comes first, or it would always be the last of a round.
        opens = [0] * len(self.weights)
        closes = [(self._end_of(loader, 0), weight, loader) for loader, weight in enumerate(self.weights)]
        given = [0] * len(self.weights)
        order = np.empty(self.period, np.int32)
        for step in range(self.period):
            _, weight, loader = min(close for close in closes if opens[close[2]] <= step)
            order[step] = loader
            given[loader] += 1
            opens[loader] = given[loader] * self.period // weight
            closes[loader] = self._end_of(loader, given[loader]), weight, loader
        return order

    def _end_of(self, loader: int, batch: int) -> int:
        return -(-(batch + 1) * self.period // self.weights[loader])


class InSequence:
    """Which loader gives the batch of a step, if they come one after the other.

    Example:
        >>> turns = InSequence([3, 1, 2])
        >>> [turns.at(step) for step in range(6)], turns.before(8)
        ([0, 0, 0, 1, 2, 2], [5, 1, 2])

    Args:
        lengths: How many batches each loader gives before it is the next one's turn.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.weights = tuple(lengths)
        self.period = sum(lengths)
        self._ends = np.cumsum(lengths)

    def at(self, step: int) -> int:
        """The loader whose turn it is."""
        return int(np.searchsorted(self._ends, step % self.period, side="right"))

    def before(self, step: int) -> list[int]:
        """How many batches each loader has given before this step."""
        periods, place = divmod(step, self.period)
        given = np.clip(place - self._ends + self.weights, 0, self.weights)
        return (periods * np.array(self.weights) + given).tolist()
