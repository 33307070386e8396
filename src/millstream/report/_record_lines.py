"""The lines of the files of a record."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from millstream.files.safe_path import plain_reader
from millstream.text.errors import describe_value

_CALLER = "millstream report"


def whole_lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Each line of a file that `ms.record` has written, but a last one that is not whole."""
    with plain_reader(path, follow=True) as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
                line["steps"]
            except (ValueError, KeyError, TypeError):
                if not text.endswith(b"\n"):
                    return  # its writer was killed in the middle of it
                raise ValueError(
                    f"{_CALLER} reads records as ms.record writes them. Line {number} of {path} is "
                    f"{describe_value(text[:60])}."
                ) from None
            yield line
