"""The history of a run from its newest checkpoint, without the arrays, which may be large."""

import hashlib
import pathlib

from millstream.checkpoints import DamagedCheckpoint
from millstream.checkpoints.folders import step_name, steps_in
from millstream.checkpoints.manifest import making_sense_of, read_manifest
from millstream.files.safe_path import plain_reader
from millstream.loops.history_parts import decode_history, is_history
from millstream.report._run_data import RunData

_FILES = "files/"


def read_checkpoint(folder: pathlib.Path) -> RunData:
    """The run whose checkpoints are in a folder of `ms.checkpoint`, as far as the newest one has it."""
    wrong = []
    for step in reversed(steps_in(folder)):
        try:
            with making_sense_of("its history"):
                history = decode_history(_history(folder / step_name(step)))
        except DamagedCheckpoint as error:
            wrong.append(f"\n  {step_name(step)}: {error}")
            continue
        return RunData(folder.name, f"the checkpoint of step {step:,}", history)
    raise DamagedCheckpoint(
        f"millstream report found no checkpoint in {folder} whose history is whole:{''.join(wrong)}"
    )


def _history(checkpoint: pathlib.Path) -> dict[str, bytes]:
    """The files with the history, compared with their hashes."""
    found = {}
    for path, (_, digest) in read_manifest(checkpoint).files.items():
        name = path.removeprefix(_FILES)
        if path.startswith(_FILES) and is_history(name):
            with plain_reader(checkpoint / path) as file:
                found[name] = file.read()
            if hashlib.sha256(found[name]).hexdigest() != digest:
                raise DamagedCheckpoint(f"{path} differs from its SHA-256 in the manifest")
    if not found:
        raise DamagedCheckpoint("it has no history, so ms.checkpoint has not written it")
    return found
