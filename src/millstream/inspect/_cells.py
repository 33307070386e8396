"""What of a sample is shown: pictures, words, curves, by the shape, the dtype and the name of each leaf."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from millstream.text.summaries import array_text, value_text
from millstream.tokenizers import Tokenizer

PADDING = 0  # the number of the segment that is padding, as `ms.views.pack` has it
BEFORE = " before"  # what the name of a leaf ends in, as it was before the first random stage

_LONGEST_SIDE = 192  # pixels of a thumbnail
_DARK = 64  # uint8 images that never come near this are stretched
_MOST_TOKENS, _MOST_TEXT = 256, 1200  # of a row
_CURVE, _MOST_LINES = 8, 8  # at least that many points are a curve, and at most that many channels are lines
_MOST_POINTS = 160
_IMAGE_NAME = re.compile(r"image|img|picture|pixel|photo|frame", re.IGNORECASE)
_LABEL_NAME = re.compile(r"label|class|target|^y$|_y$|category", re.IGNORECASE)
_TOKEN_NAME = re.compile(r"token|ids?$|text", re.IGNORECASE)
_SEGMENT_NAMES = ("segments", "segment_ids", "{}_segments", "{}_segment_ids")
_POSITION_NAMES = ("positions", "position_ids", "{}_positions", "{}_position_ids")
_MASK_NAMES = ("{}_mask", "attention_mask")
_NOT_FINITE = (255, 0, 80)


@dataclasses.dataclass(frozen=True, eq=False)
class ImageCell:
    """An image, or its thumbnail: uint8 of shape (H, W), (H, W, 3) or (H, W, 4)."""

    pixels: np.ndarray
    summary: str


@dataclasses.dataclass(frozen=True)
class Words:
    """Text in pieces, each with the number of its segment, or None; `more` says what was cut off."""

    pieces: tuple[tuple[str, int | None], ...]
    more: str = ""

    @property
    def text(self) -> str:
        """All of it on one line, with a bar between segments."""
        numbered = len({segment for _, segment in self.pieces}) > 1
        joined = (" | " if numbered else " ").join(piece for piece, _ in self.pieces)
        return " ".join(" ".join([joined, self.more]).split())


@dataclasses.dataclass(frozen=True, eq=False)
class Lines:
    """Curves that share their axes: an array with a row per curve, and the lowest and highest value of the column."""

    values: np.ndarray
    low: float
    high: float
    summary: str


Cell = ImageCell | Words | Lines
Row = dict[str, Any]  # the leaves of a sample by their names


def named_leaves(tree: Any) -> Row:
    """The leaves of a tree by their paths, in words; None, strings and lists of numbers are leaves."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator=".") or "value": leaf for path, leaf in found}


