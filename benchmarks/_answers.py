"""A process that runs one library for `_libraries.py` and answers questions on its standard input."""

import contextlib
import importlib
import importlib.metadata
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import _contenders
from _processes import below, cpu_of
from _work import work

ENDLESS = 50_000
PATIENCE = 60  # seconds for an answer
BUFFERED = 8  # as much as anyone keeps ready, so that what was made while the clock stood is not counted


def _wait(stream: Iterator[Any]) -> None:
    import jax

    jax.block_until_ready(next(stream))


class Clock:
    """Seconds since it was made: of the wall, of this process, and of it and all processes below it."""

    def __init__(self) -> None:
        self.begun = self._now()

    def seconds(self) -> dict[str, float]:
        return {name: now - self.begun[name] for name, now in self._now().items()}

    def _now(self) -> dict[str, float]:
        workers = sum(map(cpu_of, below(os.getpid())))
        own = time.process_time()
        return {"wall": time.perf_counter(), "consumer": own, "all": own + workers}


def steady(stream: Iterator[Any], seconds: float) -> dict[str, float]:
    """Seconds per batch, once what was ready before has been used."""
    for _ in range(BUFFERED):
        _wait(stream)
    clock, count, end = Clock(), 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        _wait(stream)
        count += 1
    return {name: taken / count for name, taken in clock.seconds().items()}


def fresh(make: Callable[[], Iterator[Any]], steps: int, again: bool) -> dict[str, float]:
    """Seconds from nothing to the last of so many batches; `again` with what Millstream keeps of an earlier stream."""
    if not again:
        end_nursery()
    clock = Clock()
    stream = make()
    for _ in range(steps):
        _wait(stream)
    seconds = clock.seconds()
    _close(stream)
    return seconds


def end_nursery() -> None:
    """End the process that Millstream forks workers from, which stays for later streams."""
    for process in below(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if pathlib.Path(f"/proc/{process}/comm").read_text() == "ms-nursery\n":
                os.kill(process, signal.SIGKILL)


def rest() -> None:
    """Until the workers have filled their buffers or are gone, for that must not slow down whoever is asked next."""
    busy = 1.0
    while busy > 0.2:
        clock = Clock()
        time.sleep(0.1)
        busy = abs(clock.seconds()["all"]) / 0.1


def memory() -> dict[str, float]:
    """Megabytes of all processes below this one: their own, and those they share as memory without a file."""
    own = shared = 0
    for process in below(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = pathlib.Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
            kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
            own += kilobytes["Pss_Anon"] + kilobytes["Pss_File"]
            shared += kilobytes["Pss_Shmem"]
    return {"own": own / 1000, "shared": shared / 1000}


def _close(stream: Any) -> None:
    if hasattr(stream, "close"):
        stream.close()


class Answers:
    """Keeps the streams and passes that are asked more than once."""

    def __init__(self, folder: str) -> None:
        self.folder, self.streams, self.passes = folder, {}, {}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Do what `how` says: "version", "pass", "fresh", "steady" or "memory"."""
        if question["how"] == "version":
            return {"version": version(question["package"])}
        if question["how"] == "pass":
            return self.whole_pass(question["module"], question["name"], question["arguments"])
        name, todo, workers = question["name"], work(question["work"], self.folder), question["workers"]
        stream = getattr(_contenders, name)
        if question["how"] == "fresh":
            again = question.get("again", False)
            return fresh(lambda: stream(todo, workers, question["steps"]), question["steps"], again)
        if name not in self.streams:
            self.streams[name] = stream(todo, workers, ENDLESS)
        if question["how"] == "steady":
            return steady(self.streams[name], question["seconds"])
        _wait(self.streams[name])
        return memory()

    def whole_pass(self, module: str, name: str, arguments: list[Any]) -> dict[str, float]:
        """Seconds of a pass that a function of a module makes, once, and this runs."""
        if name not in self.passes:
            self.passes[name] = getattr(importlib.import_module(module), name)(*arguments)
        clock = Clock()
        self.passes[name]()
        return clock.seconds()


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # as tensorflow, which is also installed under other names
        return importlib.import_module(package).__version__


def missing(error: Exception) -> str:
    """Why there is no answer."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return f"{error.name} is not installed"
    return f"{type(error).__name__}: {error}"


def main() -> None:
    """Answer one line of JSON with one line of JSON. Whatever a library prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers = Answers(sys.argv[1])
    for line in sys.stdin:
        question = json.loads(line)
        signal.alarm(PATIENCE)  # a library that hangs ends its process, and the question has no answer
        try:
            reply = answers.answer(question)
        except Exception as error:
            reply = {"error": missing(error)}
        rest()
        signal.alarm(0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
