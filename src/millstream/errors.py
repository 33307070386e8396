"""The errors that are worth catching: each says what went wrong with the data, the workers or the storage of a run."""

from typing import TYPE_CHECKING, Any

from millstream._lazy import no_such_name

if TYPE_CHECKING:
    from millstream.inspect import Verification
    from millstream.loops import LoopOutput
    from millstream.reading.contracts import PyTree

_TERMINATED = 128 + 15  # what a shell calls a process that SIGTERM has ended


class FileChanged(OSError):
    """A file is not what it was when it was opened, or has become unreadable."""


class WorkerStalled(TimeoutError):
    """No batch came for as long as one may take; the text says where each reader was."""


class WorkerCrashed(RuntimeError):
    """A worker process died repeatedly; the message names the sample."""


class SharedMemoryFull(OSError):
    """There is not enough memory to share with worker processes."""


class DownloadError(OSError):
    """A file could not be had from any of its addresses."""


class DamagedCheckpoint(RuntimeError):
    """A checkpoint whose files are not those that were saved, or make no sense."""


class NoCheckpoint(FileNotFoundError):
    """There is no checkpoint, or none of that step."""


class StorageFailed(OSError):
    """The file system did not do what a checkpoint needs: no room, no descriptors, no rights, a disk that is gone.

    `errno` says which, as far as it is known. Checkpoints that were whole before are untouched.
    """


class Preempted(SystemExit):
    """SIGTERM has ended a loop, after everything was saved: left alone, it ends the program with status 143.

    Example:
        >>> try:
        ...     raise ms.errors.Preempted(None)
        ... except ms.errors.Preempted as preempted:
        ...     preempted.code
        143

    Attributes:
        loop_output: What the loop would have returned.
    """

    def __init__(self, loop_output: "LoopOutput[PyTree]") -> None:
        super().__init__(_TERMINATED)
        self.loop_output = loop_output


class VerificationFailed(AssertionError):
    """A loader breaks a promise. The text is the table and the first difference.

    Attributes:
        verification: The result.
    """

    def __init__(self, verification: "Verification") -> None:
        super().__init__(f"DataLoader.verify has found a difference.\n\n{verification}")
        self.verification = verification


def __dir__() -> list[str]:
    return sorted(name for name, value in globals().items() if isinstance(value, type) and value.__module__ == __name__)


if not TYPE_CHECKING:  # to a type checker, it would be a promise that every name is there

    def __getattr__(name: str) -> Any:
        raise no_such_name(__name__, name)
