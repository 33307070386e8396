"""The figures that a newcomer looks for first: some cases, and how each peer does in them."""

import dataclasses
from collections.abc import Iterable, Iterator

from _result import Contender, Result, Table
from _tables import grid, number, times

CASES = (
    "in_memory_iterate",
    "in_memory_scan",
    "mapped_records",
    "pictures_processes",
    "pictures_epoch",
    "small_items",
    "large_items",
    "worker_start",
    "cartpole",
    "loop_with_metrics",
    "loop_with_bar",
    "saving",
)
# The rows of the README: one each for arrays, workers, large batches and loops, and one of them is lost.
FEW = ("in_memory_iterate", "pictures_processes", "large_items", "loop_with_bar")
PARTS = ("NumPy, take from the map",)  # does a part of the work, as a floor for the whole


@dataclasses.dataclass(frozen=True)
class Peer:
    """What a package did at its best: in the table's unit, and as a multiple of ours."""

    name: str
    value: float
    times_ours: float


def table_of(result: Result) -> Table | None:
    """The one that counts is a case's first."""
    return result.tables[0] if result.tables else None


def value_of(table: Table, name: str) -> float | None:
    """What a step takes; where steps have floors, what the loop adds to them."""
    mine = table.find(table.ours)
    return table.added(name) if mine is not None and mine.floor else table.median(name)


def peers(table: Table) -> list[Peer]:
    """The best contender of every other package and version, the fastest first; what is by hand counts as one."""
    best: dict[str, Peer] = {}
    for one in table.contenders:
        value, ratio = value_of(table, one.name), table.times_ours(one.name)
        if one.package == "millstream" or one.name in PARTS or value is None or ratio is None:
            continue
        name = _name(one)
        if name not in best or value < best[name].value:
            best[name] = Peer(name, value, ratio)
    return sorted(best.values(), key=lambda peer: peer.times_ours)


def _name(one: Contender) -> str:
    return f"{one.package} {one.version.split('+')[0]}" if one.package else one.name


def rows(results: dict[str, Result], names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """What is done, what ours takes, and what each peer takes."""
    for name in names:
        result = results.get(name)
        table = table_of(result) if result is not None else None
        if result is None or table is None:
            yield name, "not measured", ""
            continue
        ours = value_of(table, table.ours)
        beside = " · ".join(f"{one.name}: {times(one.times_ours)}" for one in peers(table))
        yield result.title.rstrip("."), "" if ours is None else f"{number(ours)} {table.unit}", beside


def headline(results: dict[str, Result], names: Iterable[str] = CASES) -> str:
    """The table of them."""
    return grid(("", "Millstream", "time of others, as a multiple of ours"), rows(results, names), "lrl")
