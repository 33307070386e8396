"""The history of a run in its checkpoints: files of some rows each, which later checkpoints share.

A checkpoint has all rows, in parts named by their first row and the one after their last. Rows never change, but for
the newest, which may get more values and is a part of its own. So a save writes the rows since an earlier one, and
shares the parts before them. Eight parts of about the same size become one, so there are few of them, and a row is
written a few times at most.

The earlier checkpoint is the one before last, if it is still there: the newest two share nothing then, and damage to a
file leaves one of them whole.
"""

import dataclasses
import hashlib
import re
import weakref
from collections.abc import Mapping, Sequence

from millstream.checkpoints import CheckpointStore
from millstream.checkpoints.folders import LinkedFile
from millstream.files import plain
from millstream.loops._history import History

_NAME = re.compile(r"history-(\d+)-(\d+)")
_BITS = 3  # eight parts become one
# The newest two checkpoints of each history, by directory. What this process has saved it need not compare by reading.
_saved: "weakref.WeakKeyDictionary[History, dict[str, list[_Saved]]]" = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class _Part:
    """Rows of a history that are in a file."""

    start: int
    stop: int
    size: int
    sha256: str

    @property
    def name(self) -> str:
        return _name(self.start, self.stop)


@dataclasses.dataclass(frozen=True)
class _Saved:
    """A checkpoint of a history, and the parts in it that do not change any more."""

    step: int
    parts: Sequence[_Part]


def encode_history(history: History, store: CheckpointStore, step: int) -> dict[str, bytes | LinkedFile]:
    """The files of a history for a checkpoint of a step that is about to be saved in a store, by their names."""
    saved = _saved.setdefault(history, {}).setdefault(str(store.directory), [])
    base, rows = _base(saved, store), len(history)
    final = max(rows - 1, 0)
    kept = [] if base is None else list(base.parts[: _count_kept(base.parts, final)])
    files: dict[str, bytes | LinkedFile] = {}
    if base is not None:
        files |= {part.name: LinkedFile(base.step, part.size, part.sha256) for part in kept}
    start = kept[-1].stop if kept else 0
    if start < final:
        content = _encode(history, start, final)
        kept.append(_Part(start, final, len(content), hashlib.sha256(content).hexdigest()))
        files[kept[-1].name] = content
    files[_name(final, rows)] = _encode(history, final, rows)
    saved[:] = [*[earlier for earlier in saved if earlier.step != step][-1:], _Saved(step, kept)]
    return files


def decode_history(files: Mapping[str, bytes]) -> History:
    """The history whose parts are among the files of a checkpoint; whatever is wrong with them is some error."""
    parts = sorted((int(match[1]), int(match[2]), match[0]) for match in map(_NAME.fullmatch, files) if match)
    reached, states = 0, []
    for start, stop, name in parts:
        state = plain.decode(files[name])
        if start != reached or state["start"] != start or len(state["moments"]["times"]) != stop - start:
            raise ValueError(f"{name} does not have the rows from {reached} on that its name promises")
        states.append(state)
        reached = stop
    if not states:
        raise ValueError("it has no history")
    return History.from_state(*states)


def is_history(name: str) -> bool:
    """Whether a file of a checkpoint is a part of its history."""
    return _NAME.fullmatch(name) is not None


def _base(saved: Sequence[_Saved], store: CheckpointStore) -> _Saved | None:
    """The checkpoint to share parts with: the one before last, or the last if only that is left."""
    for earlier in saved if len(saved) > 1 else ():
        if store.has_files(earlier.step, {part.name: (part.size, part.sha256) for part in earlier.parts}):
            return earlier
    return None


def _count_kept(parts: Sequence[_Part], stop: int) -> int:
    """How many parts stay as they are if the rows up to `stop` are saved: the newest become one when they are many."""
    kept = len(parts)
    while True:
        start = parts[kept - 1].stop if kept else 0
        small = kept
        while small and _level(parts[small - 1].stop - parts[small - 1].start) <= _level(stop - start):
            small -= 1
        if kept - small < (1 << _BITS) - 1:
            return kept
        kept = small


def _level(rows: int) -> int:
    return rows.bit_length() // _BITS


def _name(start: int, stop: int) -> str:
    return f"history-{start}-{stop}"


def _encode(history: History, start: int, stop: int) -> bytes:
    return plain.encode(history.to_state(start, stop, outputs=False), "a checkpoint")
