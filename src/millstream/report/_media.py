"""The images, histograms and first samples of a recorded run."""

import base64
import binascii
import dataclasses
import pathlib
from typing import Any

import numpy as np

from millstream.report._record_lines import whole_lines

_PNG = b"\x89PNG\r\n\x1a\n"


@dataclasses.dataclass(frozen=True, eq=False)
class StepHistogram:
    """A histogram and its step.

    Attributes:
        step: When it was logged.
        low: Where the first bin begins.
        high: Where the last ends.
        counts: Values in each bin; all are equally wide.
        odd: How many values were not finite.
    """

    step: int
    low: float
    high: float
    counts: np.ndarray
    odd: int

    def quantiles(self, shares: np.ndarray) -> np.ndarray:
        """The values below which these shares of all lie; NaN if there are none."""
        total = self.counts.sum()
        if not total:
            return np.full(len(shares), np.nan)
        reached = np.concatenate([[0], np.cumsum(self.counts)]) / total
        # Where bins are empty several edges have one share: the first has it from below, the last from above.
        edges = np.linspace(self.low, self.high, len(self.counts) + 1)
        grows = np.concatenate([self.counts > 0, [False]]) | np.concatenate([[False], self.counts > 0])
        return np.interp(shares, reached[grows], edges[grows])


@dataclasses.dataclass(eq=False)
class Media:
    """What a record has besides numbers.

    Attributes:
        images: By name, the step and the PNG in base64 of each.
        histograms: By name.
        samples: The first samples: PNGs in base64 by leaf, and words for other leaves of each; None if not recorded.
        full_at: The step from which on there was no more room; None if there was.
        room: How many bytes there are for it, if it was too little.
    """

    images: dict[str, list[tuple[int, str]]] = dataclasses.field(default_factory=dict)
    histograms: dict[str, list[StepHistogram]] = dataclasses.field(default_factory=dict)
    samples: dict[str, Any] | None = None
    full_at: int | None = None
    room: int = 0


def read_media(path: pathlib.Path) -> Media:
    """What a file has that `ms.record` has written beside its record."""
    media = Media()
    for line in whole_lines(path):
        step = int(line["steps"])
        if "image" in line:
            name, png = line["image"]
            media.images.setdefault(str(name), []).append((step, checked_png(png)))
        elif "histogram" in line:
            name, low, high, counts, odd = line["histogram"]
            found = StepHistogram(step, float(low), float(high), np.array(counts, np.int64), int(odd))
            media.histograms.setdefault(str(name), []).append(found)
        elif "samples" in line:
            media.samples = line["samples"]
        elif "full" in line:
            media.full_at, media.room = step, int(line["full"])
    return media


def checked_png(text: Any) -> str:
    """A PNG in base64, if it is one; else nothing."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        return ""
    return text if data.startswith(_PNG) else ""
