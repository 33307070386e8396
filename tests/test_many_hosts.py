"""Several processes load together: the same global batches, on any number of hosts, and nothing lost when one dies.

The processes are real ones, joined by `jax.distributed` over the loopback, with eight devices in all. What needs no
devices, where rows are and what is in them, is tested for up to 1,024 hosts in this process.
"""

import collections
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import millstream as ms
from millstream._core.plan import Batching, Plan
from millstream.sharding._rows import rows_on_grid
from millstream.sources import Shuffle

SCRIPT = pathlib.Path(__file__).parent / "many_hosts_script.py"
SAMPLES, DEVICES, PATIENCE = 56, 8, 150.0
KILLED_AT, EPOCH = 3, 7  # the epoch that one run goes through on 4, 2, 1 and again 4 processes
WORDS = np.array([5, 6], np.uint32)


@dataclasses.dataclass
class Process:
    """What one process of a group has told, and how it ended."""

    code: int
    ended: float
    told: list[dict]
    errors: str

    def having(self, name):
        return [facts for facts in self.told if name in facts]


def run_group(folder, count, first, last, killed_at, *parts):
    """Run so many processes to their end, in at most `PATIENCE` seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES // count}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    started, ended = [], {}
    for number in range(count):
        command = [sys.executable, "-W", "error", SCRIPT, address, *map(str, (count, number, first, last, killed_at))]
        with open(folder / f"{number}.out", "wb") as out, open(folder / f"{number}.err", "wb") as err:
            started.append(subprocess.Popen([*command, *parts], env=environment, stdout=out, stderr=err))
    begun = time.monotonic()
    try:
        while len(ended) < count and time.monotonic() < begun + PATIENCE:
            ended |= {
                number: time.monotonic() - begun
                for number, process in enumerate(started)
                if number not in ended and process.poll() is not None
            }
            time.sleep(0.02)
    finally:
        for process in started:
            process.kill()
            process.wait()
    group = [
        Process(process.returncode, ended.get(number, np.inf), *read_output(folder, number))
        for number, process in enumerate(started)
    ]
    assert len(ended) == count, f"{len(ended)} of {count} ended in {PATIENCE} s\n{show(group)}"
    return group


def read_output(folder, number):
    lines = [line for line in (folder / f"{number}.out").read_text().splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines], (folder / f"{number}.err").read_text()


def show(group):
    return "\n".join(
        f"--- process {number} of {len(group)}, code {process.code}, last told {process.told[-1:]}\n{process.errors}"
        for number, process in enumerate(group)
    )


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """One run over an epoch, on 4 processes until one is killed, then on 2, 1 and 4; and batches of all kinds."""
    parts = {
        "4": (4, 0, EPOCH, KILLED_AT, "batches", "refusals"),
        "2": (2, KILLED_AT, 5, -1, "batches", "refusals"),
        "1": (1, 5, 6, -1, "batches"),
        "4 again": (4, 6, EPOCH, -1),
    }
    return {name: run_group(tmp_path_factory.mktemp("group"), *arguments) for name, arguments in parts.items()}


def case(groups, group, name):
    return [next(facts for facts in process.told if facts.get("case") == name) for process in groups[group]]


def joined(parts):
    """The rows of all processes. Those that several have must be the same."""
    rows = {}
    for part in parts:
        for row, content in part.items():
            assert rows.setdefault(int(row), content) == content
    return rows


CASES = [
    "threads, data",
    "threads, data and model",
    "threads, rows on two hosts",
    "no executor, fsdp, stages",
    "processes, data",
    "arrays, data and model, stages",
    "sharded arrays, data",
]


def test_all_processes_end_well_unless_one_is_killed(groups):
    for name in ("2", "1", "4 again"):
        assert [process.code for process in groups[name]] == [0] * len(groups[name]), show(groups[name])
        assert all(process.told[-1] == {"finished": True} for process in groups[name])


@pytest.mark.parametrize("name", CASES)
def test_global_batches_are_the_same_on_any_number_of_processes(groups, name):
    by_count = {}
    for count in ("1", "2", "4"):
        told = case(groups, count, name)
        by_count[count] = [joined(facts["rows"][step] for facts in told) for step in range(6)]
        assert all(sorted(rows) == list(range(16)) for rows in by_count[count])
        assert joined(facts["third"] for facts in told) == by_count[count][2]  # next_batch
        assert [facts["step"] for facts in told] == [2] * len(told)
    assert by_count["1"] == by_count["2"] == by_count["4"]


def test_reading_and_gathering_give_the_same_batches(groups):
    plain = [case(groups, "4", name) for name in CASES if "stages" not in name]
    staged = [case(groups, "4", name) for name in CASES if "stages" in name]
    for alike in (plain, staged):
        steps = [[joined(facts["rows"][step] for facts in told) for step in range(6)] for told in alike]
        assert all(other == steps[0] for other in steps)


@pytest.mark.parametrize("count", ["1", "2", "4"])
def test_each_process_reads_its_own_rows_and_no_others(groups, count):
    # Six batches of which the fourth is half empty, two more from next_batch, and what that reads ahead.
    for name in ("threads, data", "threads, data and model", "no executor, fsdp, stages"):
        for facts in case(groups, count, name):
            assert len(facts["rows"][0]) == 16 // int(count)
    for step, process in ((step, process) for process in groups[count] for step in process.having("indices")):
        assert len(step["indices"]) == 8 // len(groups[count]) == len(process.having("indices")[0]["indices"])


@pytest.mark.parametrize("count", ["1", "2", "4"])
def test_sums_over_an_uneven_epoch_are_those_of_one_process(groups, count):
    whole = [float(sum(range(SAMPLES))), SAMPLES]
    for process in groups[count]:
        (sums,) = process.having("sums")
        assert (sums["sums"], sums["scanned"], sums["step"]) == (whole, whole, 4)
