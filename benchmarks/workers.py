"""Worker threads and processes beside the peers: pictures, Python that holds the lock, large and small items.

Every library runs in a process of its own (`_answers.py`), where its batches become JAX arrays and are waited for.
They are asked in turn, one at a time, so that a busy moment hits all of them. Nobody's workers import more than the
library itself and `_work.py`. Steady figures leave out starting; "fresh" ones begin with nothing but the imports.
CPU is that of all processes of a library, unless the table says otherwise.

Run with `make bench`, or name further Pythons whose grain is to be measured:
`python benchmarks/workers.py grain-0.2.17=/path/to/python`.
"""

import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from _measure import Seconds, print_machine, print_table, ratio, verdict
from _work import make_pictures

ROUNDS, STARTS = 4, 2
PROCESSES = "millstream processes"
THREADS = "millstream threads"
TORCH = "torch forkserver"


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
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else {"error": f"its process ended with {self.process.wait()}"}

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # workers that a library has left behind


class Contenders:
    """All libraries, each started when it is first asked."""

    def __init__(self, folder: str, pythons: dict[str, str]) -> None:
        self.folder, self.pythons = folder, pythons
        self.libraries: dict[str, Library] = {}

    def ask(self, name: str, **question: Any) -> dict[str, Any]:
        """Ask one contender, named by its library and the kind of its stream, as in "torch fork"."""
        library, kind = name.split(" ")
        if library not in self.libraries:
            self.libraries[library] = Library(self.pythons.get(library, sys.executable), self.folder)
        return self.libraries[library].ask(name=f"{library.split('-')[0]}_{kind}", **question)

    def in_turn(
        self, names: list[str], rounds: int, *, cpu_of: str = "all", **question: Any
    ) -> tuple[Seconds, Seconds]:
        """Wall and CPU seconds of those who can answer; the others are named. CPU of "all" processes or "consumer"."""
        wall: Seconds = {name: [] for name in names}
        cpu: Seconds = {name: [] for name in names}
        for _ in range(rounds):
            for name in list(wall):
                answer = self.ask(name, **question)
                if "error" in answer:
                    print(f"skipped {name}: {answer['error']}")
                    del wall[name], cpu[name]
                else:
                    wall[name].append(answer["wall"])
                    cpu[name].append(answer[cpu_of])
        return wall, cpu

    def grains(self, kind: str) -> list[str]:
        return [f"{library} {kind}" for library in ("grain", *self.pythons)]

    def close_streams(self) -> None:
        for library in self.libraries.values():
            library.ask(how="close")

    def end(self) -> None:
        for library in self.libraries.values():
            library.end()


def judge(text: str, times: Seconds, slower: str, faster: str, *, at_least: float) -> None:
    """How many times as long one took as the other, if both could be measured."""
    if slower in times and faster in times:
        verdict(text, ratio(times, slower, faster), at_least=at_least)


def show(
    title: str, times: tuple[Seconds, Seconds], base: str, *, scale: float = 1e3, unit: str = "ms a batch"
) -> None:
    base = base if base in times[0] else next(iter(times[0]))
    print_table(title, *times, scale=scale, unit=unit, base=base)


def pictures(contenders: Contenders) -> None:
    threads = [THREADS, "bare threads", *contenders.grains("threads"), "loadax threads"]
    times = contenders.in_turn(threads, ROUNDS, work="pictures", workers=2, how="steady", seconds=0.6)
    show("JPEG to 224x224, batch 30, 2 threads, steady", times, THREADS)
    judge("speed of a bare thread pool", times[0], "bare threads", THREADS, at_least=0.9)

    processes = [PROCESSES, TORCH, *contenders.grains("processes"), "bare processes"]
    times = contenders.in_turn(processes, ROUNDS, work="pictures", workers=2, how="steady", seconds=0.6)
    show("JPEG to 224x224, batch 30, 2 processes, steady", times, PROCESSES)
    judge("times as fast as torch", times[0], TORCH, PROCESSES, at_least=1.0)
    memory(contenders, list(times[0]))
    contenders.close_streams()

    starting = [PROCESSES, TORCH, "torch fork", *contenders.grains("processes")]
    times = contenders.in_turn(starting, STARTS, work="pictures", workers=2, how="fresh", steps=50)
    show("An epoch of 1,500 pictures, 2 processes, fresh", times, PROCESSES, scale=1, unit="s")
    judge("times as fast as torch", times[0], TORCH, PROCESSES, at_least=1.5)
    judge("times as fast as torch forked, which JAX warns of", times[0], "torch fork", PROCESSES, at_least=1.0)