def printable(text: str) -> str:
    """A text without what would move the cursor of a terminal or change its colors."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def object_rows(batch: Any, mask: np.ndarray) -> list[Any] | None:
    """The samples of a batch of Python objects; None if it is one of arrays."""
    is_list = isinstance(batch, list) and mask.ndim == 1 and len(batch) == len(mask)
    arrays = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch))
    return batch if is_list and not arrays else None


def _is_leaf(value: Any) -> bool:
    return value is None or (type(value) is list and all(isinstance(item, bool | int | float) for item in value))


def picture_titles(names: Sequence[str]) -> list[str]:
    """What to write under the images of a row: nothing under a single one, and before and after under one of a pair."""
    if len(names) == 1:
        return [""]
    if len(names) == 2 and names[0] == names[1] + BEFORE:
        return ["before", "after"]
    return list(names)


def as_leaf(value: Any) -> Any:
    """A leaf as an array of NumPy, a str, bytes, None, or whatever else it is; an image of Pillow as an array."""
    if value is None or isinstance(value, str | bytes):
        return value
    if type(value).__module__.partition(".")[0] == "PIL":
        has_alpha = value.mode in ("LA", "PA", "RGBA") or "transparency" in value.info
        return np.asarray(value.convert("RGBA" if has_alpha else "L" if value.mode in ("1", "L") else "RGB"))
    if isinstance(value, bool | int | float | list | np.generic | np.ndarray | jax.Array):
        array = np.asarray(value)
        if array.ndim == 0 and array.dtype.kind in "USO":
            return array.item()
        return array
    return value


@dataclasses.dataclass(frozen=True)
class Reading:
    """How leaves are read.

    Attributes:
        labels: Names of classes by their numbers.
        tokenizer: What token ids are decoded by.
        images: The leaves that are images; None to tell by their shape, dtype and name.
    """

    labels: Mapping[int, str]
    tokenizer: Tokenizer | None
    images: Sequence[str] | None


def cells_of(
    rows: Sequence[Row], real: Sequence[bool], reading: Reading
) -> tuple[dict[str, list[Cell | None]], list[str]]:
    """The columns of some samples, a cell for each that has it, and notes on how they are shown."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [as_leaf(row.get(name)) for row in rows] for name in names}
    hidden = {other for name in names if _is_tokens(name, columns[name]) for other in _beside(name, columns).values()}
    labels = _label_columns({name: column for name, column in columns.items() if name not in hidden})
    shown: dict[str, Any] = {}
    notes: list[str] = []
    for name, column in columns.items():
        if name in hidden:
            continue
        if _are_images(name, column, reading.images):
            shown[name], words = _pictures(column, real)
            notes += [f"{name}: {words}"] if words else []
        elif _is_tokens(name, column):
            shown[name] = _tokens(
                column,
                {key: columns[other] for key, other in _beside(name, columns).items()},
                None if _counts_tokens(name) else reading.tokenizer,
            )
        elif _are_curves(column) and not (reading.labels and _is_soft(column, reading.labels)):
            shown[name] = _curves(column)
        else:
            known = reading.labels if name in labels or _is_soft(column, reading.labels) else {}
            shown[name] = [_words(value, known) for value in column]
    for name, cells in shown.items():  # a leaf that a sample does not have is not the same as one that is None
        shown[name] = [cell if name in row else None for cell, row in zip(cells, rows, strict=True)]
    return shown, notes


def _arrays(column: Sequence[Any]) -> list[np.ndarray] | None:
    """The arrays of numbers of a column, without what is missing; None if there is anything else in it."""
    there = [value for value in column if value is not None]
    is_numeric = there and all(
        isinstance(value, np.ndarray) and (value.dtype.kind in "biuf" or _is_half(value)) for value in there
    )
    return there if is_numeric else None


def _is_half(array: np.ndarray) -> bool:
    """Whether an array has one of the small floats that NumPy does not know by itself, such as bfloat16."""
    return "float" in array.dtype.name


# Images


def _are_images(name: str, column: Sequence[Any], chosen: Sequence[str] | None) -> bool:
    arrays = _arrays(column)
    if chosen is not None:
        return name in chosen and arrays is not None and all(_channels_last(array) is not None for array in arrays)
    return arrays is not None and all(_looks_like_image(name, array) for array in arrays)


def _looks_like_image(name: str, array: np.ndarray) -> bool:
    if array.size == 0 or (image := _channels_last(array)) is None:
        return False
    height, width = image.shape[:2]
    if array.ndim == 3:
        return min(height, width) >= 2 and (max(height, width) >= 4)
    if _IMAGE_NAME.search(name):
        return True
    return min(height, width) >= 4 and (
        array.dtype == np.uint8 or (array.dtype.kind not in "iu" and height == width >= 8)
    )


def _channels_last(array: np.ndarray) -> np.ndarray | None:
    """An image as (H, W) or (H, W, channels); None if it is none."""
    if array.ndim == 2:
        return array
    if array.ndim != 3:
        return None
    if array.shape[2] in (1, 3, 4):
        return array[..., 0] if array.shape[2] == 1 else array
    if array.shape[0] in (1, 3, 4):
        return array[0] if array.shape[0] == 1 else np.moveaxis(array, 0, 2)
    return None


def _pictures(column: Sequence[Any], real: Sequence[bool]) -> tuple[list[Cell], str]:
    images = [None if value is None else _channels_last(value) for value in column]
    looked_at = [image for image, is_real in zip(images, real, strict=True) if image is not None and is_real]
    low, high = _limits(looked_at or [image for image in images if image is not None])
    note = ""
    if all(image.dtype == np.uint8 for image in images if image is not None) and high >= _DARK:
        low, high = 0.0, 255.0
    elif 0 <= low and 0.25 <= high <= 1 and any(image.dtype.kind not in "iub" for image in looked_at):
        low, high = 0.0, 1.0
    elif high > low:
        note = f"{low:.3g} to {high:.3g} in this batch, shown from black to white"
    cells: list[Cell] = []
    for image, value in zip(images, column, strict=True):
        if image is None:
            cells.append(Words((("none", None),)))
        else:
            cells.append(ImageCell(_pixels(_thumbnail(image), low, high), array_text(value.shape, value.dtype)))
    return cells, note


