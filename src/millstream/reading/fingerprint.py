"""What samples a source holds, as a short fingerprint of a few of them."""

import hashlib
from typing import Any

import numpy as np

from millstream.files import plain

_SAMPLES = 16


def fingerprint(source: Any) -> str | None:
    """A hash of up to sixteen samples, spread over a source; words if they have none, None if they cannot be read.

    The first and the last of them are read twice: what is then another says nothing about what the source holds.

    Example:
        >>> from millstream.reading.fingerprint import fingerprint
        >>> fingerprint(ms.ArraySampleSource({"x": np.arange(100)}))[:12]
        'c8371462c104'
    """
    indices = np.unique(np.linspace(0, len(source) - 1, _SAMPLES).astype(np.int64))
    try:
        samples, again = source.read(indices), source.read(indices[[0, -1]])
    except Exception:  # which may be over when they are read again, so that nothing is known of them
        return None
    if samples_hash(again) != samples_hash(_ends(samples)):
        return "not the same when read again"
    return samples_hash(samples) or "Python objects"


def _ends(samples: Any) -> Any:
    """The first and the last of some samples."""
    import jax

    if isinstance(samples, list):  # of objects
        return [samples[0], samples[-1]]
    return jax.tree.map(lambda leaf: np.asarray(leaf)[[0, -1]], samples)


def samples_hash(samples: Any) -> str | None:
    """A hash of a tree of arrays and plain values; None if it has anything else in it."""
    import jax

    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(samples):
        value = np.asarray(leaf)
        try:
            content = value.tobytes() if value.dtype.kind != "O" else plain.encode(value.tolist())
        except TypeError:
            return None
        for part in (
            jax.tree_util.keystr(path).encode(),
            value.dtype.name.encode(),
            repr(value.shape).encode(),
            content,
        ):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]
