"""Batches that a run leaves out: which batch of its loader each of its steps has."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

from millstream.loops.elapsed import INT32_LIMIT
from millstream.text.errors import describe_value, listed, whole_number

Ranges = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Skips:
    """The batches that a run leaves out, and with them the way from its steps to the batches of its loader.

    Steps are counted without a gap, so the data are ahead of them by what was left out so far.

    Example:
        >>> from millstream.loops.skips import Skips
        >>> [Skips(((2, 5),)).batch_of(step) for step in (1, 2, 3, 4)]
        [0, 1, 5, 6]

    Attributes:
        ranges: Numbers of batches, each range from the first that is left out to the first that is not, in order; they
            do not touch.
        begun: The step and the batch that a run over these data began after and with.
    """

    ranges: Ranges = ()
    begun: tuple[int, int] = (0, 0)

    @classmethod
    def at_position(cls, position: Mapping[str, Any]) -> "Skips":
        """What a position in the data, as it was saved, says of them; anything but that raises some error."""
        ranges = tuple((first, last) for first, last in position.get("skip", ()))
        steps, batch = position.get("begun", (0, 0))
        numbers = [number for each in ranges for number in each]
        if any(type(number) is not int or number < 0 for number in (*numbers, steps, batch)):
            raise ValueError(f"the batches that are left out are {ranges}, after {(steps, batch)}")
        if any(number >= following for number, following in itertools.pairwise(numbers)):
            raise ValueError(f"the ranges that are left out are not in order: {ranges}")
        return cls(ranges, (steps, batch))

    def plain(self) -> dict[str, Any]:
        """What `at_position` finds in a position."""
        return {"skip": [list(each) for each in self.ranges], "begun": list(self.begun)}

    def seek(self, batch: int) -> int:
        """The first batch from this one on that is not left out."""
        return next((last for first, last in self.ranges if first <= batch < last), batch)

    def until_next(self, batch: int) -> float:
        """How many batches from this one on come before the next that is left out; infinity if none is."""
        return next((first - batch for first, _ in self.ranges if first > batch), math.inf)

    def count_kept(self, batch: int) -> int:
        """How many batches before this one are not left out."""
        return batch - sum(min(last, batch) - first for first, last in self.ranges if first < batch)

    @functools.cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """Each range as the step after which it is left out, and how many batches it has."""
        steps, batch = self.begun
        before = self.count_kept(batch) - steps
        return [(self.count_kept(first) - before, last - first) for first, last in self.ranges]

    def with_left_out(self, steps: int) -> int:
        """Steps, and with them the batches that are left out before the next step."""
        return steps + sum(length for gap, length in self.gaps if gap <= steps)

    def steps_to(self, count: int) -> int:
        """The first step after which that many batches, with those that are left out, are done with."""
        for gap, length in self.gaps:
            if count <= gap:
                break
            count = max(count - length, gap)
        return count

    def batch_of(self, step: int) -> int:
        """The number of the batch that a step has; steps are counted from 1 on."""
        steps, batch = self.begun
        return self.with_left_out(step - 1) + self.seek(batch) - self.with_left_out(steps)

    def joined(self, ranges: Ranges) -> "Skips":
        """With other ranges left out as well; they may be the same."""
        return dataclasses.replace(self, ranges=_merged((*self.ranges, *ranges)))


def _merged(ranges: Ranges) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            first, last = merged[-1][0], max(merged.pop()[1], last)
        merged.append((first, last))
    return tuple(merged)


def as_ranges(caller: str, given: Any) -> Ranges:
    """Ranges as a user gives them, in order; what makes no sense is refused."""
    pairs = [] if given is None else listed(given)
    pairs = None if pairs is None else [listed(pair) for pair in pairs]
    if pairs is None or any(pair is None or len(pair) != 2 for pair in pairs):
        raise TypeError(
            f"{caller} needs skip as a list of ranges of batches, each (first, last): skip=[(51_200, 51_260)]. "
            f"Got {describe_value(given)}."
        )
    ranges = sorted(_as_range(caller, f"skip[{number}]", *pair) for number, pair in enumerate(pairs) if pair)
    for earlier, later in itertools.pairwise(ranges):
        if later[0] < earlier[1]:
            both = earlier[0], max(earlier[1], later[1])
            raise ValueError(
                f"{caller} needs ranges in skip that do not overlap. Got {earlier} and {later}: write {both}."
            )
    return tuple(ranges)


def _as_range(caller: str, name: str, first: Any, last: Any) -> tuple[int, int]:
    first, last = (
        whole_number(caller, f"{name}[{number}]", value, least=0, most=INT32_LIMIT - 1)
        for number, value in enumerate((first, last))
    )
    if first >= last:
        fix = f"write ({last}, {first})" if first > last else f"for batch {first} alone write ({first}, {first + 1})"
        raise ValueError(
            f"{caller} needs {name} to be (first, last): batch number `first` is left out, `last` is the next that is "
            f"used. Got ({first}, {last}): {fix}."
        )
    return first, last
