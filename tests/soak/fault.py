"""What a fault of the soak is: it strikes at some moment, knows what may come of it, and is fixed."""

import contextlib
import os
import pathlib
import random
import resource
import shutil
import threading
import time
from typing import Any

from soak.cases import Case

UNHOOKED = ("scan", "fused")  # ways that tell nothing of their batches until the end


class Disk:
    """A disk that can be full: a small file system of its own, or a limit to the size of files.

    Args:
        folder: A file system that may be filled; None for a limit.
    """

    def __init__(self, folder: pathlib.Path | None) -> None:
        self.folder = folder
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, room: int) -> None:
        """Leave only that many bytes."""
        if self.folder is None:
            return resource.setrlimit(resource.RLIMIT_FSIZE, (room, self._limits[1]))
        with (self.folder / "ballast").open("wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(self.folder).free - room))

    def free(self) -> None:
        """Make room again."""
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)
        if self.folder is not None:
            (self.folder / "ballast").unlink(missing_ok=True)


class Fault:
    """One thing that goes wrong once in a run; this one does nothing.

    Args:
        name: The kind.
        case: The run.
        folder: Of the run.
        disk: A disk that can be full.
        chance: Decides on targets and moments.
        steps: How many batches the run has.

    Attributes:
        moment: The batch after which it strikes.
        struck: How often it has.
        at: What happens at samples.
        delay: How long a sample takes at most.
        timeout: How long to wait for a batch, where something may hang; 0 for the usual time.
        rebuilds: Whether the loader has to be built again after an error.
        loader: The loader, once it is built.
    """

    warnings: tuple[str, ...] = ()
    timed = False  # whether it strikes at a time, besides a batch
    timeout = 0.0
    rebuilds = False
    delay = 0.0
    loader: Any = None
    at: tuple[tuple[int, str], ...] = ()

    def __init__(
        self, name: str, case: Case, folder: pathlib.Path, disk: Disk, chance: random.Random, steps: int
    ) -> None:
        self.name, self.case, self.folder, self.disk, self.chance = name, case, folder, disk, chance
        self.struck, self._done, self._timer = 0, False, None
        self.moment = chance.randrange(1, max(2, steps))
        part = chance.choice(case.parts)
        self.index = chance.randrange(1, part.samples)  # the first one is read when a loader is built
        self.target = part.first + self.index
        if self.timed and (case.way in UNHOOKED or chance.random() < 0.5):
            self.moment = 10**9
            self._timer = threading.Timer(chance.uniform(0.0, 0.8), self._strike_once)

    def __enter__(self) -> "Fault":
        if self._timer is not None:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.settle()
        self.fix()

    def settle(self) -> None:
        """Wait until it has struck, if a timer has it strike."""
        if self._timer is not None:
            self._timer.join()
            time.sleep(0)  # a signal arrives here

    def batch(self, count: int) -> None:
        """So many batches have come."""
        if count >= self.moment:
            self._strike_once()

    def _strike_once(self) -> None:
        if not self._done:
            self._done = True
            self.strike()

    def strike(self) -> None:
        """Do the harm."""

    def fix(self) -> None:
        """Undo the harm, as far as it can be undone."""

    def expects(self, error: BaseException) -> bool:
        """Whether this error may come of it."""
        return False

    def told(self, error: BaseException) -> None:
        """This error has come of it."""
        self.fix()


def all_of(error: BaseException) -> str:
    """All that an error says: its notes, its causes and theirs."""
    texts: list[str] = []
    while error is not None and len(texts) < 20:
        texts += [repr(error), str(error), *getattr(error, "__notes__", [])]
        error = error.__cause__ or error.__context__  # pyright: ignore[reportAssignmentType]
    return "\n".join(texts)