def _limits(arrays: Sequence[np.ndarray]) -> tuple[float, float]:
    """The lowest and the highest finite value; 0 and 0 if there is none."""
    low, high = np.inf, -np.inf
    for array in arrays:
        wide = array if array.dtype.kind in "biu" else array.astype(np.float64)
        finite = wide if array.dtype.kind in "biu" else wide[np.isfinite(wide)]
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    return (low, high) if low <= high else (0.0, 0.0)


def _thumbnail(image: np.ndarray) -> np.ndarray:
    """An image with its longest side short enough: means of squares of pixels."""
    factor = -(-max(image.shape[:2]) // _LONGEST_SIDE)
    if factor <= 1:
        return image
    height, width = (max(1, side // factor) for side in image.shape[:2])
    tall, wide = (min(factor, side) for side in image.shape[:2])
    cut = image[: height * tall, : width * wide]
    squares = cut.reshape(height, tall, width, wide, *image.shape[2:])
    return squares.mean(axis=(1, 3), dtype=np.float64)


def _pixels(image: np.ndarray, low: float, high: float) -> np.ndarray:
    wide = image.astype(np.float64)
    finite = np.isfinite(wide)
    scaled = (np.where(finite, wide, low) - low) * (255.0 / (high - low) if high > low else 0.0)
    pixels = np.clip(np.rint(scaled), 0, 255).astype(np.uint8)
    if finite.all():
        return pixels
    colored = np.repeat(pixels[..., None], 3, axis=2) if pixels.ndim == 2 else pixels[..., :3].copy()
    colored[~finite if finite.ndim == 2 else ~finite.all(axis=2)] = _NOT_FINITE
    return colored


# Tokens


def _is_tokens(name: str, column: Sequence[Any]) -> bool:
    arrays = _arrays(column)
    if arrays is None or not all(array.ndim == 1 and array.dtype.kind in "iu" for array in arrays):
        return False
    return any(len(array) >= _CURVE for array in arrays) or bool(_TOKEN_NAME.search(name.rpartition(".")[2]))


def _counts_tokens(name: str) -> bool:
    """Whether a leaf numbers tokens instead of naming them."""
    return name.rpartition(".")[2] in (*_SEGMENT_NAMES, *_POSITION_NAMES)


def _beside(name: str, columns: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """The leaves that say which tokens of a leaf belong together, and which count: kind to name."""
    folder, dot, own = name.rpartition(".")
    found: dict[str, str] = {}
    if _counts_tokens(name):
        return found
    for kind, patterns in (("segments", _SEGMENT_NAMES), ("positions", _POSITION_NAMES), ("mask", _MASK_NAMES)):
        for other in (folder + dot + pattern.format(own) for pattern in patterns):
            if other != name and other in columns and _same_shapes(columns[name], columns[other]):
                found.setdefault(kind, other)
    return found


def _same_shapes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(np.shape(a) == np.shape(b) for a, b in zip(one, other, strict=True))


def _tokens(column: Sequence[Any], beside: Mapping[str, Sequence[Any]], tokenizer: Tokenizer | None) -> list[Cell]:
    cells: list[Cell] = []
    for number, ids in enumerate(column):
        if ids is None:
            cells.append(Words((("none", None),)))
            continue
        segments = np.ones(len(ids), int)
        if "segments" in beside:
            segments = np.asarray(beside["segments"][number]).astype(int)
        elif "mask" in beside:
            segments = np.asarray(beside["mask"][number]).astype(bool).astype(int)
        cells.append(_segmented(ids, segments, "segments" in beside, tokenizer))
    return cells


def _segmented(ids: np.ndarray, segments: np.ndarray, numbered: bool, tokenizer: Tokenizer | None) -> Words:
    """The tokens of a row, segment by segment."""
    kept = min(len(ids), _MOST_TOKENS)
    edges = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(ids)]
    pieces: list[tuple[str, int | None]] = []
    for begin, end in itertools.pairwise(edges):
        if begin >= kept:
            break
        segment = int(segments[begin]) if end > begin else 1
        if segment == PADDING:
            pieces.append((f"{end - begin:,} padding", PADDING))
            continue
        text = _decoded(ids[begin : min(end, kept)], tokenizer)
        pieces.append((text, segment if numbered else None))
    left = int(np.count_nonzero(segments[kept:]))
    return Words(tuple(pieces), f"... {left:,} more tokens" if left > 0 else "")


def _decoded(ids: np.ndarray, tokenizer: Tokenizer | None) -> str:
    if tokenizer is not None:
        try:
            return tokenizer.decode(ids)
        except Exception:  # ids that the model does not have, such as -100: numbers say more than nothing
            pass
    return " ".join(map(str, ids.tolist()))


# Curves, numbers and the rest


def _are_curves(column: Sequence[Any]) -> bool:
    arrays = _arrays(column)
    if arrays is None or any(array.dtype.kind == "b" for array in arrays):
        return False
    return all(
        (array.ndim == 1 and array.dtype.kind not in "iu" and len(array) >= _CURVE)
        or (array.ndim == 2 and len(array) >= _CURVE and 1 <= array.shape[1] <= _MOST_LINES)
        for array in arrays
    )


def _curves(column: Sequence[Any]) -> list[Cell]:
    arrays = [None if value is None else value.astype(np.float64).reshape(len(value), -1).T for value in column]
    low, high = _limits([array for array in arrays if array is not None])
    cells: list[Cell] = []
    for array, value in zip(arrays, column, strict=True):
        if array is None:
            cells.append(Words((("none", None),)))
            continue
        step = -(-array.shape[1] // _MOST_POINTS)
        own = _limits([array])
        summary = f"{array_text(value.shape, value.dtype)} {own[0]:.3g} to {own[1]:.3g}"
        cells.append(Lines(array[:, ::step], low, high, summary))
    return cells


def _label_columns(columns: Mapping[str, Sequence[Any]]) -> set[str]:
    """The columns whose whole numbers are classes: those that are called so, or the only one there is."""
    whole = [name for name, column in columns.items() if _is_whole(column)]
    named = {name for name in whole if _LABEL_NAME.search(name.rpartition(".")[2])}
    return named or set(whole if len(whole) == 1 else [])


def _is_whole(column: Sequence[Any]) -> bool:
    arrays = _arrays(column)
    return arrays is not None and all(array.ndim == 0 and array.dtype.kind in "iu" for array in arrays)


def _is_soft(column: Sequence[Any], labels: Mapping[int, str]) -> bool:
    """Whether a column has a weight for each class: one-hot rows, or mixed ones."""
    arrays = _arrays(column)
    if not labels or arrays is None or not all(array.shape == (max(labels) + 1,) for array in arrays):
        return False
    sums = [float(array.astype(np.float64).sum()) for array in arrays]
    return all(total == 0 or abs(total - 1) < 1e-3 for total in sums)


def _words(value: Any, labels: Mapping[int, str]) -> Words:
    return Words(((_text(value, labels), None),), _cut(value))


def _cut(value: Any) -> str:
    left = len(value) - _MOST_TEXT if isinstance(value, str | bytes) else 0
    return f"... {left:,} more {'characters' if isinstance(value, str) else 'bytes'}" if left > 0 else ""


def _text(value: Any, labels: Mapping[int, str]) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return value[:_MOST_TEXT]
    if isinstance(value, bytes):
        return repr(value[: _MOST_TEXT // 4])
    if not isinstance(value, np.ndarray):
        return value_text(value)
    if value.ndim == 0:
        number = value.item()
        if number in labels and value.dtype.kind in "iu":
            return f"{labels[number]} ({number})"
        return f"{number:.4g}" if isinstance(number, float) else str(number)
    if labels and value.ndim == 1:
        weights = sorted(
            ((float(weight), place) for place, weight in enumerate(value.tolist()) if weight), reverse=True
        )
        return ", ".join(
            f"{labels.get(place, place)}{'' if weight == 1 else f' {weight:.2g}'}" for weight, place in weights[:3]
        )
    if value.dtype.kind == "b":
        return f"{int(value.sum()):,} of {value.size:,} true"
    if value.ndim == 1 and value.size < _CURVE:
        numbers = value.tolist()
        return ", ".join(f"{number:.4g}" if isinstance(number, float) else str(number) for number in numbers)
    if _arrays([value]) is None or not value.size:
        return array_text(value.shape, value.dtype)
    low, high = _limits([value])
    return f"{array_text(value.shape, value.dtype)} {low:.3g} to {high:.3g}"
