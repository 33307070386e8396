"""The history of a run from its newest checkpoint, without the arrays, which may be large."""

import hashlib
import pathlib

from millstream.checkpoints import DamagedCheckpoint
from millstream.checkpoints.folders import step_name, steps_in
from millstream.checkpoints.manifest import making_sense_of, read_manifest
from millstream.files import plain
from millstream.files.safe_path import plain_reader
from millstream.loops.history import History
from millstream.report._run_data import RunData

_HISTORY = "files/history"


def read_checkpoint(folder: pathlib.Path) -> RunData:
    """The run whose checkpoints are in a folder of `ms.checkpoint`, as far as the newest one has it."""
    wrong = []
    for step in reversed(steps_in(folder)):
        try:
            with making_sense_of(_HISTORY):
                history = History.from_state(plain.decode(_history(folder / step_name(step))))
        except DamagedCheckpoint as error:
            wrong.append(f"\n  {step_name(step)}: {error}")
            continue
        return RunData(folder.name, f"the checkpoint of step {step:,}", history)
    raise DamagedCheckpoint(
        f"millstream report found no checkpoint in {folder} whose history is whole:{''.join(wrong)}"
    )


def _history(checkpoint: pathlib.Path) -> bytes:
    """The file with the history, compared with its hash."""
    manifest = read_manifest(checkpoint)
    if _HISTORY not in manifest.files:
        raise DamagedCheckpoint("it has no history, so ms.checkpoint has not written it")
    with plain_reader(checkpoint / _HISTORY) as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != manifest.files[_HISTORY][1]:
        raise DamagedCheckpoint(f"{_HISTORY} differs from its SHA-256 in the manifest")
    return data
