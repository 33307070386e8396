"""How every case measures: warm up, take the contenders in turn, use what they give, keep every round."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from _result import Contender, Table


class Reading(NamedTuple):
    """What a contender has measured itself: by the clock, or in the table's unit, and of CPU in all its processes."""

    wall: float
    cpu: float | None = None


Run = Callable[[], object]  # a round; what it gives counts only if it is a Reading


class Missing(Exception):
    """A contender cannot be measured here, for the reason that the text gives."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A contender that is to be measured.

    Attributes:
        name: What the tables call it.
        make: Gives the function that does a round. What is imported is imported there.
        package: Whose it is; "" if it is written by hand.
        steps: How many steps a round has.
        floor: The contender that does the same step without a loop.
        version: Tells that of the package, where it is not the one installed here.
    """

    name: str
    make: Callable[[], Run]
    package: str = ""
    steps: int = 1
    floor: str = ""
    version: Callable[[], str] | None = None


def measured(
    title: str,
    unit: str,
    ours: str,
    entries: Iterable[Entry],
    rounds: int,
    cpu_clock: Callable[[], float] = time.process_time,
) -> Table:
    """All contenders in turn, so that a busy moment hits each of them; the first round warms up and is not counted.

    Somebody else's package that is missing or fails is skipped by name. Our own must run.
    """
    table, running = Table(title, unit, ours), {}
    for entry in entries:
        with _skipping(entry, table, running):
            running[entry.name] = entry, entry.make(), _Rounds()
    for number in range(rounds + 1):
        for entry, run, found in list(running.values()):
            with _skipping(entry, table, running):
                found.add(run, cpu_clock, counted=number > 0)
    for entry, _, found in list(running.values()):
        with _skipping(entry, table, running):
            table.contenders.append(_contender(entry, found))
    return table


class _Rounds:
    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.compiled: int | None = 0

    def add(self, run: Run, cpu_clock: Callable[[], float], counted: bool) -> None:
        compiled, begun, begun_cpu = compilations(), time.perf_counter(), cpu_clock()
        given = run()
        reading = Reading(time.perf_counter() - begun, cpu_clock() - begun_cpu)
        if isinstance(given, Reading):
            reading, self.compiled = given, None  # it may have run where nobody counts
        elif self.compiled is not None and counted:
            self.compiled += compilations() - compiled
        if counted:
            self.wall.append(reading.wall)
        if counted and reading.cpu is not None:
            self.cpu.append(reading.cpu)


@contextlib.contextmanager
def _skipping(entry: Entry, table: Table, running: dict[str, Any]) -> Iterator[None]:
    """Turns what goes wrong with a peer into a line about it."""
    try:
        yield
    except Exception as error:
        if entry.package in ("", "millstream"):
            raise
        running.pop(entry.name, None)
        table.skipped[entry.name] = _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return f"{error.name} is not installed"
    first = (str(error).splitlines() or [""])[0][:120]
    return first if isinstance(error, Missing) else f"{type(error).__name__}: {first}"


def _contender(entry: Entry, found: _Rounds) -> Contender:
    if entry.version is not None:
        version = entry.version()
    else:
        version = importlib.metadata.version(entry.package) if entry.package else ""
    rounds, cpu = ([round(value, 9) for value in values] for values in (found.wall, found.cpu))
    return Contender(entry.name, entry.package, version, rounds, cpu, entry.steps, entry.floor, found.compiled)


def compilations() -> int:
    """How many programs XLA has compiled in this process since this was first asked; no case is made to load JAX."""
    return _counter()[0] if "jax" in sys.modules else 0


@functools.cache
def _counter() -> list[int]:
    import jax

    count = [0]

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    return count
