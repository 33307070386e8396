"""Random pipelines through random faults, against what should come out: `python tests/soak 20` takes twenty minutes.

Every case is made of one number, which a finding names: `python tests/soak --case NUMBER` runs it again. Between
spells of random cases, trials with faults of their own are made, which judge more than samples (`fault_trials.py`,
`chaos.py`, `resume_trials.py`, `split_leaks.py`).
"""

import argparse
import collections
import itertools
import json
import math
import os
import pathlib
import random
import re
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))  # where tests import from

from soak import chaos, resume_trials, split_leaks
from soak.cases import EXECUTORS, FAULTS, case_of
from soak.lanes import start_lane

SPELL = 240.0  # seconds of random cases between two rounds of trials
PROGRESS = 15.0  # seconds between two lines of progress
SHARE = 10  # a round of trials is a tenth of these
TRIALS = {
    "death": (100, "s until noticed"),
    "kills": (200, ""),
    "exceptions": (150, "s until raised"),
    "epochs": (1000, "KiB per epoch"),
    "held": (12, "s"),
    "many_held": (1000, ""),
    "warning_as_error": (20, ""),
    "forked": (10, ""),
}
DRIVEN = {"interrupted": (50, "s until gone"), "clean_exit": (100, "s until gone")}
RESUMED = {
    "killed_run": (200, ""),
    "terminated_run": (100, "s until gone, from its start on"),
    "full_disk_run": (20, ""),
    "damaged_checkpoint": (400, ""),
    "killed_preparation": (500, ""),
}
CALLS = (6000, "")
DIVISIONS = (10_000, "")


