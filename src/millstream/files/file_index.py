"""What one pass over a file finds: where its records begin. It is kept among plan files and found again by the file."""

import hashlib
import time
from collections.abc import Iterable, Iterator

import numpy as np

from millstream.files import plain
from millstream.files.data_files import File, LocalFile
from millstream.files.plan_file import VERSION
from millstream.files.plan_folder import PlanFolder, find_plan, kept_array
from millstream.text.bar_line import ProgressLine

_CHUNK = 4 << 20  # bytes that are read at a time
_PIECES, _PIECE = 16, 4 << 10  # of a file, which are hashed: names, sizes and times of shards may be equal
_PATIENCE = 1.0  # seconds without a line of progress


def chunks(file: File, start: int = 0, size: int = _CHUNK) -> Iterator[tuple[int, bytes]]:
    """The bytes of a file from a position on, some at a time, each with its position."""
    for at in range(start, file.size, size):
        yield at, file.read_at(at, min(size, file.size - at))


def file_index(
    caller: str, file: File, kind: str, scan: Iterable[tuple[int, np.ndarray]], folder: PlanFolder | None
) -> np.ndarray:
    """What a scan finds in a file, as one array of numbers, mapped if it is kept.

    Args:
        caller: The caller's name, for errors.
        file: The file.
        kind: What is looked for, with the arguments that it depends on.
        scan: What is found, in order, each part with the position that was reached. It finds something in every file.
        folder: Where it is kept; None for memory, and, of a file of another machine, its cache on disk.
    """
    kept = find_index(caller, file, kind, folder)
    # Before the lock of a plan is held: who waits for it looks at its file to see whether its maker gets on.
    return keep_index(caller, file, kind, _found(caller, file, scan), folder) if kept is None else kept


def find_index(caller: str, file: File, kind: str, folder: PlanFolder | None) -> np.ndarray | None:
    """What was found in a file before, and kept; None if nothing was."""
    if folder is None:
        kept = file.kept(f"{VERSION} {caller} {kind}")
        return None if kept is None else plain.decode(kept)
    plan = find_plan(folder, f"{caller}-{file.stamp[0]}", file_identity(caller, file, kind))
    return None if plan is None else np.asarray(plan[0])  # which is mapped all the same


def keep_index(caller: str, file: File, kind: str, found: np.ndarray, folder: PlanFolder | None) -> np.ndarray:
    """Keep what was found in a file."""
    if folder is None:
        file.keep(f"{VERSION} {caller} {kind}", plain.encode(found, caller))
        return found
    name, of = f"{caller}-{file.stamp[0]}", file_identity(caller, file, kind)
    plan = kept_array(folder, caller, name, of, lambda making: making.store(found.dtype, len(found), [found]))
    return np.asarray(plan[0])


def file_identity(caller: str, file: File, kind: str) -> bytes:
    """A hash that tells what is found in a file from what is found in others."""
    pieces = hashlib.sha256()
    if isinstance(file, LocalFile) or not file.stamp[2]:  # others have a version
        size = min(_PIECE, file.size)
        starts = np.unique(np.linspace(0, file.size - size, _PIECES).astype(np.int64))
        for piece in file.read_ranges([(start, size) for start in starts.tolist()]):
            pieces.update(piece)
    facts = VERSION, caller, kind, list(file.stamp), pieces.digest()
    return hashlib.sha256(plain.encode(facts, caller)).digest()


def _found(caller: str, file: File, scan: Iterable[tuple[int, np.ndarray]]) -> np.ndarray:
    progress, begun, parts = ProgressLine(caller), time.monotonic(), []
    try:
        for done, part in scan:
            parts.append(part)
            if time.monotonic() - begun > _PATIENCE:
                progress.show(f"{file.name}, {done / file.size:.0%} looked through")
        return np.concatenate(parts)
    finally:
        progress.close()
