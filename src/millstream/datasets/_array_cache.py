"""Arrays that took work to make, kept on disk for the next run."""

import hashlib
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from millstream.files.atomic import written
from millstream.files.lock import locked

_VERSION = 1  # of what is made from the same files; counts up when that changes
_TIMEOUT = 600.0


def cache_arrays(
    folder: pathlib.Path, name: str, sources: Sequence[pathlib.Path], make: Callable[[], dict[str, np.ndarray]]
) -> pathlib.Path:
    """The `.npz` file of the arrays that `make` gives, written the first time.

    Args:
        folder: Where the file is kept.
        name: What it is called. Its name also tells which sources it was made from; others are then removed.
        sources: The files it is made from. If one of them changes, the arrays are made again.
        make: Makes the arrays.
    """
    facts = [_VERSION, *((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sources)]
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    final = folder / f"{name}-{key}.npz"
    if not final.exists():
        with locked(folder / f".{name}.lock", _TIMEOUT) as alone:
            if not final.exists():
                with written(final, alone=alone) as file:
                    np.savez(file, **make())  # pyright: ignore[reportArgumentType]
            for old in folder.glob(f"{name}-{'[0-9a-f]' * len(key)}.npz"):  # and no file of the user's own
                if old != final:
                    old.unlink(missing_ok=True)
    return final
