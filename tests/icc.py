"""ICC profiles (version 2.4) of any primaries, curves and inks, and what they mean in plain arithmetic."""

import itertools
import struct
from collections.abc import Callable, Sequence

import numpy as np

D50 = np.array([0.9642, 1.0, 0.8249])
D65 = (0.3127, 0.3290)
SRGB = [(0.64, 0.33), (0.30, 0.60), (0.15, 0.06)]
ADOBE = [(0.64, 0.33), (0.21, 0.71), (0.15, 0.06)]
DISPLAY_P3 = [(0.68, 0.32), (0.265, 0.69), (0.15, 0.06)]
BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])

Curve = Callable[[np.ndarray], np.ndarray]


def srgb_curve(x: np.ndarray) -> np.ndarray:
    return np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)


def srgb_inverse(x: np.ndarray) -> np.ndarray:
    return np.where(x <= 0.0031308, x * 12.92, 1.055 * np.maximum(x, 1e-9) ** (1 / 2.4) - 0.055)


def gamma(exponent: float) -> Curve:
    return lambda x: x**exponent


def to_xyz(primaries: Sequence[tuple[float, float]], white: tuple[float, float] = D65) -> np.ndarray:
    points = np.array([(x / y, 1, (1 - x - y) / y) for x, y in [*primaries, white]]).T
    return points[:, :3] * np.linalg.solve(points[:, :3], points[:, 3])


def adaptation(white: np.ndarray, to: np.ndarray) -> np.ndarray:
    """The matrix that takes one white to another as eyes do."""
    return np.linalg.inv(BRADFORD) @ np.diag((BRADFORD @ to) / (BRADFORD @ white)) @ BRADFORD


def rgb_profile(primaries: Sequence[tuple[float, float]], curve: Curve) -> bytes:
    matrix = to_xyz(primaries)
    adapted = adaptation(matrix.sum(axis=1), D50) @ matrix
    colors = {name: _xyz(adapted[:, number]) for number, name in enumerate([b"rXYZ", b"gXYZ", b"bXYZ"])}
    return _profile(b"RGB ", {**colors, **{name: _curve(curve) for name in (b"rTRC", b"gTRC", b"bTRC")}})


def gray_profile(curve: Curve) -> bytes:
    return _profile(b"GRAY", {b"kTRC": _curve(curve)})


def cmyk_profile(papers: Sequence[float], black: float, white: np.ndarray = D50) -> bytes:
    """Inks on a paper of this lightness, one for each of perceptual, relative and saturation."""
    tags = {name: _table(paper, black) for name, paper in zip((b"A2B0", b"A2B1", b"A2B2"), papers, strict=True)}
    return _profile(b"CMYK", tags, white, b"Lab ", b"scnr")


def ink(paper: float, black: float, c: int, m: int, y: int, k: int) -> tuple[float, float, float]:
    """The Lab color of some of the inks on top of each other."""
    if k == 1:
        return black, 0, 0
    return paper - 15 * c - 20 * m - 5 * y, -30 * c + 40 * m - 5 * y, -30 * c + 50 * y


def lab_to_srgb(lab: np.ndarray) -> np.ndarray:
    """From Lab (D50) to sRGB from 0 to 255, by the book (ISO 11664-4 and IEC 61966-2-1), clipped."""
    f = (lab[..., :1] + 16) / 116 + np.stack([lab[..., 1] / 500, 0 * lab[..., 0], -lab[..., 2] / 200], axis=-1)
    xyz = np.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29)) * D50
    matrix = to_xyz(SRGB)
    linear = xyz @ np.linalg.inv(adaptation(matrix.sum(axis=1), D50) @ matrix).T
    return 255 * srgb_inverse(np.clip(linear, 0, 1))


def rgb_to_srgb(pixels: np.ndarray, primaries: Sequence[tuple[float, float]], curve: Curve) -> np.ndarray:
    """From pixels of another RGB to sRGB from 0 to 255, clipped."""
    linear = curve(pixels / 255) @ (np.linalg.inv(to_xyz(SRGB)) @ to_xyz(primaries)).T
    return 255 * srgb_inverse(np.clip(linear, 0, 1))


def _profile(
    space: bytes, tags: dict[bytes, bytes], white: np.ndarray = D50, pcs: bytes = b"XYZ ", kind: bytes = b"mntr"
) -> bytes:
    tags = {b"desc": _text("made for a test"), b"wtpt": _xyz(white), **tags}
    listed, body, start = struct.pack(">I", len(tags)), b"", 132 + 12 * len(tags)
    for name, data in tags.items():
        listed += name + struct.pack(">II", start + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    head = struct.pack(
        ">I4xI4s4s4s12x4s28x12s48x", start + len(body), 0x02400000, kind, space, pcs, b"acsp", _fixed(D50)
    )
    return head + listed + body


def _fixed(numbers: np.ndarray) -> bytes:
    return np.round(np.ravel(numbers) * 65536).astype(">i4").tobytes()


def _xyz(numbers: np.ndarray) -> bytes:
    return b"XYZ \0\0\0\0" + _fixed(numbers)


def _curve(curve: Curve) -> bytes:
    points = np.round(65535 * curve(np.arange(4096) / 4095)).astype(">u2")
    return b"curv\0\0\0\0" + struct.pack(">I", len(points)) + points.tobytes()


def _text(words: str) -> bytes:
    return b"desc\0\0\0\0" + struct.pack(">I", len(words) + 1) + words.encode() + bytes(79)


def _table(paper: float, black: float) -> bytes:
    corners = [ink(paper, black, *inks) for inks in itertools.product((0, 1), repeat=4)]
    points = bytes(round(value) for L, a, b in corners for value in (L * 2.55, a + 128, b + 128))
    steps = bytes(range(256))
    return b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + _fixed(np.eye(3)) + steps * 4 + points + steps * 3
