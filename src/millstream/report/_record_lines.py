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
            if text.endswith(b"\n"):  # otherwise its writer was killed in the middle of it
                yield parsed(path, number, text)


def parsed(path: pathlib.Path, number: int, text: bytes) -> dict[str, Any]:
    """A line of such a file."""
    try:
        line = json.loads(text)
        line["steps"]
        return line
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{_CALLER} reads records as ms.record writes them. Line {number} of {path} is {describe_value(text[:60])}."
        ) from None
