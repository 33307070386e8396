"""The first samples of a run, as images and words."""

import base64
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millstream.callbacks.contact_sheet import shrunk
from millstream.loops.media import CHANNELS, as_images
from millstream.text.png import encode_png

_LEAST_SIDE, _MOST_ASPECT = 4, 8  # of an image; a matrix of other sides is not one
_MOST_PIXELS = 160  # on each side
_MOST_NUMBERS, _MOST_TEXT = 16, 200  # of a cell


def describe_samples(batch: Any, mask: Any, count: int) -> dict[str, Any]:
    """The first real samples of a batch: their images by leaf, and the words for each of their other leaves.

    Args:
        batch: A pytree of arrays with the axes of the mask in front.
        mask: Which rows are samples; None for all.
        count: How many.
    """
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator=".") or "sample": _on_host(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    }
    real = None if mask is None else _on_host(mask)
    images: dict[str, list[str]] = {}
    words: list[dict[str, str]] = []
    for name, leaf in leaves.items():
        rows = _rows(leaf, real, count)
        if rows is None:
            continue
        if _are_images(rows):
            images[name] = [_png(image) for image in shrunk(_as_pixels(rows), _MOST_PIXELS)]
            continue
        words += [{} for _ in range(len(rows) - len(words))]
        for cells, row in zip(words, rows, strict=False):
            cells[name] = _cell(row)
    return {"images": images, "words": words}


def _on_host(leaf: Any) -> Any:
    """An array; of one that lies in several processes, the part that is here, and of keys nothing."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return np.empty(())
        here = leaf.is_fully_addressable or leaf.is_fully_replicated
        return np.asarray(leaf if here else leaf.addressable_data(0))
    return np.asarray(leaf)


def _rows(leaf: np.ndarray, mask: np.ndarray | None, count: int) -> np.ndarray | None:
    """A row for each sample; None for a leaf without."""
    if mask is None:
        return leaf[:count] if leaf.ndim else None
    if leaf.shape[: mask.ndim] != mask.shape:
        return None
    return leaf.reshape(-1, *leaf.shape[mask.ndim :])[np.flatnonzero(mask)[:count]]


def _are_images(rows: np.ndarray) -> bool:
    if rows.ndim not in (3, 4) or (rows.ndim == 4 and rows.shape[3] not in CHANNELS) or not len(rows):
        return False
    short, long = sorted(rows.shape[1:3])
    whole = rows.dtype == np.uint8
    return (whole or rows.dtype.kind == "f") and short >= _LEAST_SIDE and long <= _MOST_ASPECT * short


def _as_pixels(rows: np.ndarray) -> np.ndarray:
    """Images as uint8, NHWC; numbers that are not from 0 to 1 are scaled to what they span."""
    several = rows[..., None] if rows.ndim == 3 else rows
    if several.dtype != np.uint8:
        known = several[np.isfinite(several)].astype(np.float64)
        low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
        if low < 0.0 or high > 1.0:
            several = (several.astype(np.float64) - low) / max(high - low, 1e-12)
    return as_images("record", several, len(several))


def _png(image: np.ndarray) -> str:
    pixels = image[:, :, 0] if image.shape[2] == 1 else image
    return base64.b64encode(encode_png(pixels)).decode()


def _cell(row: Any) -> str:
    """A leaf of a sample in a few words."""
    array = np.asarray(row)
    if array.ndim == 0:
        return _short(_number(array.item()))
    if array.size <= _MOST_NUMBERS or (array.ndim == 1 and array.dtype.kind in "iubUSO"):
        numbers = array.reshape(-1)
        some = ", ".join(_number(value) for value in numbers[:_MOST_NUMBERS].tolist())
        return _short(f"{some}, ... ({numbers.size:,})" if numbers.size > _MOST_NUMBERS else some)
    shape = " x ".join(map(str, array.shape))
    if array.dtype.kind not in "biuf":
        return f"{array.dtype} {shape}"
    return (
        f"{array.dtype} {shape}, from {array.min():.4g} to {array.max():.4g}, mean {array.mean(dtype=np.float64):.4g}"
    )


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."
