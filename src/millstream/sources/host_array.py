"""Arrays that stay on the host: only the rows of a batch travel to the device."""

from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.reading.host_source import ArrayRows, RowSource
from millstream.reading.samples import spec_of
from millstream.sources.array import check_reading, check_rows


class HostArraySource(RowSource):
    """The rows of a tree of arrays too large for the device, or of memory-mapped files.

    Example:
        >>> source = ms.HostArraySource({"x": np.zeros((1000, 3), np.float32)})
        >>> source.read(np.array([5, 7]))["x"].shape
        (2, 3)

    Args:
        data: A pytree of NumPy arrays, memory-mapped or not, with the same number of rows. They are used as they are,
            so do not change them while a stream runs.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    def __init__(self, data: PyTree, ordering: Ordering = "shuffle", prefetch_size: int = 64) -> None:
        import jax

        check_reading("HostArraySource", ordering, prefetch_size)
        check_rows("HostArraySource", data)
        spec = spec_of("HostArraySource", jax.tree.map(lambda leaf: leaf[0], data))
        super().__init__(ArrayRows("HostArraySource", data, spec), ordering, prefetch_size)
