"""Lanes of the soak: processes that run one case after the other, in a process of their own or as programs."""

import faulthandler
import json
import logging
import os
import pathlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pyarrow.parquet  # noqa: F401 (before forks, because it takes its time)

from soak.cases import Case, case_of
from soak.fault import Disk
from soak.programs import run_program
from soak.runs import run_case

LIMIT = 180  # seconds that a case may take
CASES = 150  # of one process, whose compiled programs add up


class Runner:
    """A fork of this process that runs cases in itself, until it dies or is let go.

    Args:
        base: Where the cases have their folders.
        disk: A disk that can be full.
    """

    def __init__(self, base: pathlib.Path, disk: Disk) -> None:
        self.count = 0
        self._said = base / f"said-{time.monotonic_ns()}"
        asked, self._ask = os.pipe()
        self._answers, answer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                os.close(self._ask)
                os.close(self._answers)
                code = _serve(asked, answer, base, disk, self._said)
            finally:
                os._exit(code)
        os.close(asked)
        os.close(answer)
        self._reader = os.fdopen(self._answers)

    def run(self, case: Case) -> dict[str, Any]:
        """What came of a case. If the process dies of it, that came of it, and the runner is done."""
        self.count += 1
        os.write(self._ask, b"%d\n" % case.number)
        line = self._reader.readline()
        if line.endswith("\n"):
            return json.loads(line)
        self.count = CASES
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._pid = 0
        said = self._said.read_text(errors="replace")[-8000:]
        faults = dict.fromkeys(case.faults, 1)
        wrong = [f"the process ended with {code}, after {LIMIT} s at the latest: {said}"]
        return {"faults": faults, "wrong": wrong, "lost": 0, "repeated": 0, "leaks": 0}

    def close(self) -> None:
        """Let the process end."""
        os.close(self._ask)
        self._reader.close()
        if self._pid:
            os.waitpid(self._pid, 0)


def _serve(asked: int, answer: int, base: pathlib.Path, disk: Disk, said: pathlib.Path) -> int:
    os.setsid()  # Ctrl-C of the terminal is for the soak, which then lets this end
    output = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(output, fd)
    logging.disable()
    with os.fdopen(asked) as questions:
        for line in questions:
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            result = run_case(case_of(int(line)), base, base, disk)
            os.write(answer, json.dumps(result).encode() + b"\n")
            faulthandler.cancel_dump_traceback_later()
    return 0


class Cases:
    """Runs cases, one after the other."""

    def __init__(self, base: pathlib.Path) -> None:
        self._base = base
        self._disk = Disk(_small_disk(base))
        self._runner: Runner | None = None

    def run(self, number: int) -> dict[str, Any]:
        """What came of the case with a number."""
        case, begun = case_of(number), time.monotonic()
        if case.is_program:
            result = run_program(case, self._base, self._base, self._disk)
        else:
            if self._runner is not None and self._runner.count >= CASES:
                self._runner.close()
                self._runner = None
            if self._runner is None:
                self._runner = Runner(self._base, self._disk)
            result = self._runner.run(case)
        return {**result, "number": number, "executor": case.executor, "seconds": time.monotonic() - begun}

    def close(self) -> None:
        """End what is left."""
        if self._runner is not None:
            self._runner.close()
        if self._disk.folder is not None:
            subprocess.run(["umount", str(self._disk.folder)], check=False)


def _small_disk(base: pathlib.Path) -> pathlib.Path | None:
    """A small file system, if this is a mount namespace that others do not see."""
    if os.environ.get("MILLSTREAM_SOAK_MOUNTS") != "own":
        return None
    (base / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(base / "small")], check=True)
    return base / "small"


def lane(numbers: Iterator[int], deadline: float, answer: int) -> None:
    """Run cases to the last one or until the time is up; what comes of each is a line of JSON."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        cases = Cases(pathlib.Path(folder))
        try:
            for number in numbers:
                if time.monotonic() > deadline:
                    break
                os.write(answer, json.dumps({"begins": number}).encode() + b"\n")
                os.write(answer, json.dumps(cases.run(number)).encode() + b"\n")
        finally:
            cases.close()


def start_lane(numbers: Iterator[int], deadline: float) -> tuple[int, int]:
    """A lane in a process of its own: its number, and where to read its lines."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        code = 0
        try:
            lane(numbers, deadline, writer)
        except KeyboardInterrupt:
            code = 130
        except BaseException as error:
            os.write(writer, json.dumps({"broken": repr(error)}).encode() + b"\n")
            code = 1
        finally:
            os._exit(code)
    os.close(writer)
    return pid, reader
