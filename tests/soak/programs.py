"""Whole programs that are ended from outside and taken up again, until one comes to its end."""

import concurrent.futures
import contextlib
import faulthandler
import logging
import os
import pathlib
import random
import secrets
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from typing import Any

from jax._src import xla_bridge

import millstream as ms
from soak import chaos
from soak.cases import PROGRAMS, Case
from soak.fault import Disk
from soak.leaks import left_over
from soak.run import Run, read_log
from soak.verdict import Verdict
from soak.ways import use_up

SIGNALS: dict[str, signal.Signals] = dict(zip(PROGRAMS, (signal.SIGKILL, signal.SIGTERM, signal.SIGINT), strict=True))
# How a program may end: by itself, by the signal, or as the library says.
CODES = {signal.SIGKILL: {0, -9}, signal.SIGTERM: {0, -15, 143}, signal.SIGINT: {0, 130}}
LIMIT = 120  # seconds after which a program shows its stacks and ends
CODE_OF_ERROR = 1


def run_program(case: Case, base: pathlib.Path, files: pathlib.Path, disk: Disk) -> dict[str, Any]:
    """Run a case as programs that are ended; what came of it, as plain values. Only where no JAX was started."""
    folder = base / f"case-{case.number}"
    folder.mkdir()
    run = Run(case, folder, files, disk, folder / "log")
    verdict, fault = Verdict(case, run.stream, run.steps, run.faults), next(f for f in case.faults if f in PROGRAMS)
    wrong, ended, leaks = _ended_again_and_again(case, folder, files, disk, SIGNALS[fault])
    wrong += [] if wrong else verdict.judge(read_log(folder / "log")).wrong
    over = left_over(folder)
    wrong += [f"left: the file {name}" for name in over]
    shutil.rmtree(folder)
    counts = {"lost": verdict.lost, "repeated": verdict.repeated, "leaks": leaks + len(over)}
    return {"faults": {name: 1 for name in case.faults} | {fault: ended}, "wrong": wrong, **counts}


def _ended_again_and_again(
    case: Case, folder: pathlib.Path, files: pathlib.Path, disk: Disk, number: signal.Signals
) -> tuple[list[str], int, int]:
    """What was wrong, how many programs the signal has ended, and how many processes were left of them."""
    chance, wrong, ended, leaks = case.chance, [], 0, 0
    aside = number == signal.SIGKILL and chance.random() < 0.4  # the stream is used in another thread
    for leg in range(legs := chance.randint(2, 4)):
        program = Program(case, folder, files, disk, aside)
        last = leg == legs - 1
        if not last:
            program.wait_until(chance)
            program.signal(number)
        code, left = program.end()
        leaks += left
        wrong += [f"left with {code}: {program.said()}"] * (code not in ({0} if last else CODES[number]))
        wrong += [f"left: {left} processes"] * bool(left)
        if wrong or code == 0:
            break
        ended += 1
    return wrong, ended, leaks


class Program:
    """A fork of this process that runs a case, or continues with it.

    Args:
        case: The case.
        folder: Of the case, where its log is.
        files: Where the files of all cases are.
        disk: A disk that can be full.
        aside: Whether its stream is used in a thread that is not the main one.
    """

    def __init__(self, case: Case, folder: pathlib.Path, files: pathlib.Path, disk: Disk, aside: bool) -> None:
        assert not xla_bridge.backends_are_initialized()
        self._folder, self._tag = folder, secrets.token_hex(8)
        self._pid = os.fork()
        if self._pid == 0:
            code = 130
            try:
                code = _live(case, folder, files, disk, aside, self._tag)
                threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] # threads are waited for, as always
            finally:
                os._exit(code)  # also if Ctrl-C comes last: what follows here is the lane's, which goes on

    def wait_until(self, chance: random.Random) -> None:
        """Wait for a random moment: after some batches, or any time from the beginning on."""
        batches = chance.choice([0, 0, chance.randint(1, 12)])
        deadline = time.monotonic() + (chance.uniform(0.0, 3.0) if batches == 0 else 20.0)
        before = len(read_log(self._folder / "log"))
        while (
            time.monotonic() < deadline and os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        ):
            if batches and len(read_log(self._folder / "log")) - before >= batches:
                break
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        """Send it a signal; one that has ended does not mind."""
        chaos.kill(self._pid, number)

    def end(self) -> tuple[int, int]:
        """Wait for its end: the exit code, and how many of its workers are still there some time later."""
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        deadline = time.monotonic() + 10.0
        while (left := len(chaos.tagged(self._tag))) and time.monotonic() < deadline:
            time.sleep(0.02)
        return code, left

    def said(self) -> str:
        """What it has printed last."""
        said = self._folder / "said"
        return said.read_text()[-4000:] if said.exists() else ""


def _live(case: Case, folder: pathlib.Path, files: pathlib.Path, disk: Disk, aside: bool, tag: str) -> int:
    """Run the case; the exit code."""
    try:
        os.setsid()
        os.environ[chaos.TAG] = tag
        said = os.open(folder / "said", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for fd in (1, 2):
            os.dup2(said, fd)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        logging.disable()
        warnings.simplefilter("ignore")
        run = Run(case, folder, files, disk, folder / "log")
        with run.faulty():
            if aside:
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    pool.submit(use_up, run).result()
            else:
                use_up(run)
        return 0 if run.position >= run.steps or case.way in ("train", "fused") else CODE_OF_ERROR
    except ms.errors.Preempted as leaving:
        return int(str(leaving.code))
    except KeyboardInterrupt:
        return 130
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
            sys.stderr.flush()
        return CODE_OF_ERROR
