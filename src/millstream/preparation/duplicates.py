"""Which samples come first of those that are equal, by their hashes."""

from collections.abc import Iterable

import numpy as np

_AT_ONCE = 1 << 25  # hashes that are sorted together: 1.5 GB with all that sorting needs


def first_occurrences(parts: Iterable[np.ndarray], samples: int, at_once: int = _AT_ONCE) -> np.ndarray:
    """A bool for each sample: whether no sample before it has its hash.

    Args:
        parts: The hashes of all samples, some at a time, as two numbers of 64 bits each. Read once for every `at_once`.
        samples: How many there are.
        at_once: How many are sorted together.

    Example:
        >>> from millstream.preparation.duplicates import first_occurrences
        >>> hashes = np.array([[5, 1], [5, 2], [5, 1], [7, 1]], np.uint64)
        >>> first_occurrences([hashes], 4).tolist()
        [True, True, False, True]
    """
    parts = list(parts)
    groups = -(-samples // at_once)
    kept = np.ones(samples, bool)
    for group in range(groups):
        places, words = [], []
        start = 0
        for part in parts:
            rows = np.flatnonzero(part[:, 0] % np.uint64(groups) == group)
            places.append(rows + start)
            words.append(part[rows])
            start += len(part)
        place, word = np.concatenate(places), np.concatenate(words)
        order = np.lexsort((word[:, 1], word[:, 0]))  # stable: equal ones stay in their order
        ordered = word[order]
        again = (ordered[1:] == ordered[:-1]).all(axis=1)
        kept[place[order[1:][again]]] = False
    return kept