def memory(contenders: Contenders, names: list[str]) -> None:
    """While the streams of pictures are open."""
    print(f"\nMemory of 2 worker processes and their helpers\n{'':34}{'own':>10}{'shared':>10}   MB")
    for name in names:
        used = contenders.ask(name, work="pictures", workers=2, how="memory")
        print(f"{name:34}{used['own']:>10.0f}{used['shared']:>10.0f}")
        if name == PROCESSES:
            verdict("MB per worker apart from the ring", used["own"] / 2, at_most=60)


def python(contenders: Contenders) -> None:
    names = [PROCESSES, "bare loop", "bare processes"]
    times = contenders.in_turn(names, ROUNDS, work="python", workers=2, how="steady", seconds=0.6)
    show("1 ms of Python a sample, batch 30, 2 processes, steady", times, "bare loop")
    judge("times as fast as one thread", times[0], "bare loop", PROCESSES, at_least=1.7)
    contenders.close_streams()


def large(contenders: Contenders) -> None:
    names = [PROCESSES, TORCH, "torch copied", *contenders.grains("processes")]
    wall, cpu = contenders.in_turn(names, ROUNDS, work="large", workers=2, how="steady", seconds=0.6, cpu_of="consumer")
    show("Batches of 38 MB, 2 processes, steady (CPU is the consumer's)", (wall, cpu), PROCESSES)
    if PROCESSES in cpu:
        verdict("ms of the consumer's CPU a batch", 1e3 * statistics.median(cpu[PROCESSES]), at_most=2)
    judge("times less of it than torch", cpu, TORCH, PROCESSES, at_least=5)
    judge("times less of it than torch with jnp.asarray", cpu, "torch copied", PROCESSES, at_least=5)
    contenders.close_streams()


def small(contenders: Contenders) -> None:
    names = [PROCESSES, "millstream fill", "hydrax processes", TORCH, *contenders.grains("processes")]
    times = contenders.in_turn(names, ROUNDS, work="small", workers=2, how="steady", seconds=0.5)
    show("28x28 bytes, batch 128, 2 processes, steady", times, PROCESSES)
    judge("times as fast as hydrax", times[0], "hydrax processes", PROCESSES, at_least=20)
    contenders.close_streams()


def first_batch(contenders: Contenders) -> None:
    names = [PROCESSES, *contenders.grains("processes"), "hydrax processes", TORCH, "torch fork"]
    times = contenders.in_turn(names, STARTS, work="small", workers=4, how="fresh", steps=1)
    show("The first batch from 4 processes, fresh", times, PROCESSES, scale=1, unit="s")
    if PROCESSES in times[0]:
        verdict("seconds, at worst", max(times[0][PROCESSES]), at_most=2)
    judge("times as soon as grain", times[0], "grain processes", PROCESSES, at_least=3)


def main() -> None:
    print_machine(["jax", "numpy", "pillow", "millstream", "torch", "grain", "hydrax", "loadax"])
    print(f"load before the start: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        make_pictures(folder)
        contenders = Contenders(folder, dict(argument.split("=", 1) for argument in sys.argv[1:]))
        for case in (pictures, python, large, small, first_batch):
            case(contenders)
        contenders.end()


if __name__ == "__main__":
    main()
