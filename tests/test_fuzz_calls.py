"""A few hundred of the calls that `fuzz_calls.py` makes; `make soak` makes all of them."""

import dataclasses
import fnmatch

import fuzz_calls

# What these refuse is tested where they are, or takes long: frameworks to load, programs to compile.
ELSEWHERE = """
    BatchIterator.* *CheckpointStore.* *.set_policy_state rl.* create_* managed.*
    DataLoader.* Metrics* array_record.* grain.* huggingface.* zarr.* polars.* arrow.* parquet.*
    set_buffer_priorities RandomMapTransform
""".split()


def is_here(name):
    return not any(fnmatch.fnmatchcase(name, pattern) for pattern in ELSEWHERE)


def test_wrong_arguments_are_refused_in_words_that_name_the_call_and_the_argument():
    assert fuzz_calls.findings([number for number in range(600) if is_here(fuzz_calls.name_of(number))]) == []


def test_right_arguments_are_taken():
    cases = [fuzz_calls.Case(0, name, {}) for name in filter(is_here, fuzz_calls.table())]
    assert {case.name: text for case in cases if (text := fuzz_calls.run(case))} == {}


def test_a_bad_answer_is_found(monkeypatch):
    call = fuzz_calls.table()["every"]
    raw = dataclasses.replace(call, bound=lambda: lambda **arguments: {}["steps"])
    monkeypatch.setitem(fuzz_calls.table(), "every", raw)
    assert "KeyError: steps" in fuzz_calls.run(fuzz_calls.Case(0, "every", {"steps": "'x'"}))
