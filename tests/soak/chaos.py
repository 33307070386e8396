"""What the fault tests share: scripts in sessions of their own, what they leave behind, counts, and a watchdog."""

import concurrent.futures
import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from worker_processes import children

from millstream.reading.workers.nursery import get_ready

HERE = pathlib.Path(__file__).parent
TAG = "MILLSTREAM_CHAOS"

# A script that hangs tells where, in all its threads, and ends. A background job inherits an ignored SIGINT.
PREAMBLE = """
import faulthandler, os, random, signal, sys, threading, time
faulthandler.dump_traceback_later({limit}, exit=True)
signal.signal(signal.SIGINT, signal.default_int_handler)
import numpy as np
import jax
import millstream as ms
"""


@dataclasses.dataclass
class Outcome:
    """Of many runs with one kind of fault.

    Attributes:
        fault: What was done to them.
        runs: How many there were.
        ok: How many ended as they should.
        worst: The longest time, in seconds, of what is to be quick.
        lost: Samples that were missing.
        repeated: Samples that came twice.
        leaks: Processes, threads, file descriptors and mapped memory that were left.
        failures: What went wrong, in words.
    """

    fault: str
    runs: int = 0
    ok: int = 0
    worst: float = 0.0
    lost: int = 0
    repeated: int = 0
    leaks: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)

    def add(self, failures: list[str], seconds: float = 0.0, leaks: int = 0) -> None:
        """Count one run, with all that was wrong with it."""
        self.runs += 1
        self.ok += not failures
        self.worst = max(self.worst, seconds)
        self.leaks += leaks
        self.failures += failures

    def merge(self, other: "Outcome") -> None:
        """Take in the runs of another."""
        for name in ("runs", "ok", "lost", "repeated", "leaks", "failures"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.worst = max(self.worst, other.worst)


class Script:
    """A Python program in a session of its own, whose processes all carry a tag in their environment.

    Args:
        text: The program, after the preamble.
        arguments: Its arguments.
        limit: Seconds after which its watchdog shows all stacks and ends it.
        environment: Variables it gets besides those of this process.
    """

    def __init__(self, text: str, *arguments: object, limit: int = 60, **environment: str) -> None:
        self.tag = secrets.token_hex(8)
        self._process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE.format(limit=limit) + text, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **environment, TAG: self.tag},
        )
        self._limit = limit

    def line(self) -> str:
        """The next line it prints."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send it, or its whole process group, a signal."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self._process.pid, number)

    def end(self) -> tuple[int, str, str]:
        """Wait for its end: exit code, standard output and standard error."""
        try:
            out, error = self._process.communicate(timeout=self._limit + 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            out, error = self._process.communicate()
            error += "\n(killed by the watchdog outside)"
        return self._process.returncode, out, error

    def left(self, seconds: float) -> tuple[int, float]:
        """How many of its processes are there after so long, and how long the last of them took to go."""
        begun = time.monotonic()
        while (count := len(tagged(self.tag))) and time.monotonic() - begun < seconds:
            time.sleep(0.02)
        return count, time.monotonic() - begun


def tagged(tag: str) -> list[int]:
    """The living processes that carry a tag."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The environment of a zombie is empty.
            if f"{TAG}={tag}\0".encode() in (folder / "environ").read_bytes() + b"\0":
                found.append(int(folder.name))
    return found


def trials(runs: dict[str, int], seed: int, limit: int = 120, **environment: str) -> dict[str, Outcome]:
    """The outcomes of some trials of `fault_trials.py`, all in one process."""
    print(f"seed {seed}")
    text = f"import runpy; sys.path.insert(0, {str(HERE.parent)!r}); "
    text += f"runpy.run_path({str(HERE / 'fault_trials.py')!r}, run_name='__main__')"
    script = Script(text, seed, *(f"{name}={count}" for name, count in runs.items()), limit=limit, **environment)
    code, out, error = script.end()
    left, _ = script.left(1.0)
    outcomes = {found["fault"]: Outcome(**found) for found in map(json.loads, out.splitlines())}
    for name in runs:  # one that is missing was at work when the watchdog came
        outcomes.setdefault(name, Outcome(name, runs[name], failures=[f"exit code {code}\n{error[-8000:]}"]))
    last = outcomes[list(runs)[-1]]
    last.leaks += left
    last.failures += [f"{left} processes left"] * bool(left)
    return outcomes


def holdings() -> dict[str, int]:
    """What this process has: threads, file descriptors, children and shared memory."""
    gc.collect()
    with contextlib.suppress(OSError):
        get_ready()  # what it has open is here before and after
    maps = pathlib.Path("/proc/self/maps").read_text()
    return {
        "threads": len(list(pathlib.Path("/proc/self/task").iterdir())),
        "fds": len(os.listdir("/proc/self/fd")),
        "children": len(children()),
        "segments": maps.count("memfd:millstream"),
    }


def growth(before: dict[str, int], seconds: float = 1.0) -> dict[str, int]:
    """What this process has more than before, once it has had time to release it."""
    deadline = time.monotonic() + seconds
    while True:
        more = {name: count - before[name] for name, count in holdings().items() if count > before[name]}
        if not more or time.monotonic() > deadline:
            return more
        time.sleep(0.02)