class Tally:
    """What came of all cases so far.

    Args:
        deadline: When the time is up.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._rows = {fault: collections.Counter[str]() for fault in FAULTS}
        self._totals = collections.Counter[str]()
        self._executors = collections.Counter[str]()
        self.findings: list[str] = []

    def add(self, result: dict[str, Any]) -> None:
        """Count a case."""
        counts = {name: result[name] for name in ("lost", "repeated", "leaks")}
        self._executors[result["executor"]] += 1
        for fault, struck in result["faults"].items():
            self._rows[fault].update(runs=1, struck=struck, ok=int(not result["wrong"]), **counts)
        self._totals.update(runs=1, faults=sum(result["faults"].values()), **counts)
        if result["wrong"]:
            case = case_of(result["number"])
            text = "\n".join(result["wrong"])
            self.report(f"{text}\n  {case}\n  Again: python tests/soak --case {case.number}")

    def report(self, text: str) -> None:
        """Tell of a finding."""
        self.findings.append(text)
        print(f"FINDING: {text}", flush=True)

    @property
    def summary(self) -> str:
        """All of it in a line."""
        counts = ", ".join(f"{self._totals[name]} {name}" for name in ("runs", "faults", "lost", "repeated", "leaks"))
        left = max(0.0, self._deadline - time.monotonic())
        return f"{counts}, {len(self.findings)} findings; {int(left // 60)}:{int(left % 60):02} left"

    def table(self) -> str:
        """A line for each kind of fault."""
        columns = ("runs", "struck", "ok", "lost", "repeated", "leaks")
        lines = [f"{'fault':26} " + " ".join(f"{name:>8}" for name in columns)]
        for fault, row in self._rows.items():
            lines.append(f"{fault:26} " + " ".join(f"{row[name]:8}" for name in columns))
        executors = ", ".join(f"{self._executors[name]} {name}" for name in EXECUTORS)
        return "\n".join([*lines, f"executors: {executors}", f"total: {self.summary}"])


def spell(tally: Tally, lanes: Sequence[Iterator[int]], deadline: float = math.inf) -> None:
    """Run cases in several lanes, until a time or to the last one."""
    started = [start_lane(numbers, deadline) for numbers in lanes]
    readers = [os.fdopen(reader) for _, reader in started]
    begun, shown = [0] * len(lanes), time.monotonic()
    with selectors.DefaultSelector() as selector:
        for number, reader in enumerate(readers):
            selector.register(reader, selectors.EVENT_READ, number)
        while selector.get_map():
            for key, _ in selector.select(1.0):
                line = readers[key.data].readline()
                if not line:
                    selector.unregister(readers[key.data])
                    continue
                told = json.loads(line)
                if "begins" in told:
                    begun[key.data] = told["begins"]
                elif "broken" in told:
                    tally.report(f"a lane broke at case {begun[key.data]}: {told['broken']}")
                else:
                    tally.add(told)
            if time.monotonic() - shown > PROGRESS:
                shown = time.monotonic()
                print(tally.summary, flush=True)
    for pid, _ in started:
        os.waitpid(pid, 0)


def one_round(seed: int, share: int) -> list[chaos.Outcome]:
    """All trials, each a part of the full number of times."""
    found = []
    for name, (count, _) in TRIALS.items():
        if name != "epochs" or seed % share == 0:  # a slope needs all of them
            count = count if name == "epochs" else -(-count // share)
            found += chaos.trials({name: count}, seed, limit=600).values()
    found += [chaos.driven(name, -(-count // share), 1000 * seed) for name, (count, _) in DRIVEN.items()]
    found += [resume_trials.outcome_of(name, -(-count // share), seed) for name, (count, _) in RESUMED.items()]
    return [*found, fuzzed(-(-CALLS[0] // share), seed), split_leaks.outcome_of(DIVISIONS[0], seed)]


def fuzzed(count: int, seed: int) -> chaos.Outcome:
    """Calls of public names with wrong arguments, others in every round."""
    script = pathlib.Path(__file__).parent.parent / "fuzz_calls.py"
    command = [sys.executable, str(script), str(count), "--first", str(count * seed)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    told = re.search(r"(\d+) calls of .* callables, (\d+) answered badly", ran.stdout)
    bad = count if told is None else int(told[2])
    return chaos.Outcome("wrong arguments", count, count - bad, failures=[ran.stdout[-4000:]] if bad else [])


def table(outcomes: dict[str, chaos.Outcome]) -> str:
    """The outcomes of trials in columns."""
    lines = [f"{'trial':26} {'runs':>6} {'ok':>6} {'worst':>8} {'lost':>5} {'repeated':>8} {'leaks':>6}"]
    for name, o in outcomes.items():
        unit = {**TRIALS, **DRIVEN, **RESUMED, "wrong arguments": CALLS, split_leaks.NAME: DIVISIONS}[name][1]
        lines.append(f"{name:26} {o.runs:6} {o.ok:6} {o.worst:8.3f} {o.lost:5} {o.repeated:8} {o.leaks:6}  {unit}")
    return "\n".join(lines)


def soak(minutes: float, seed: int, lanes: int, trials: bool) -> bool:
    """Continue for so long; whether nothing was found."""
    deadline = time.monotonic() + 60 * minutes
    tally, outcomes, rounds = Tally(deadline), {}, 0
    while time.monotonic() < deadline:
        end = min(deadline, time.monotonic() + SPELL) if trials else deadline
        numbers = [itertools.count(1000 * (seed + rounds) + lane, lanes) for lane in range(lanes)]
        spell(tally, numbers, end)
        if trials and time.monotonic() < deadline:
            for outcome in one_round(seed + rounds, SHARE):
                outcomes.setdefault(outcome.fault, chaos.Outcome(outcome.fault)).merge(outcome)
                for failure in outcome.failures:
                    tally.report(f"{outcome.fault}, seed {seed + rounds}: {failure}")
        rounds += 1
    if outcomes:
        print(table(outcomes))
    print(tally.table(), flush=True)
    return not tally.findings


def replay(numbers: Sequence[int], lanes: int) -> bool:
    """Run some cases again; whether nothing was found."""
    tally = Tally(time.monotonic())
    spell(tally, [iter(numbers[lane::lanes]) for lane in range(min(lanes, len(numbers)))])
    print(tally.table(), flush=True)
    return not tally.findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float, nargs="?", default=20.0)
    parser.add_argument("--seed", type=int, help="of all chance; another one every time")
    parser.add_argument("--lanes", type=int, default=2, help="how many cases at a time")
    parser.add_argument("--no-trials", action="store_true", help="random cases alone")
    parser.add_argument("--case", type=int, nargs="+", help="run these cases again, and nothing else")
    options = parser.parse_args()
    if options.case is not None:
        sys.exit(not replay(options.case, options.lanes))
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    sys.exit(not soak(options.minutes, seed, options.lanes, not options.no_trials))


def in_own_namespace() -> None:
    """Run this program again where it can mount a small disk of its own, if that is allowed."""
    os.environ["MILLSTREAM_SOAK_MOUNTS"] = "none"
    unshare = shutil.which("unshare")
    probe = "mount -t tmpfs -o size=1m none /dev/shm"
    if (
        unshare is not None
        and os.spawnlp(os.P_WAIT, "sh", "sh", "-c", f"{unshare} -m sh -c '{probe}' 2>/dev/null") == 0
    ):
        os.environ["MILLSTREAM_SOAK_MOUNTS"] = "own"
        os.execv(unshare, [unshare, "-m", sys.executable, *sys.argv])
    print("no mount namespace: a full disk is a limit to the size of files", flush=True)


if __name__ == "__main__":
    if "MILLSTREAM_SOAK_MOUNTS" not in os.environ:
        in_own_namespace()
    main()
