"""A figure that notebooks show."""

import io

from matplotlib.figure import Figure


class Picture(Figure):
    """A figure without pyplot, which notebooks show as it is, whatever the backend."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()
