"""A figure that notebooks show, in the style of all images of this package."""

import io
import os
import pathlib

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from millstream.files.atomic import require_place
from millstream.loops.history_table import whole_file
from millstream.text.errors import require_int

# Okabe and Ito's colors, which people with any kind of color vision can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK, FAINT, LIGHT, PALE = "#222222", "#767676", "#a0a0a0", "#e4e4e4"


class Picture(Figure):
    """A figure without pyplot, which notebooks show as it is, whatever the backend."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()

    def save(self, caller: str, path: str | os.PathLike[str], dpi: int) -> pathlib.Path:
        """Write it to a file, which gets its name when it is whole."""
        require_int(caller, "dpi", dpi, least=1)
        picture = io.BytesIO()
        self.savefig(picture, dpi=dpi, format=require_place(caller, path).suffix[1:] or "png")
        with whole_file(caller, path) as (final, file):
            file.write(picture.getvalue())
        return final


def set_style(axis: Axes, title: str) -> None:
    """Give an axis its title, and the lines and colors that all axes have."""
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(FAINT)
    axis.tick_params(which="both", colors=FAINT, labelsize=8.5)
    axis.grid(axis="y", color=PALE, linewidth=0.7)
    axis.set_axisbelow(True)


def set_log_axis(axis: Axes) -> None:
    """Give the values of an axis a logarithmic scale, with numbers as people write them."""
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=9))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
