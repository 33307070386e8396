"""A fixed list of the soak's cases: every kind of fault once, on every executor, and cases that found something."""

import dataclasses
import pathlib
import re
import subprocess
import sys
import types
from typing import Any

import pytest
from soak.cases import EXECUTORS, FAULTS, FIRST, SOURCES, WAYS, Part, case_of
from soak.oracle import stream_of
from soak.pipelines import words_of
from soak.verdict import Verdict

import millstream as ms

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes and what they hold are counted in /proc")

SCRIPT = pathlib.Path(__file__).parent / "soak"


def test_the_first_cases_have_every_fault_and_every_executor():
    cases = [case_of(17_000 + place) for place in range(len(FIRST))]
    assert [case.faults[0] for case in cases] == list(FAULTS)
    assert {case.executor for case in cases} == set(EXECUTORS)


def test_a_case_is_a_function_of_its_number():
    assert [case_of(number) for number in range(300)] == [case_of(number) for number in range(300)]
    many = [case_of(number) for number in range(100, 1000)]
    assert {case.way for case in many} == set(WAYS)
    assert {part.source for case in many for part in case.parts} == set(SOURCES)
    orders = [part.ordering.mode for case in many for part in case.parts]
    assert set(orders) == {"itemwise", "reseed", "repeat", "batchwise", "blocks"}
    assert {len(case.parts) for case in many} == {1, 2}
    assert {case.buffered for case in many} == {case.ordered for case in many} == {True, False}


PART = Part("arrays", 0, 23, ms.Shuffle(), None, None, ((4, "drop"),))
CASE = dataclasses.replace(
    case_of(0),
    parts=(PART,),
    faults=("nothing",),
    way="iterate",
    on_error="raise",
    ordered=True,
    buffered=False,
)


def judged(change):
    """The verdict on a run whose batches are the right ones, but for a change."""
    stream = stream_of(CASE, words_of(CASE.seed))
    batches = [stream.at(step) for step in range(2 * stream.steps_per_epoch)]
    entries = [
        {"after": number, "digest": batch.digest, "samples": batch.samples} for number, batch in enumerate(batches, 1)
    ]
    verdict = Verdict(CASE, stream, len(entries), [])
    change(entries)
    verdict.judge(entries)
    return bool(verdict.wrong), verdict.lost, verdict.repeated


def swap(entries):
    entries[1], entries[2] = entries[2], entries[1]


def test_what_is_lost_repeated_swapped_or_changed_is_found():
    rows = PART.batches[0][0]
    assert judged(lambda entries: None) == (False, 0, 0)
    assert judged(lambda entries: entries.pop(0)) == (True, rows, 0)
    assert judged(lambda entries: entries.insert(1, entries[0])) == (True, 0, rows)
    assert judged(swap) == (True, 0, 0)
    assert judged(lambda entries: entries[1].update(digest="0")) == (True, 0, 0)
    assert judged(lambda entries: entries[1].update(after=3)) == (True, 0, 0)


def test_a_batch_that_comes_again_after_one_that_was_left_out_is_told_by_its_state():
    part = dataclasses.replace(PART, ordering=ms.Shuffle("repeat"))
    case = dataclasses.replace(CASE, parts=(part,), on_error="skip batch", way="kept")
    stream = stream_of(case, words_of(case.seed))
    epoch = stream.steps_per_epoch
    batches = [stream.at(step) for step in range(2 * epoch)]
    # All of the first epoch is left out, and the second one is the same again.
    once: list[Any] = [
        types.SimpleNamespace(name="sample that raises once", target=batch.samples[0]) for batch in batches[:epoch]
    ]
    came = [{"after": step + 1, "digest": batches[step].digest} for step in range(epoch, 2 * epoch)]
    verdict = Verdict(case, stream, len(batches), once).judge(came)
    assert verdict.wrong == []


# Each is bounded by itself, so a faster machine runs the same ones. `make soak` explores.
CASES = [
    *range(1000, 1000 + len(FIRST)),
    1066,  # few descriptors while a checkpoint is saved
    78101,  # an interrupt while a cache is closed
    491096173,  # a tar file that is gone when a worker starts
]


def test_pipelines_come_through_every_fault():
    command = [sys.executable, str(SCRIPT), "--case", *map(str, CASES)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1500)
    assert ran.returncode == 0, ran.stdout[-30_000:]
    rows = dict(re.findall(r"^(\w[\w ,]*?) +(\d+)(?: +\d+){5}$", ran.stdout, re.MULTILINE))
    assert rows.keys() == FAULTS.keys(), ran.stdout
    assert min(map(int, rows.values())) >= 1, ran.stdout
    total = f"total: {len(CASES)} runs, \\d+ faults, 0 lost, 0 repeated, 0 leaks, 0 findings"
    assert re.search(total, ran.stdout), ran.stdout
