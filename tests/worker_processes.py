"""The processes that this one has started, as Linux lists them."""

import contextlib
import os
import pathlib
import time


def _children(process: int) -> list[int]:
    found: list[int] = []
    for task in pathlib.Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def _is_nursery(process: int) -> bool:
    """Whether workers are forked from it, or will be as soon as it has loaded what they need."""
    place = pathlib.Path(f"/proc/{process}")
    with contextlib.suppress(OSError):
        # One that is being started has no words yet, and one that has ended has none any more.
        while not (words := (place / "cmdline").read_bytes()) and ") Z " not in (place / "stat").read_text():
            time.sleep(0.001)
        return b"nursery_process" in words
    return False


def nurseries() -> list[int]:
    """The processes that workers are forked from: one, which stays, and older ones until their last worker ends."""
    return [child for child in _children(os.getpid()) if _is_nursery(child)]


def children() -> list[int]:
    """Workers and all other processes that this one has started, but for those that workers are forked from."""
    own = _children(os.getpid())
    parents = [child for child in own if _is_nursery(child)]
    with contextlib.suppress(FileNotFoundError):  # one that has just ended
        own += [worker for parent in parents for worker in _children(parent)]
    return [child for child in own if child not in parents]
