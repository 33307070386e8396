"""How every benchmark measures: warm up, interleave the cases, use the result, report medians, spread and ratios."""

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Seconds = dict[str, list[float]]


def interleaved(cases: Mapping[str, Callable[[], object]], rounds: int) -> tuple[Seconds, Seconds]:
    """Wall and CPU seconds of every case, run in turn so that a busy moment hits all of them.

    The first round warms up and is not counted.
    """
    wall: Seconds = {name: [] for name in cases}
    cpu: Seconds = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            begun, begun_cpu = time.perf_counter(), time.process_time()
            case()
            if number > 0:
                wall[name].append(time.perf_counter() - begun)
                cpu[name].append(time.process_time() - begun_cpu)
    return wall, cpu


def ratio(times: Seconds, slower: str, faster: str) -> float:
    """How many times as long `slower` took as `faster`, round by round, as the median."""
    return statistics.median(a / b for a, b in zip(times[slower], times[faster], strict=True))


def print_table(title: str, wall: Seconds, cpu: Seconds, *, scale: float, unit: str, base: str) -> None:
    """One line per case: median, spread, CPU time, and time as a multiple of the base case."""
    print(f"\n{title}")
    print(f"{'':34}{'median':>10}{'from':>10}{'to':>10}{'CPU':>10}   {unit}   of {base}")
    for name, seconds in wall.items():
        values = [second * scale for second in seconds]
        shown = [statistics.median(values), min(values), max(values), statistics.median(cpu[name]) * scale]
        numbers = "".join(f"{number:>10.2f}" for number in shown)
        print(f"{name:34}{numbers}   {'':{len(unit)}}   {ratio(wall, name, base):.2f}x")


def print_machine(packages: Iterable[str]) -> None:
    """What was measured, on what."""
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} missing")
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores; {', '.join(versions)}")


def verdict(text: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
    """A figure beside the bar it is held to."""
    good = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    bar = f"at least {at_least:g}" if at_least is not None else f"at most {at_most:g}"
    print(f"  {'ok  ' if good else 'MISS'} {text}: {value:.3g} ({bar})")


def available(makers: Mapping[str, Callable[[Any], Callable[[], None]]], data: Any) -> dict[str, Callable[[], None]]:
    """The cases whose package is installed, made for the data; the others are named."""
    ready = {}
    for name, make in makers.items():
        try:
            ready[name] = make(data)
        except ImportError as error:
            print(f"skipped {name}: {error}")
    return ready
