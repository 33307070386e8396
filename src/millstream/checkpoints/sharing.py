"""Files that several checkpoints of a directory have in common."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SharedFile:
    """A file that a checkpoint has already, for a new one to have under the same name without writing it again.

    Both are names of one file: deleting one checkpoint leaves the other whole, and damage to the file damages both.

    Attributes:
        step: The step of the checkpoint that has it.
        size: Its size in bytes.
        sha256: Its SHA-256.
    """

    step: int
    size: int
    sha256: str
