"""What a source answers to `source[index]` and `for sample in source`."""

from typing import Any, TypeVar

K = TypeVar("K", bound=type)

_PARTS = {
    "ArraySampleSource": "ms.ArraySampleSource(jax.tree.map(lambda array: array[:10], data))",
    "DatasetSource": "ms.DatasetSource([dataset[index] for index in range(10)])",
    "DiskSampleSource": "ms.DiskSampleSource(10, sample_fn)",
}
_PART = "ms.DiskSampleSource(10, lambda index: jax.tree.map(lambda rows: rows[0], source.read(np.array([index]))))"


def no_index(kind: K) -> K:
    """Have a class of sources say what to write in place of `source[index]`, `source[:10]` and `for ... in source`.

    It is set here and not written in the class, so that a type checker still knows that these do not work.
    """
    setattr(kind, "__getitem__", _getitem)  # noqa: B010
    return kind


def _getitem(source: Any, index: Any) -> Any:
    # Python also calls this to iterate over an object that has no __iter__.
    name = type(source).__name__
    if isinstance(index, slice):
        raise TypeError(
            f"{name} cannot be sliced. Make a source of the part, such as {_PARTS.get(name, _PART)} for ten samples."
        )
    raise TypeError(
        f"{name} has no [index] and cannot be iterated. source.read(np.array([0, 1])) reads samples by index, and "
        "ms.DataLoader([source, ms.BatchTransform(32)]) makes batches of them."
    )
