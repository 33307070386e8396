"""What all pictures of a loader can do: be shown in a notebook, be written to a file, be printed."""

import abc
import os
import sys

from millstream.files.atomic import require_place, written
from millstream.text.svg import Svg

_KINDS = (".svg", ".html")


class Drawing(abc.ABC):
    """Something that can be drawn: in a notebook, as a file, and as text."""

    @abc.abstractmethod
    def _draw(self) -> Svg:
        """The picture."""

    @abc.abstractmethod
    def _tables(self) -> str:
        """The same as tables, in HTML."""

    def to_svg(self) -> str:
        """The picture as an SVG file: it needs nothing from elsewhere, and is light or dark as its reader prefers."""
        return self._draw().document()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file.

        Args:
            path: Its name, which ends with ".svg", or with ".html" for a page that has the tables, too.
        """
        place = require_place("save", path)
        if place.suffix not in _KINDS:
            raise ValueError(f"save needs a path that ends with .svg or .html. Got {str(path)!r}.")
        text = self.to_svg() if place.suffix == ".svg" else self._draw().page(self._tables())
        with written(place, alone=False, durable=False) as file:
            file.write(text.encode())

    def _repr_html_(self) -> str:
        return f"{self._draw().inline()}<details><summary>as tables</summary>{self._tables()}</details>"


def can_show(letters: str) -> bool:
    """Whether standard output has these letters."""
    try:
        letters.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
