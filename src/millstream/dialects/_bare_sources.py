"""Sources that say what their samples are before they are in a pipeline, as in cyreal."""

import millstream as ms
from millstream.reading.contracts import PyTree


class ArraySampleSource(ms.ArraySampleSource):
    """`millstream.ArraySampleSource`, which has `element_spec` on its own.

    Example:
        >>> from millstream.dialects import cyreal
        >>> cyreal.ArraySampleSource(np.zeros((10, 3), np.float32)).element_spec().shape
        (3,)
    """

    def element_spec(self) -> PyTree:
        """The shape and dtype of one sample."""
        return self.spec()


class DiskSampleSource(ms.DiskSampleSource):
    """`millstream.DiskSampleSource`, which has `element_spec` on its own.

    Example:
        >>> from millstream.dialects import cyreal
        >>> cyreal.DiskSampleSource(10, lambda index: np.zeros(3, np.float32)).element_spec().shape
        (3,)
    """

    def element_spec(self) -> PyTree:
        """The shape and dtype of one sample."""
        return self.spec()