@contextlib.contextmanager
def later(seconds: float, action: Callable[[], Any]) -> Iterator[None]:
    """Have something done from another thread while the block runs, at the latest at its end."""
    timer = threading.Timer(seconds, action)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


_VICTIM = """
import contextlib
style = sys.argv[1]

def sample(index):
    time.sleep(0.01)
    return {"x": np.float32(index)}

def work():
    spec = {"x": jax.ShapeDtypeStruct((), np.float32)}
    stages = [ms.DiskSampleSource(96, sample, sample_spec=spec), ms.BatchTransform(4)]
    loader = ms.DataLoader(stages, executor=ms.Processes(2))
    state = loader.init_state(jax.random.key(0))
    batches = loader.iterate(state)
    with batches if style == "with" else contextlib.nullcontext():
        print("begins", flush=True)
        for batch, mask in batches:
            pass
    if style == "with":
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("ends", flush=True)

work()
"""


def interrupted(outcome: Outcome, seed: int) -> None:
    """Press Ctrl-C at a random time: once in a plain loop, up to three times inside a `with` block."""
    chance = random.Random(seed)
    style = chance.choice(["plain", "with"])
    presses = 1 if style == "plain" else chance.randint(1, 3)
    script = Script(_VICTIM, style)
    script.line()
    delays = [chance.choice([chance.uniform(0, 0.4), chance.uniform(0, 1.4)])]
    delays += [chance.uniform(0, 0.15) for _ in range(presses - 1)]
    for delay in delays:
        time.sleep(delay)
        script.signal(signal.SIGINT, group=True)
    begun = time.monotonic()
    code, out, error = script.end()
    seconds, (left, _) = time.monotonic() - begun, script.left(1.0)
    if "_xla_gc_callback" in error:  # Python drops what is raised in a gc callback, and JAX has one: press again
        return interrupted(outcome, seed + 100_000)
    # A chain of errors is one. Inside the block the first interrupt says nothing; after it each has its own.
    tracebacks = error.count("Traceback") - error.count("another exception occurred")
    wrong = {
        f"{seconds:.2f} s": seconds > 10,
        f"{left} processes left": left > 0,
        f"{tracebacks} tracebacks": tracebacks > max(1, presses - 1),
        "a worker was hit": "SIGINT" in error,
        f"exit code {code}": code not in (0, 130, -signal.SIGINT),
    }
    failures = [f"{style}, {delays}: {what}, {out!r}\n{error}" for what, so in wrong.items() if so]
    outcome.add(failures, seconds, left)


_ENDINGS = {
    "a whole epoch": "for batch, mask in batches: pass",
    "a break": "for batch, mask in batches: break",
    "an iterator that is left": "next(batches)",
    "a block": "with batches:\n    next(batches)",
    "an exit in the middle": "next(batches); note(); sys.exit()",
    "a deleted iterator": "next(batches); del batches",
    "a kept loader": "loader.__enter__(); next(loader.iterate(state)); next(loader.iterate(state))",
    "next_batch": "loader.next_batch(state)",
}
_ENDING = """
import atexit
def note():
    print(repr(time.monotonic()), flush=True)
spec = {"x": jax.ShapeDtypeStruct((), np.float32)}
stages = [ms.DiskSampleSource(40, lambda index: {"x": np.float32(index)}, sample_spec=spec), ms.BatchTransform(4)]
loader = ms.DataLoader(stages, executor=ms.Threads(2) if sys.argv[2] == "threads" else ms.Processes(2))
state = loader.init_state(jax.random.key(0))
batches = loader.iterate(state)
exec(sys.argv[1])
note()
"""


def clean_exit(outcome: Outcome, seed: int) -> None:
    """Let a program end in one of many ways: it says nothing, and is gone soon."""
    name = list(_ENDINGS)[seed % len(_ENDINGS)]
    script = Script(_ENDING, _ENDINGS[name], "threads" if seed // len(_ENDINGS) % 3 == 2 else "processes")
    code, out, error = script.end()
    seconds = time.monotonic() - float(out.split()[-1]) if code == 0 else 0.0
    left, _ = script.left(1.0)
    wrong = {f"exit code {code}": code != 0, f"stderr: {error}": error != "", f"{left} processes left": left > 0}
    wrong[f"{seconds:.2f} s"] = seconds > 10
    outcome.add([f"{name}: {what}" for what, so in wrong.items() if so], seconds, left)


DRIVEN: dict[str, Callable[[Outcome, int], None]] = {
    "interrupted": interrupted,
    "clean_exit": clean_exit,
}


def driven(name: str, runs: int, seed: int) -> Outcome:
    """The outcome of trials that need a process each."""
    print(f"{name}: seed {seed}")
    outcome = Outcome(name)
    together = 1 if name == "clean_exit" else 2  # to leave takes JAX alone half a second, which is half of what it may
    with concurrent.futures.ThreadPoolExecutor(together) as pool:
        for future in [pool.submit(DRIVEN[name], outcome, seed + number) for number in range(runs)]:
            future.result()
    return outcome
