"""The benchmarks run, go on after a fault or an interrupt, and their report is what the stored results give."""

import ast
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
CASES = sorted(
    path.stem for path in BENCHMARKS.glob("[a-z]*.py") if path.stem not in ("run", "report")
)  # all but shared parts and programs

TINY = '''"""A tiny case.

It counts to a thousand.
"""

from _case import main
from _measure import Entry, measured


def measure(options):
    entries = [
        Entry("ours", lambda: lambda: sum(range(1000)) * 0 or None, steps=1000),
        Entry("missing", lambda: __import__("no_such_peer"), "no-such-peer"),
    ]
    table = measured("Counting", "ns per number", "ours", entries, options.rounds(3))
    table.hold("ns per number", table.median("ours"), at_most=1e9)
    table.hold("times as fast as a peer that is missing", table.ratio("missing", "ours"), at_least=1)
    return [table]


if __name__ == "__main__":
    main(measure)
'''
HANGING = TINY.replace("    entries = [", "    __import__('time').sleep(600)\n    entries = [")


def python(script: pathlib.Path, *arguments: str, **options) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, **options)


def results_of(path: pathlib.Path):
    return json.loads(path.read_text())


@pytest.fixture
def copy(tmp_path) -> pathlib.Path:
    """The folder with its report, beside a README."""
    shutil.copy(ROOT / "README.md", tmp_path)
    return shutil.copytree(BENCHMARKS, tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.fixture
def tiny(copy) -> pathlib.Path:
    """The folder with tiny cases instead of its own, and no results."""
    for name in CASES:
        (copy / f"{name}.py").unlink()
    (copy / "results.json").unlink()
    (copy / "a_tiny.py").write_text(TINY)
    return copy


def test_the_report_and_the_table_in_the_readme_are_what_the_results_give():
    done = python(BENCHMARKS / "report.py", "--check")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "As results.json gives it.\n"


def test_the_report_is_written_again_without_measuring(copy):
    expected = {path: path.read_text() for path in (copy / "RESULTS.md", copy.parent / "README.md")}
    charts = sorted(path.name for path in (copy / "charts").glob("*.png"))
    (copy / "RESULTS.md").unlink()
    shutil.rmtree(copy / "charts")
    begin, rest = expected[copy.parent / "README.md"].split("<!-- benchmarks: begin -->")
    marks = "<!-- benchmarks: begin --><!-- benchmarks: end -->"
    (copy.parent / "README.md").write_text(begin + marks + rest.split("<!-- benchmarks: end -->")[1])
    done = python(copy / "report.py")
    assert done.returncode == 0, done.stderr
    assert {path: path.read_text() for path in expected} == expected
    assert sorted(path.name for path in (copy / "charts").glob("*.png")) == charts
    assert all((copy / "charts" / name).stat().st_size < 60_000 for name in charts)


@pytest.mark.parametrize(
    ("name", "place"), [("benchmarks/RESULTS.md", "## Cases"), ("README.md", "<!-- benchmarks: end -->")]
)
def test_a_figure_that_was_typed_by_hand_is_found(copy, name, place):
    path = copy.parent / name
    path.write_text(path.read_text().replace(place, f"Millstream: 1 ns\n\n{place}", 1))
    done = python(copy / "report.py", "--check")
    assert (done.returncode, done.stdout) == (1, f"Not what results.json gives: {path.name}. Run report.py.\n")


@pytest.mark.parametrize("name", CASES)
def test_the_case_says_what_it_measures_and_stands_in_the_report(name):
    docstring = ast.get_docstring(ast.parse((BENCHMARKS / f"{name}.py").read_text()))
    assert docstring is not None
    title, empty, *rest = docstring.splitlines()
    assert title.endswith(".") and empty == "" and rest
    report = (BENCHMARKS / "RESULTS.md").read_text()
    assert f"\n### {name}\n" in report


def test_results_and_charts_belong_to_cases():
    results = results_of(BENCHMARKS / "results.json")
    assert sorted(results["cases"]) == CASES
    for path in (BENCHMARKS / "charts").glob("*.png"):
        if path.stem == "readme":
            assert f"(benchmarks/charts/{path.name})" in (ROOT / "README.md").read_text()
            continue
        assert f"(charts/{path.name})" in (BENCHMARKS / "RESULTS.md").read_text()
        assert path.stem in (*CASES, "headline")


def test_no_path_of_a_machine_is_in_the_report():
    text = (BENCHMARKS / "results.json").read_text() + (BENCHMARKS / "RESULTS.md").read_text()
    assert "/tmp/" not in text and "/home/" not in text


def test_a_case_runs_for_real_and_a_missing_peer_is_skipped_by_name(tmp_path):
    (tmp_path / "cyreal.py").write_text("raise ModuleNotFoundError(\"No module named 'cyreal'\", name='cyreal')")
    found = tmp_path / "results.json"
    arguments = ("in_memory_scan", "--quick", "--results", str(found))
    done = python(BENCHMARKS / "run.py", *arguments, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "[1/1] in_memory_scan" in done.stdout
    assert "Skipped: cyreal, scan_epoch (cyreal is not installed)." in done.stdout
    results = results_of(found)
    case = results["cases"]["in_memory_scan"]
    assert results["pending"] == [] and case["quick"] and not case["failed"]
    (table,) = case["tables"]
    assert table["skipped"] == {"cyreal, scan_epoch": "cyreal is not installed"}
    assert [one["name"] for one in table["contenders"]] == ["Millstream, scan_epoch", "a scan by hand"]
    for one in table["contenders"]:
        assert len(one["rounds"]) == len(one["cpu"]) == 1 and one["rounds"][0] > 0
    compiled = {bar["text"]: bar["value"] for bar in table["bars"]}["programs compiled after the first epoch"]
    assert compiled == 0


def test_a_case_that_fails_is_named_and_the_next_one_runs(tiny):
    (tiny / "a_fault.py").write_text('"""A fault.\n\nIt raises."""\nraise RuntimeError("broken")\n')
    done = python(tiny / "run.py")
    assert done.returncode == 1
    assert "a_fault: it ended with 1" in done.stdout and "2 cases, 1 failed." in done.stdout
    results = results_of(tiny / "results.json")["cases"]
    assert results["a_fault"]["failed"] == "it ended with 1" and results["a_tiny"]["failed"] == ""
    report = (tiny / "RESULTS.md").read_text()
    assert "Not measured: it ended with 1." in report
    assert "Skipped: missing (no_such_peer is not installed)." in report
    assert [bar["text"] for bar in results["a_tiny"]["tables"][0]["bars"]] == ["ns per number"]


def test_a_case_that_hangs_is_stopped_at_its_limit(tiny):
    (tiny / "hanging.py").write_text(HANGING)
    done = python(tiny / "run.py", "hanging", "--limit", "1")
    assert done.returncode == 1
    assert "hanging: stopped at its limit of 1 s" in done.stdout
    assert results_of(tiny / "results.json")["cases"]["hanging"]["failed"] == "stopped at its limit of 1 s"


def test_a_run_that_is_stopped_keeps_what_it_has_and_goes_on(tiny):
    (tiny / "hanging.py").write_text(HANGING)
    with subprocess.Popen([sys.executable, str(tiny / "run.py")], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("[2/2] hanging"):
                break
        run.send_signal(signal.SIGINT)
        rest, _ = run.communicate(timeout=240)
    assert run.returncode == 130 and "--resume" in rest
    results = results_of(tiny / "results.json")
    assert list(results["cases"]) == ["a_tiny"] and results["pending"] == ["hanging"]
    assert "**Not measured anew yet: hanging.**" in (tiny / "RESULTS.md").read_text()
    (tiny / "hanging.py").write_text(TINY)
    done = python(tiny / "run.py", "--resume")
    assert done.returncode == 0, done.stderr
    assert "[1/1] hanging" in done.stdout
    results = results_of(tiny / "results.json")
    assert list(results["cases"]) == ["a_tiny", "hanging"] and results["pending"] == []


def test_a_case_that_is_not_there_is_refused_by_name():
    done = python(BENCHMARKS / "run.py", "cart_pole")
    assert done.returncode == 1
    assert done.stderr.startswith("run.py knows no case cart_pole. There are: block_shuffle, cartpole,")
