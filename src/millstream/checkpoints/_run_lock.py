"""One run per directory: who writes into it, and since when."""

import contextlib
import datetime
import json
import os
import pathlib
import socket
import weakref

from millstream.files.lock import locked
from millstream.files.safe_path import plain_reader

_NAME = ".lock"


class RunLock:
    """Holds a directory for this process, until a `with` is over, or it is forgotten, or the process ends in any way.

    Args:
        who: Who speaks in errors.
        directory: The directory.

    Raises:
        RuntimeError: Another run holds it.
    """

    def __init__(self, who: str, directory: pathlib.Path) -> None:
        stack, path = contextlib.ExitStack(), directory / _NAME
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}).encode()
        try:
            # Where a file system has no locks, one run per directory is left to the user.
            stack.enter_context(locked(path, 0.0, holder=holder))
        except TimeoutError:
            raise RuntimeError(
                f"{who} needs a directory that no other run writes to. {directory} is held by {_holder(path)}. Wait "
                "for that run or end it, give another directory, or open this one with read_only=True."
            ) from None
        self._release = weakref.finalize(self, stack.close)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._release()


def _holder(path: pathlib.Path) -> str:
    try:
        with plain_reader(path) as file:
            found = json.loads(file.read(4096))
        return f"process {found['pid']} on {found['host']}, since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
