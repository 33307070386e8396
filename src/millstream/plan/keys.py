"""Key arithmetic: one documented cipher, the same in NumPy and in a traced program.

Everything random in Millstream is Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", 2011), written here for any array namespace `xp` so that no JAX version, PRNG flag or `x64`
setting can change a stream. A key is a pair of uint32 arrays. A name ("the order", a stage) makes a key of its own
from the run's key; an epoch and a sample index make one from that:

    run key --name--> stage key --epoch--> epoch key --sample index--> sample key

The cipher is a bijection of its counter, so two epochs or two samples can never get the same key, and seed and
epoch cannot alias.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

Array = Any  # a NumPy or a JAX array
Key = tuple[Array, Array]
Cipher = Callable[[Key, Key], Key]  # `threefry2x32`, in whatever way it is written

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_FEW = 8  # counters that Python's numbers encrypt in 7 us each; NumPy takes 78 us for up to hundreds of them


def threefry2x32(key: Key, counter: Key) -> Key:
    """Encrypt a pair of uint32 arrays under a pair of uint32 arrays; everything broadcasts."""
    words = (*key, *counter)
    if not all(isinstance(word, np.generic | np.ndarray) for word in words):
        return traced_once(_encrypt_arrays)(*words)
    together = np.broadcast(*words)
    if together.size <= _FEW:
        found = np.array([_encrypt(*map(int, each)) for each in together], np.uint32).reshape(-1, 2)
        return found[:, 0].reshape(together.shape)[()], found[:, 1].reshape(together.shape)[()]
    return _encrypt_arrays(*words)


@functools.cache
def traced_once(fn: Callable[..., Any], static: tuple[int, ...] = ()) -> Callable[..., Any]:
    """A function of JAX arrays that is traced once per process, not once per program.

    Tracing a cipher takes 8 ms, and a program has three to five of them. XLA inlines the function.

    Args:
        fn: A function at the top level of a module.
        static: The positions of its arguments that are not arrays.
    """
    import jax

    return jax.jit(fn, static_argnums=static)


def _encrypt_arrays(first: Array, second: Array, left: Array, right: Array) -> Key:
    """Twenty rounds on (left, right) under the key (first, second)."""
    schedule = (first, second, first ^ second ^ np.uint32(0x1BD11BDA))
    left, right = left + first, right + second
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            left = left + right
            right = (right << np.uint32(rotation)) | (right >> np.uint32(32 - rotation))
            right = right ^ left
        left = left + schedule[(block + 1) % 3]
        right = right + schedule[(block + 2) % 3] + np.uint32(block + 1)
    return left, right


def _encrypt(first: int, second: int, left: int, right: int) -> tuple[int, int]:
    """The same of four numbers of Python's."""
    mask = 0xFFFFFFFF
    schedule = (first, second, first ^ second ^ 0x1BD11BDA)
    left, right = left + first & mask, right + second & mask
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            left = left + right & mask
            right = (right << rotation & mask | right >> 32 - rotation) ^ left
        left = left + schedule[(block + 1) % 3] & mask
        right = right + schedule[(block + 2) % 3] + block + 1 & mask
    return left, right


@functools.cache
def name_words(name: str) -> tuple[np.uint32, np.uint32]:
    """The two words that stand for a name: the first eight bytes of its SHA-256, little-endian."""
    words = np.frombuffer(hashlib.sha256(name.encode()).digest()[:8], "<u4")
    return words[0], words[1]


def named_key(words: Array, name: str, cipher: Cipher = threefry2x32) -> Key:
    """The key that belongs to `name` in the run whose raw key data are `words` (uint32, last axis 2 or 4)."""
    return _under(words, name_words(name), cipher)


def named_keys(words: Array, names: Sequence[str], axes: int, cipher: Cipher) -> Key:
    """The keys that belong to some names, along a first axis, with that many axes of length 1 after it."""
    found = np.array([name_words(name) for name in names]).reshape(len(names), *[1] * axes, 2)
    return _under(words, (found[..., 0], found[..., 1]), cipher)


@np.errstate(over="ignore")
def _under(words: Array, counter: Key, cipher: Cipher) -> Key:
    key = (words[..., 0], words[..., 1])
    for i in range(2, words.shape[-1], 2):
        key = cipher(key, (words[..., i], words[..., i + 1]))
    return cipher(key, counter)


@np.errstate(over="ignore")
def fold(xp: ModuleType, key: Key, number: Array, cipher: Cipher = threefry2x32, high: Array = None) -> Key:
    """The key for a number (an epoch, a step, a sample index) under `key`; 64-bit numbers keep all their bits.

    Where there are no 64-bit numbers, `high` are the upper bits of a number that needs them.
    """
    number = xp.asarray(number)
    if number.dtype.itemsize == 8:
        return cipher(key, (number.astype(np.uint32), (number >> 32).astype(np.uint32)))
    number = number.astype(np.uint32)
    return cipher(key, (number, xp.zeros_like(number) if high is None else high))
