"""Several images as one."""

import math

import numpy as np

from millstream.text.png import encode_png

_GAP = 1  # pixels between two images


def contact_sheet(images: np.ndarray) -> np.ndarray:
    """Images, uint8 and NHWC, beside and below each other: HxW if they are grey, else HxWx3 or HxWx4."""
    count, height, width, channels = images.shape
    across = math.ceil(math.sqrt(count * height / width)) if count > 1 else 1
    across = min(max(across, 1), count)
    down = math.ceil(count / across)
    sheet = np.zeros((down * (height + _GAP) - _GAP, across * (width + _GAP) - _GAP, channels), np.uint8)
    if channels != 4:
        sheet[:] = 255
    for number, image in enumerate(images):
        top, left = number // across * (height + _GAP), number % across * (width + _GAP)
        sheet[top : top + height, left : left + width] = image
    return sheet[:, :, 0] if channels == 1 else sheet


def shrunk(images: np.ndarray, most: int) -> np.ndarray:
    """Images, NHWC, with every n-th pixel only, so that no side is longer than `most`."""
    stride = max(math.ceil(max(images.shape[1:3]) / most), 1)
    return images[:, ::stride, ::stride]


def sheet_png(images: np.ndarray) -> bytes:
    """The contact sheet of images as a PNG file."""
    return encode_png(contact_sheet(images))
