"""CRC-32C, the checksum of TFRecord files: by the package crc32c where it is installed, otherwise by tables."""

import functools
from collections.abc import Callable

import numpy as np

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, with the lowest bit first
_ALL = 0xFFFFFFFF
_BLOCK = 256  # bytes whose checksums are looked up together
_FEW = 64  # bytes for which Python is faster than NumPy
_CHUNK = 1 << 20  # bytes at a time: looking them up takes twelve times as much memory


def crc32c(data: bytes) -> int:
    """The CRC-32C of some bytes.

    Example:
        >>> from millstream.files.checksum import crc32c
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    return _fastest()(data)


@functools.cache
def _fastest() -> Callable[[bytes], int]:
    try:
        from crc32c import crc32c as by_processor
    except ImportError:
        return by_tables
    return by_processor


def by_tables(data: bytes) -> int:
    """The CRC-32C of some bytes, without another package: about 100 MB per second."""
    state = _ALL
    for first in range(0, len(data), _CHUNK):
        state = _advanced(state, data[first : first + _CHUNK])
    return state ^ _ALL


def _advanced(state: int, data: bytes) -> int:
    """The state of the checksum after some more bytes.

    It is linear in state and bytes. So the contribution of every byte is looked up by its value and its place in a
    block, and the sums of neighbouring blocks are joined in pairs.
    """
    if len(data) < _FEW:
        table = _byte_list()
        for byte in data:
            state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
        return state
    blocks = 1 << max(-(-len(data) // _BLOCK) - 1, 0).bit_length()
    padded = np.zeros(blocks * _BLOCK, np.uint8)  # zeros before the first byte change nothing
    padded[-len(data) :] = np.frombuffer(data, np.uint8)
    padded[-len(data) :][:4] ^= np.frombuffer(state.to_bytes(4, "little"), np.uint8)
    places = _place_tables()[np.arange(_BLOCK), padded.reshape(blocks, _BLOCK)]
    sums, level = np.bitwise_xor.reduce(places, axis=1), 0
    while len(sums) > 1:
        sums = _shifted(_shift_tables(level), sums[::2]) ^ sums[1::2]
        level += 1
    return int(sums[0])


@functools.cache
def _byte_table() -> np.ndarray:
    """What a byte adds to the checksum."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ np.where(table & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return table


@functools.cache
def _byte_list() -> list[int]:
    return _byte_table().tolist()


@functools.cache
def _place_tables() -> np.ndarray:
    """What a byte adds to the checksum of a block, by its place there and its value."""
    tables = [_byte_table()]
    for _ in range(_BLOCK - 1):
        tables.append(_after_zero(tables[-1]))
    return np.stack(tables[::-1])


@functools.cache
def _shift_tables(level: int) -> np.ndarray:
    """What becomes of each byte of a state after 2**level blocks of zeros, by its place in the state and its value."""
    if level:
        half = _shift_tables(level - 1)
        return _shifted(half, half)
    states = np.arange(256, dtype=np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    for _ in range(_BLOCK):
        states = _after_zero(states)
    return states


def _shifted(tables: np.ndarray, states: np.ndarray) -> np.ndarray:
    parts = (tables[place][(states >> np.uint32(8 * place)) & np.uint32(0xFF)] for place in range(4))
    return functools.reduce(np.bitwise_xor, parts)


def _after_zero(states: np.ndarray) -> np.ndarray:
    return _byte_table()[states & np.uint32(0xFF)] ^ (states >> np.uint32(8))
