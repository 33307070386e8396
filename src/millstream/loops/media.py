"""Images and histograms that a step logs, as arrays of fixed shapes that a program can return."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millstream.text.errors import describe_leaf, describe_value, require_int

BINS = 64
IMAGES, HISTOGRAMS = "images", "histograms"  # their collections
MEDIA = frozenset((IMAGES, HISTOGRAMS))
CHANNELS = (1, 3, 4)


def as_images(caller: str, image: Any, most: int) -> Any:
    """One or several images as uint8, NHWC; the first `most` of them.

    Args:
        caller: The caller's name, for errors.
        image: HxW, HxWx1/3/4 or NHWC; uint8, or floats from 0 to 1. May be traced.
        most: How many to keep.
    """
    require_int(caller, "most", most, least=1)
    image = _as_array(caller, "an image", image)
    shape, kind = image.shape, np.dtype(image.dtype)
    if not all(shape) or not (len(shape) == 2 or (len(shape) in (3, 4) and shape[-1] in CHANNELS)):
        raise ValueError(
            f"{caller} needs an image as HxW or HxWxC, or several as NxHxWxC, with 1, 3 or 4 channels C. "
            f"Got {describe_leaf(image)}. Several without channels are images[..., None]."
        )
    if kind != np.uint8 and not jnp.issubdtype(kind, jnp.floating):
        raise TypeError(
            f"{caller} needs an image of uint8, or of floats from 0 to 1. Got {describe_leaf(image)}. "
            "Scale it, and convert it with .astype(np.uint8)."
        )
    return _as_bytes(np, image, most) if isinstance(image, np.ndarray) else _bytes_on_device(image, most=most)


def _as_bytes(xp: Any, image: Any, most: int) -> Any:
    shape = image.shape
    images = image.reshape((1, *shape, 1) if len(shape) == 2 else (1, *shape) if len(shape) == 3 else shape)[:most]
    if images.dtype == np.uint8:
        return images
    # What is not a number becomes black: how it would be converted depends on the device.
    known = xp.where(xp.isnan(images), 0, xp.clip(images, 0, 1)).astype(np.float32)
    return xp.round(known * 255).astype(np.uint8)


_bytes_on_device = jax.jit(functools.partial(_as_bytes, jnp), static_argnames="most")


class Histogram(NamedTuple):
    """How often values of an array were in each bin.

    Attributes:
        counts: Values in each bin.
        edges: Where bins begin, and the last ends: from the smallest value to the largest, evenly.
        odd: How many values were not finite, and are in no bin.
    """

    counts: np.ndarray
    edges: np.ndarray
    odd: int


def pack_histogram(caller: str, values: Any) -> Any:
    """The histogram of an array, as one array of fixed shape; under `jit` it is computed by the program.

    Args:
        caller: The caller's name, for errors.
        values: Numbers of any shape. May be traced.
    """
    values = _as_array(caller, "values", values)
    kind = np.dtype(values.dtype)
    if not (kind == np.bool_ or jnp.issubdtype(kind, jnp.integer) or jnp.issubdtype(kind, jnp.floating)):
        raise TypeError(f"{caller} needs real numbers. Got {describe_leaf(values)}.")
    if not isinstance(values, np.ndarray):
        return _pack_on_device(values)
    with np.errstate(all="ignore"):
        return _pack(np, values, count=_count_on_host)


def unpack_histogram(packed: np.ndarray) -> Histogram:
    """What `pack_histogram` has packed."""
    counts = np.rint(packed[1]).astype(np.int64)
    return Histogram(counts[:-1], packed[0].astype(np.float64), int(counts[-1]))


def _pack(xp: Any, values: Any, *, count: Callable[[Any], Any]) -> Any:
    """A row of edges, and one of counts that ends with the count of what is not finite."""
    flat = values.reshape(-1).astype(np.float32)
    finite = xp.isfinite(flat)
    low = xp.min(flat, initial=np.inf, where=finite)
    high = xp.max(flat, initial=-np.inf, where=finite)
    low, high = xp.where(low <= high, low, np.float32(0)), xp.where(low <= high, high, np.float32(0))
    room = xp.where(low == high, xp.maximum(np.float32(0.5), xp.abs(low) * np.float32(0.01)), np.float32(0))
    low, high = low - room, high + room
    half = high / 2 - low / 2  # the whole may be more than the largest float
    places = xp.where(finite & (half > 0), (flat / 2 - low / 2) / half * BINS, xp.where(finite, 0, BINS))
    bins = xp.clip(places, 0, xp.where(finite, np.float32(BINS - 1), np.float32(BINS))).astype(np.int32)
    shares = xp.arange(BINS + 1, dtype=np.float32) / np.float32(BINS)
    edges = low * (1 - shares) + high * shares
    return xp.stack([edges, count(bins).astype(np.float32)])


def _count_on_host(bins: np.ndarray) -> np.ndarray:
    return np.bincount(bins, minlength=BINS + 1)


def _count_on_device(bins: jax.Array) -> jax.Array:
    return jnp.zeros(BINS + 1, jnp.int32).at[bins].add(1)


_pack_on_device = jax.jit(functools.partial(_pack, jnp, count=_count_on_device))


def _as_array(caller: str, what: str, value: Any) -> Any:
    if isinstance(value, jax.Array | np.ndarray) and not jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    if isinstance(value, list | tuple | int | float | np.generic):
        try:
            made = np.asarray(value)
        except ValueError:  # rows of different lengths
            made = np.empty((), object)
        if made.dtype.kind in "biuf":
            return made
    raise TypeError(f"{caller} needs {what} as an array. Got {describe_value(value)}.")
