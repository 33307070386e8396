"""Checkpoints: whole, verified states of a run in a directory."""

from millstream.checkpoints._saving import Retention as Retention
from millstream.checkpoints._store import Checkpoint as Checkpoint
from millstream.checkpoints._store import CheckpointStore as CheckpointStore

__all__: list[str]
