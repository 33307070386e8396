"""Faults again and again: `python tests/soak.py 20` goes on for twenty minutes and prints what came of them.

Every round is a tenth of the full counts, with a seed of its own; ten rounds take about half an hour on two cores.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import chaos
import resume_trials

# What to do how often, and what the column "worst" is.
TRIALS = {
    "killed_worker": (100, "s between two batches"),
    "death": (100, "s until noticed"),
    "poison": (20, "s, with three starts"),
    "exceptions": (150, "s until raised"),
    "stalled": (60, "s, with a timeout of 1 s"),
    "leaving": (100, "s, an epoch at most"),
    "no_room": (20, "s until refused"),
    "abandoned": (200, "s"),
    "epochs": (1000, "KiB per epoch"),
    "held": (12, "s"),
    "many_held": (1000, ""),
    "warning_as_error": (20, ""),
    "interrupted_inside": (60, "s"),
    "forked": (10, ""),
    "closed_elsewhere": (20, "s until told"),
}
DRIVEN = {
    "main_killed": (100, "s until all are gone"),
    "interrupted": (50, "s until gone"),
    "clean_exit": (100, "s until gone"),
}
RESUMED = {
    "killed_run": (200, ""),
    "terminated_run": (100, "s until gone, from its start on"),
    "full_disk_run": (20, ""),
}
SMALL_TMPFS = "no_room in a small tmpfs"


def one_round(seed: int, share: int) -> list[chaos.Outcome]:
    """All faults, each a part of the full number of times."""
    found = []
    for name, (count, _) in TRIALS.items():
        if name != "epochs" or seed % share == 0:  # a slope needs all of them
            count = count if name == "epochs" else -(-count // share)
            found += chaos.trials({name: count}, seed, limit=600).values()
    found += [chaos.driven(name, -(-count // share), 1000 * seed) for name, (count, _) in DRIVEN.items()]
    found += [resume_trials.outcome_of(name, -(-count // share), seed) for name, (count, _) in RESUMED.items()]
    if os.environ.get("SMALL_TMPFS"):
        small = chaos.trials({"no_room": 20 // share}, seed, SMALL_TMPFS=os.environ["SMALL_TMPFS"])["no_room"]
        small.fault = SMALL_TMPFS
        found.append(small)
    return found


def table(outcomes: dict[str, chaos.Outcome]) -> str:
    """The outcomes in columns."""
    lines = [f"{'fault':26} {'runs':>6} {'ok':>6} {'worst':>8} {'lost':>5} {'repeated':>8} {'leaks':>6}"]
    for name, o in outcomes.items():
        unit = {**TRIALS, **DRIVEN, **RESUMED}.get(name, (0, ""))[1]
        lines.append(f"{name:26} {o.runs:6} {o.ok:6} {o.worst:8.3f} {o.lost:5} {o.repeated:8} {o.leaks:6}  {unit}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full", action="store_true", help="one round of the full counts")
    options = parser.parse_args()
    outcomes: dict[str, chaos.Outcome] = {}
    end, seed = time.monotonic() + 60 * options.minutes, options.seed
    while True:
        for outcome in one_round(seed, 1 if options.full else 10):
            outcomes.setdefault(outcome.fault, chaos.Outcome(outcome.fault)).merge(outcome)
            for failure in outcome.failures:
                print(f"{outcome.fault}, seed {seed}: {failure}", file=sys.stderr, flush=True)
        print(table(outcomes), flush=True)
        seed += 1
        if time.monotonic() > end or options.full:
            sys.exit(any(outcome.failures for outcome in outcomes.values()))


def with_small_tmpfs() -> None:
    """Run this program again in a mount namespace of its own with a small tmpfs, where that is allowed."""
    folder = pathlib.Path(tempfile.mkdtemp())
    command = f'mount -t tmpfs -o size=1m none {folder} && SMALL_TMPFS={folder} exec "$@"'
    allowed = subprocess.run(["unshare", "-m", "sh", "-c", command, "sh", "true"], capture_output=True)
    if allowed.returncode == 0:
        os.execvp("unshare", ["unshare", "-m", "sh", "-c", command, "sh", sys.executable, *sys.argv])
    print(f"No small tmpfs: {allowed.stderr.decode().strip()}", file=sys.stderr)
    os.environ["SMALL_TMPFS"] = ""


if __name__ == "__main__":
    if "SMALL_TMPFS" not in os.environ:
        with_small_tmpfs()
    main()
