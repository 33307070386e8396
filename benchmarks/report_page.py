"""The page of a long run: 10^6 steps with ten metrics each.

The record has a line for each step, as ms.record writes it from values of 32 bits, and one for every 5,000 steps about
the use of time. The page is what `millstream report` writes, with all there is to draw. The third figure is what it
costs to make the page of a watched run again, after 100 more steps. No other library makes such a page from a file, so
the figures stand alone.
"""

import json
import pathlib
import tempfile

import numpy as np
from _case import Options, main
from _measure import Entry, Reading, Run, measured
from _result import Table

from millstream.report.live import LivePage
from millstream.report.page import write_report

METRICS = ("loss", "accuracy", "gradient_norm", "perplexity", "entropy", "scale", "value", "policy", "kl", "reward")
OURS = "Millstream"
DESCRIPTION = {"loop": "train", "date": 0.0, "from_step": 0, "versions": {}, "loaders": {}, "tasks": [], "stop": None}
STATE = {"rows": [], "arrays": 0, "count": 0, "nbytes": 0}


def append(path: pathlib.Path, first: int, last: int) -> None:
    """Write the lines of these steps."""
    random = np.random.default_rng(first)
    with path.open("a") as file:
        for step in range(first, last):
            units = {"steps": step, "samples": 128 * step, "epochs": step // 1000, "time": round(0.01 * step, 6)}
            values = dict(zip(METRICS, random.random(len(METRICS), np.float32).tolist(), strict=True))
            file.write(json.dumps(units | {"logged": values}, separators=(",", ":")) + "\n")
            if step % 5000 == 0:
                spent = {"seconds": 50.0, "steps": 5000, "samples": 640_000, "compiling": 0.0, "data": 1.0}
                spent |= {"evaluation": 0.0, "callbacks": 0.5, "host_memory": 4e8, "device_memory": 8e8}
                file.write(json.dumps(units | {"spent": spent}, separators=(",", ":")) + "\n")


def writing(folder: pathlib.Path) -> Run:
    def run() -> None:
        write_report(folder)

    return run


def size(folder: pathlib.Path) -> Run:
    def run() -> Reading:
        return Reading(write_report(folder).stat().st_size / 1e6)

    return run


def following(folder: pathlib.Path, steps: int) -> Run:
    page, path, newest = LivePage([folder]), folder / "record.jsonl", [steps + 1]
    page.newest()

    def run() -> None:
        append(path, newest[0], newest[0] + 100)
        newest[0] += 100
        page.refresh()

    return run


def measure(options: Options) -> list[Table]:
    steps = options.size(1_000_000, 5_000)
    with tempfile.TemporaryDirectory() as base:
        folder = pathlib.Path(base) / "run"
        folder.mkdir()
        path = folder / "record.jsonl"
        begin = {"steps": 0, "run": {**DESCRIPTION, "state": STATE, "mixture": None, "skip": []}}
        path.write_text(json.dumps(begin, separators=(",", ":")) + "\n")
        append(path, 1, steps + 1)
        entry = Entry(OURS, lambda: writing(folder), "millstream")
        written = measured("From the record to the page", "s per page", OURS, [entry], options.rounds(3))
        entry = Entry(OURS, lambda: size(folder), "millstream")
        large = measured("Size of the page", "MB", OURS, [entry], 1)
        entry = Entry(OURS, lambda: following(folder, steps), "millstream")
        followed = measured("A watched page after 100 more steps", "s per page", OURS, [entry], options.rounds(3))
    found = written.find(OURS)
    assert found is not None
    written.hold("seconds of CPU for a page", min(found.cpu), at_most=5.0)
    large.hold("MB of a page", large.steps_of(OURS)[0], at_most=2.0)
    return [written, large, followed]


if __name__ == "__main__":
    main(measure)
