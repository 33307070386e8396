"""What samples a source holds, as a fingerprint of a few of them, and what else tells them from others."""

import contextlib
import hashlib
import weakref
import zlib
from typing import Any

import numpy as np

from millstream.files import plain
from millstream.files.changed import file_stamp
from millstream.reading.contracts import IndexedSource
from millstream.reading.host_source import RowSource, as_host_source
from millstream.reading.memory import mapped_file
from millstream.reading.view import View

_SAMPLES = 16
_CHANGING = "not the same when read again"
_OBJECTS = "Python objects"


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
        samples, again = _read(source, indices), _read(source, indices[[0, -1]])
    except Exception:  # which may be over when they are read again, so that nothing is known of them
        return None
    if samples_hash(again) != samples_hash(_ends(samples)):
        return _CHANGING
    return samples_hash(samples) or _OBJECTS


def _read(source: IndexedSource, indices: np.ndarray) -> Any:
    """Samples, stacked; or one by one, if each may have a shape of its own.

    What the source is decides, and not whether stacking fails: an error that is over at the next try would change what
    is hashed.
    """
    host = as_host_source(source) if source.arrays is None else None
    if host is None or not host.whole_samples:
        return source.read(indices)
    return host.read_samples(indices, None)[0]


def identity(source: IndexedSource, *, reads: bool = True) -> tuple[tuple[str, Any], ...]:
    """What tells the samples of a source from others, as plain values by name; None for what cannot be told.

    Arrays in memory are hashed whole. Of anything else there are the length, the structure of a sample, a hash of
    sixteen of them, and the stamps of its files if the source has `stamps` or its arrays are mapped.

    Args:
        source: A source or a view.
        reads: False for what depends on numbers of samples alone, and not on what they hold.
    """
    base = source.source if isinstance(source, View) else source
    view = repr(source.selection.functions) if isinstance(source, View) else ""
    starts = getattr(base, "part_starts", None)  # of the sources that were joined
    known = ("samples", len(base)), ("view", view), ("parts", [0] if starts is None else starts.tolist())
    if not reads:
        return known
    host = base if base.arrays is not None else as_host_source(base)
    stamps = [list(stamp) for stamp in getattr(host, "stamps", ())]
    return (*known, ("sample", repr(base.spec())), ("files", stamps), *_contents(base))


def _contents(base: IndexedSource) -> list[tuple[str, str | None]]:
    if base.arrays is None:
        found = fingerprint(base)
        arrays = _hash_arrays(base.data) if isinstance(base, RowSource) else ""  # which the user may change
        return [("contents", None if found in (_CHANGING, _OBJECTS) else found), ("arrays", arrays)]
    try:
        return [("arrays", _hashed[base])]
    except (KeyError, TypeError):  # not seen yet, or a class of the user's that cannot be hashed
        found = _hash_arrays(getattr(base, "data", base.arrays))
        with contextlib.suppress(TypeError):
            _hashed[base] = found
        return [("arrays", found)]


_hashed: "weakref.WeakKeyDictionary[IndexedSource, str]" = weakref.WeakKeyDictionary()


def _hash_arrays(data: Any) -> str:
    """A hash of all arrays of a tree, or of the stamps of those that are in files."""
    import jax

    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        file = mapped_file(leaf)
        if file is not None:
            contents = repr(file_stamp(str(file.filename)))
        elif hasattr(leaf, "__array__"):
            contents = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).data)  # 3 times as fast as SHA-256
        else:  # rows of a file, which the source has a stamp of
            contents = ""
        digest.update(repr((jax.tree_util.keystr(path), str(leaf.dtype), leaf.shape, contents)).encode())
    return digest.hexdigest()


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
