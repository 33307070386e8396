"""What a case has found: tables of contenders with all their rounds, and the bars that the figures are held to."""

import dataclasses
import json
import os
import pathlib
import re
import statistics
from typing import Any

SCALES = {"ns": 1e9, "µs": 1e6, "ms": 1e3, "s": 1.0, "MB": 1.0}


@dataclasses.dataclass(frozen=True)
class Contender:
    """What was measured of one way to do a thing.

    Attributes:
        name: What the tables call it.
        package: Whose it is; "" if it is written by hand.
        version: Of the package.
        rounds: Seconds by the clock of every round, or what else the table's unit says.
        cpu: CPU seconds of every round, of all its processes; empty where none were taken.
        steps: How many steps a round has.
        floor: The contender that does the same step without a loop; "" if there is none.
        compiled: Programs that were compiled in the rounds; None where nobody could count them.
    """

    name: str
    package: str
    version: str
    rounds: list[float]
    cpu: list[float]
    steps: int = 1
    floor: str = ""
    compiled: int | None = None


@dataclasses.dataclass(frozen=True)
class Bar:
    """A figure beside what the project holds it to."""

    text: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)


@dataclasses.dataclass
class Table:
    """Contenders that do the same thing.

    Attributes:
        title: What they do.
        unit: Of one step, beginning with one of `SCALES`.
        ours: The contender that the others stand beside.
        contenders: Those that could be measured.
        skipped: The others, and why.
        bars: What is held to a bar.
    """

    title: str
    unit: str
    ours: str
    contenders: list[Contender] = dataclasses.field(default_factory=list)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    bars: list[Bar] = dataclasses.field(default_factory=list)

    @property
    def scale(self) -> float:
        return SCALES[self.unit.split()[0]]

    def find(self, name: str) -> Contender | None:
        return next((one for one in self.contenders if one.name == name), None)

    def steps_of(self, name: str, cpu: bool = False) -> list[float]:
        """One step of every round, in the table's unit; empty for those who were not measured."""
        found = self.find(name)
        if found is None:
            return []
        return [value / found.steps * self.scale for value in (found.cpu if cpu else found.rounds)]

    def median(self, name: str) -> float | None:
        values = self.steps_of(name)
        return statistics.median(values) if values else None

    def ratio(self, slower: str, faster: str, cpu: bool = False) -> float | None:
        """How many times as long one takes as the other, as the median of round by round; None if one is missing."""
        pairs = list(zip(self.steps_of(slower, cpu), self.steps_of(faster, cpu), strict=False))
        return statistics.median(a / b for a, b in pairs) if pairs and all(b > 0 for _, b in pairs) else None

    def least_ratio(self, slower: str, faster: str) -> float | None:
        """The same of the best rounds, which other programs have disturbed least."""
        pairs = self.steps_of(slower), self.steps_of(faster)
        return min(pairs[0]) / min(pairs[1]) if all(pairs) else None

    def added(self, name: str, cpu: bool = False) -> float | None:
        """What a step takes more than its floor's, of the best rounds of both; None if one is missing."""
        found = self.find(name)
        if found is None or self.find(found.floor) is None:
            return None
        return min(self.steps_of(name, cpu)) - min(self.steps_of(found.floor, cpu))

    def share(self, mine: str, theirs: str, cpu: bool = False) -> float | None:
        """What one loop adds to its floor, as a share of what another adds to its own; None if one is missing."""
        added, others = self.added(mine, cpu), self.added(theirs, cpu)
        return added / others if added is not None and others is not None and others > 0 else None

    def compiled(self, name: str) -> int | None:
        found = self.find(name)
        return None if found is None else found.compiled

    def times_ours(self, name: str, cpu: bool = False) -> float | None:
        """A contender's time over ours; where steps have floors, what its loop adds over what ours adds."""
        mine = self.find(self.ours)
        if mine is None or not mine.floor:
            return self.ratio(name, self.ours, cpu)
        return self.share(name, self.ours, cpu)

    def hold(
        self, text: str, value: float | None, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Hold a figure to a bar, unless one of those it is made of is missing."""
        if value is not None:
            self.bars.append(Bar(text, value, at_least, at_most))


@dataclasses.dataclass
class Result:
    """A case that was run.

    Attributes:
        title: The first line of the case's docstring.
        about: The rest of it.
        tables: What was found; empty if it failed.
        machine: Cores, CPU and versions.
        load: The machine's load average before it began.
        seconds: How long it took.
        failed: Why there are no tables; "" if there are.
        quick: Whether it was only tried, on little data.
    """

    title: str
    about: str
    tables: list[Table] = dataclasses.field(default_factory=list)
    machine: dict[str, str] = dataclasses.field(default_factory=dict)
    load: float = 0.0
    seconds: float = 0.0
    failed: str = ""
    quick: bool = False


def from_json(values: dict[str, Any]) -> Result:
    fields: dict[str, Any] = values | {"tables": [_table_from_json(table) for table in values["tables"]]}
    return Result(**fields)


def _table_from_json(values: dict[str, Any]) -> Table:
    contenders, bars = (
        [kind(**one) for one in values[name]] for kind, name in ((Contender, "contenders"), (Bar, "bars"))
    )
    fields: dict[str, Any] = values | {"contenders": contenders, "bars": bars}
    return Table(**fields)


@dataclasses.dataclass
class Results:
    """All cases by name, and those that a run which was stopped has still to do."""

    cases: dict[str, Result] = dataclasses.field(default_factory=dict)
    pending: list[str] = dataclasses.field(default_factory=list)


def load(path: pathlib.Path) -> Results:
    if not path.exists():
        return Results()
    values = json.loads(path.read_text())
    return Results({name: from_json(result) for name, result in values["cases"].items()}, values["pending"])


def store(results: Results, path: pathlib.Path) -> None:
    """Write all of it or nothing, with the rounds of a contender in one line."""
    values = dataclasses.asdict(results)
    values["cases"] = dict(sorted(values["cases"].items()))
    half = path.with_suffix(".half")
    text = json.dumps(values, indent=1, ensure_ascii=False)
    folded = re.sub(r"\[\s+([-+.e\d,\s]+?)\s+\]", lambda list_: f"[{' '.join(list_[1].split())}]", text)
    half.write_text(folded + "\n")
    os.replace(half, path)
