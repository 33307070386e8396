"""A process that runs one library for workers.py and answers questions on its standard input."""

import contextlib
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import _contenders
from _work import work

ENDLESS = 50_000
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
        below = sum(map(_cpu_of, _below(os.getpid())))
        own = time.process_time()
        return {"wall": time.perf_counter(), "consumer": own, "all": own + below}


def steady(stream: Iterator[Any], seconds: float) -> dict[str, float]:
    """Seconds per batch, once what was ready before has been used."""
    for _ in range(BUFFERED):
        _wait(stream)
    clock, count, end = Clock(), 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        _wait(stream)
        count += 1
    return {name: taken / count for name, taken in clock.seconds().items()}


def fresh(make: Callable[[], Iterator[Any]], steps: int) -> dict[str, float]:
    """Seconds from nothing to the last of so many batches."""
    clock = Clock()
    stream = make()
    for _ in range(steps):
        _wait(stream)
    seconds = clock.seconds()
    _close(stream)
    return seconds


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
    for process in _below(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = pathlib.Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
            kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
            own += kilobytes["Pss_Anon"] + kilobytes["Pss_File"]
            shared += kilobytes["Pss_Shmem"]
    return {"own": own / 1000, "shared": shared / 1000}


def _below(process: int) -> list[int]:
    children = []
    for path in pathlib.Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += map(int, path.read_text().split())
    return [below for child in children for below in [child, *_below(child)]]


def _cpu_of(process: int) -> float:
    try:
        fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _close(stream: Any) -> None:
    if hasattr(stream, "close"):
        stream.close()


class Answers:
    """Keeps the streams that are asked more than once."""

    def __init__(self, folder: str) -> None:
        self.folder, self.streams = folder, {}

    def answer(self, question: dict[str, Any]) -> dict[str, float]:
        name, todo, workers = question["name"], work(question["work"], self.folder), question["workers"]
        stream = getattr(_contenders, name)
        if question["how"] == "fresh":
            return fresh(lambda: stream(todo, workers, question["steps"]), question["steps"])
        if name not in self.streams:
            self.streams[name] = stream(todo, workers, ENDLESS)
        if question["how"] == "steady":
            return steady(self.streams[name], question["seconds"])
        _wait(self.streams[name])
        return memory()

    def close(self) -> dict[str, float]:
        for name in list(self.streams):
            _close(self.streams.pop(name))
        return {}


def main() -> None:
    """Answer one line of JSON with one line of JSON. Whatever a library prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers = Answers(sys.argv[1])
    for line in sys.stdin:
        question = json.loads(line)
        signal.alarm(60)  # a library that hangs ends its process, and the question has no answer
        try:
            reply = answers.close() if question["how"] == "close" else answers.answer(question)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        rest()
        signal.alarm(0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
