"""The images and histograms of a recorded run, in a file of their own that does not grow without bound."""

import base64
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from millstream.callbacks._first_samples import describe_samples
from millstream.callbacks.contact_sheet import sheet_png, shrunk
from millstream.callbacks.log_file import LogFile, encode_line
from millstream.loops.media import IMAGES, unpack_histogram
from millstream.loops.media_log import Kept

MOST_BYTES = 20_000_000
_MOST_PIXELS = 256  # on each side of an image


class MediaFile:
    """Lines with `steps` and `image`, `histogram` or `samples`; there is no file before the first of them.

    Args:
        caller: The caller's name, for errors.
        path: Of the file.
    """

    def __init__(self, caller: str, path: pathlib.Path) -> None:
        self._file = LogFile(caller, path, True, lambda line: int(json.loads(line)["steps"]))
        self._is_open = self._is_full = False
        self._left = MOST_BYTES

    def size(self) -> int:
        """Its length in bytes."""
        return self._file.size()

    def open(self, step: int) -> None:
        """Continue after a step; a new run has none."""
        self._is_full = False
        if step == 0:
            self._file.path.unlink(missing_ok=True)
        elif self.size():
            self._file.open(step)
            self._is_open = True
        self._left = MOST_BYTES - self.size()

    def set_apart(self, ending: str) -> None:
        """Give an earlier file a different name."""
        path = self._file.path
        if path.exists():
            os.rename(path, path.with_stem(path.stem + ending))

    def write(self, step: int, media: Sequence[Kept]) -> None:
        """Add what a step has logged."""
        for item in media:
            collection, name = item.path
            if self._is_full:
                return
            if collection == IMAGES:
                png = sheet_png(shrunk(item.read(), _MOST_PIXELS))
                self._add(step, {"image": [name, base64.b64encode(png).decode()]})
            else:
                found = unpack_histogram(item.read())
                low, high = float(found.edges[0]), float(found.edges[-1])
                self._add(step, {"histogram": [name, low, high, found.counts.tolist(), found.odd]})

    def write_samples(self, batch: Any, mask: Any, count: int) -> None:
        """Add the first samples of the run, before everything else."""
        try:
            described = describe_samples(batch, mask, count)
        except RuntimeError as error:  # a step that donates its batches has deleted them
            described = {"images": {}, "words": [], "missing": str(error).splitlines()[0][:200]}
        self._add(0, {"samples": described})

    def _add(self, step: int, content: dict[str, Any]) -> None:
        line = encode_line({"steps": step, **content})
        if len(line) > self._left:
            self._is_full = True
            line = encode_line({"steps": step, "full": MOST_BYTES})
        if not self._is_open:
            self._file.reopen()
            self._is_open = True
        self._file.write(line)
        self._left -= len(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._is_open = False
