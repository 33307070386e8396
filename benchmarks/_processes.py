"""The processes below a process, as Linux lists them: who they are, and how much CPU they have used."""

import contextlib
import os
import pathlib


def below(process: int) -> list[int]:
    """Its children, and theirs."""
    children = []
    for path in pathlib.Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += map(int, path.read_text().split())
    return [found for child in children for found in [child, *below(child)]]


def cpu_of(process: int) -> float:
    """CPU seconds so far; 0 if it is gone."""
    try:
        fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
