"""Damaged copies of files: what disks, networks and interrupted programs leave of them.

`DAMAGES=500 pytest tests/test_mds.py` makes five hundred of each file.
"""

import os
from collections.abc import Iterator

import numpy as np

DAMAGES = int(os.environ.get("DAMAGES", "100"))


def damaged(data: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """That many copies of some bytes, each with a bit flipped, cut short, or written over in the middle."""
    chance = np.random.default_rng(seed)
    for number in range(count):
        place = int(chance.integers(len(data)))
        if number % 4 == 0:
            yield data[:place]
        elif number % 4 == 1:
            noise = chance.bytes(min(8, len(data) - place))
            yield data[:place] + noise + data[place + len(noise) :]
        else:
            yield data[:place] + bytes([data[place] ^ (1 << int(chance.integers(8)))]) + data[place + 1 :]
