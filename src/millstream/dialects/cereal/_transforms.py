"""Transforms that can be given the source they come after: `MapTransform(inner, fn)` is `MapTransform(fn)(inner)`."""

from typing import Any

import millstream as ms
from millstream.dialects import _declared_spec
from millstream.reading.contracts import IndexedSource, Stream


class _BehindInner:
    """Makes a stage, or, given a source first or as `inner=`, that source with the stage after it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Stream | IndexedSource):
            inner, args = args[0], args[1:]
        elif "inner" in kwargs:
            inner = kwargs.pop("inner")
        else:
            return super().__new__(cls)
        stage: Any = cls(*args, **kwargs)
        return stage(inner)


class BatchTransform(_BehindInner, _declared_spec.BatchTransform):
    """`millstream.BatchTransform`, with or without the source it comes after.

    Example:
        >>> from millstream.dialects import cereal
        >>> batches = cereal.BatchTransform(cereal.ArraySampleSource(np.arange(10)), batch_size=4)
        >>> batches.steps_per_epoch
        3
    """


class DevicePutTransform(_BehindInner, ms.DevicePutTransform):
    """`millstream.DevicePutTransform`, with or without the source it comes after.

    Example:
        >>> from millstream.dialects import cereal
        >>> placed = cereal.DevicePutTransform(cereal.ArraySampleSource(np.arange(10)), "cpu")
    """


class FlattenImageTransform(_BehindInner, ms.FlattenImageTransform):
    """`millstream.FlattenImageTransform`, with or without the source it comes after.

    Example:
        >>> from millstream.dialects import cereal
        >>> images = cereal.ArraySampleSource({"image": np.zeros((9, 2, 2))})
        >>> cereal.FlattenImageTransform(images, image_key="image").element_spec()["image"].shape
        (4,)
    """


class HostCallbackTransform(_BehindInner, ms.transforms.HostCallbackTransform):
    """`millstream.transforms.HostCallbackTransform`, with or without the source it comes after.

    Example:
        >>> from millstream.dialects import cereal
        >>> stage = cereal.HostCallbackTransform(fn=lambda batch, mask: print(mask.sum()))
    """


class MapTransform(_BehindInner, _declared_spec.MapTransform):
    """`millstream.MapTransform`, with or without the source it comes after.

    Example:
        >>> from millstream.dialects import cereal
        >>> source = cereal.ArraySampleSource(np.arange(10))
        >>> doubled = cereal.MapTransform(source, lambda value, mask: 2 * value)
    """


class NormalizeImageTransform(_BehindInner, ms.NormalizeImageTransform):
    """`millstream.NormalizeImageTransform`, with or without the source it comes after.

    Example:
        >>> from millstream.dialects import cereal
        >>> images = cereal.ArraySampleSource({"image": np.zeros((9, 2, 2), np.uint8)})
        >>> cereal.NormalizeImageTransform(images, image_key="image", dtype=jnp.float32).element_spec()["image"].dtype
        dtype('float32')
    """
