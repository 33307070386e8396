"""Finding out what a run was written as."""

import collections
import os
import pathlib
from collections.abc import Sequence

from millstream.callbacks.record_file import RECORD
from millstream.checkpoints.folders import steps_in
from millstream.report._read_checkpoint import read_checkpoint
from millstream.report._read_files import read_csv, read_jsonl, read_record
from millstream.report._run_data import RunData
from millstream.text.errors import require_path

_WHO = "millstream report"
_LOOKS_FOR = f"""\
It looks for:
  a folder of ms.record: {RECORD} in it
  a folder of ms.checkpoint: folders named by steps, such as 0000000100
  a file of ms.jsonl_logger: its name ends with .jsonl
  a file of ms.csv_logger: its name ends with .csv"""


def read_runs(paths: Sequence[str | os.PathLike[str]]) -> list[RunData]:
    """Several runs. Those of one name are called by as much of their paths as tells them apart."""
    runs = [read_run(path) for path in paths]
    places = [pathlib.Path(path).expanduser().resolve().parts for path in paths]
    for length in range(2, max(map(len, places)) + 1):
        names = collections.Counter(run.name for run in runs)
        for run, parts in zip(runs, places, strict=True):
            if names[run.name] > 1:
                run.name = pathlib.PurePath(*parts[-length:]).as_posix()
    return runs


def read_run(path: str | os.PathLike[str]) -> RunData:
    """The run that was written to a folder or a file."""
    found = require_path(_WHO, "the path of a run", path).expanduser().resolve()
    if not found.exists():
        raise FileNotFoundError(f"{_WHO} found nothing at {found}.\n{_LOOKS_FOR}")
    if found.is_file():
        readers = {".jsonl": read_jsonl, ".csv": read_csv}
        if found.suffix not in readers:
            raise ValueError(f"{_WHO} cannot tell what {found} is.\n{_LOOKS_FOR}")
        return readers[found.suffix](found)
    if (found / RECORD).exists():
        return read_record(found / RECORD, found.name)
    if steps_in(found):
        return read_checkpoint(found)
    names = sorted(path.name for path in found.iterdir())
    listed = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    raise FileNotFoundError(f"{_WHO} found no run in {found}, which has: {listed or 'nothing'}.\n{_LOOKS_FOR}")
