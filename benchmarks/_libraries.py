"""Libraries that are measured in processes of their own, each started when it is first asked (`_answers.py`).

There a library's batches become JAX arrays and are waited for. They are asked one at a time. Nobody's workers import
more than the library itself and `_work.py`. CPU is that of all processes of a library.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from _answers import PATIENCE
from _measure import Entry, Missing, Reading

OLDER = "grain-0.2.17"  # has an environment of its own


@dataclasses.dataclass(frozen=True)
class Stream:
    """One of `_contenders.py`'s functions: what the tables call it, its package, and the process that runs it."""

    label: str
    function: str
    package: str
    process: str


def stream(label: str, function: str) -> Stream:
    """A function named by its library and the kind of its stream; `bare` ones are nobody's."""
    library = function.split("_")[0]
    return Stream(label, function, "" if library == "bare" else library, library)


def grains(label: str, function: str) -> list[Stream]:
    """The same of both versions of Grain."""
    older = Stream(f"Grain 0.2.17, {label}", function, "grain", OLDER)
    return [Stream(f"Grain, {label}", function, "grain", "grain"), older]


PROCESSES = stream("Millstream, processes", "millstream_processes")
THREADS = stream("Millstream, threads", "millstream_threads")
TORCH = stream("torch, forkserver", "torch_forkserver")
TORCH_FORK = stream("torch, fork", "torch_fork")
HYDRAX = stream("hydrax", "hydrax_processes")
GRAIN_PROCESSES = [
    *grains("processes", "grain_processes"),
    *grains("processes with threads", "grain_processes_with_threads"),
]
GRAIN_THREADS = [*grains("threads", "grain_threads"), *grains("threads by batch", "grain_threads_by_batch")]


class Library:
    """A process that answers questions about one library's streams."""

    def __init__(self, python: str, folder: str) -> None:
        script = pathlib.Path(__file__).with_name("_answers.py")
        self.process = subprocess.Popen(
            [python, "-W", "ignore", str(script), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        """The answer. `Missing` if there is none."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": self._last_word()}
        if "error" in answer:
            raise Missing(answer["error"])
        return answer

    def _last_word(self) -> str:
        code = self.process.wait()
        return f"no answer in {PATIENCE} s" if code == -signal.SIGALRM else f"its process ended with {code}"

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # workers that a library has left behind


class Libraries:
    """All of them, in a context that ends them, with a folder for the files that they read.

    Args:
        also: Further Pythons, by the name of the library that they have.
    """

    def __init__(self, also: dict[str, str]) -> None:
        self.also = also
        self.started: dict[str, Library] = {}
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = self.scratch.name

    def __enter__(self) -> "Libraries":
        return self

    def __exit__(self, *_: object) -> None:
        for library in self.started.values():
            library.end()
        self.scratch.cleanup()

    def ask(self, one: Stream, **question: Any) -> dict[str, Any]:
        if one.process == OLDER and OLDER not in self.also:
            raise Missing(f"no Python with it was named: --also {OLDER}=PYTHON")
        if one.process in self.started and self.started[one.process].process.poll() is not None:
            self.started.pop(one.process).end()  # another of its streams had no answer
        if one.process not in self.started:
            self.started[one.process] = Library(self.also.get(one.process, sys.executable), self.folder)
        return self.started[one.process].ask(name=one.function, **question)

    def entries(
        self,
        streams: Iterable[Stream],
        *,
        clock: str = "wall",
        per_round: int = 1,
        warm_up: dict[str, Any] | None = None,
        **question: Any,
    ) -> list[Entry]:
        """Contenders that are asked this, with so many steps per round.

        What counts is what they answer by one clock: "wall", or "consumer", which is the CPU of that process alone. The
        round that warms up may be asked for less.
        """

        def entry(one: Stream) -> Entry:
            questions = itertools.chain(
                [question if warm_up is None else question | warm_up], itertools.repeat(question)
            )

            def run() -> Reading:
                answer = self.ask(one, **next(questions))
                return Reading(answer[clock], answer["all"])

            return Entry(one.label, lambda: run, one.package, per_round, version=lambda: self.version(one))

        return [entry(one) for one in streams]

    def version(self, one: Stream) -> str:
        return self.ask(one, how="version", package=one.package)["version"] if one.package else ""
