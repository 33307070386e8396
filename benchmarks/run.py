"""Run the benchmarks, each case in a process of its own, keep what they find in results.json, and write the report.

    python benchmarks/run.py                      all cases
    python benchmarks/run.py --resume             those that a run which was stopped has left
    python benchmarks/run.py cartpole saving      these cases
    python benchmarks/run.py --quick              see that all of them run; what they find is not kept

A case that fails or passes its limit is named, and the next one follows. `--also NAME=PYTHON` names a Python in which
another version of a peer is installed, or one that is not wanted here, as in `--also tensorflow=PYTHON`.
"""

import ast
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import _case
import _result
import report
from _processes import below
from _result import Result, Results

LIMIT = 480  # seconds that a case may take; remote_shards with its peers takes five minutes
PATIENCE = 10  # seconds to tidy up in


class Interrupt:
    """Whether Ctrl-C was pressed. An exception might come while a case starts, and leave it running."""

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGINT, self._note)

    def _note(self, *_: object) -> None:
        self.came = True


def run_case(name: str, arguments: list[str], limit: float, interrupt: Interrupt) -> Result:
    """The result of a case, or why there is none."""
    script = _case.FOLDER / f"{name}.py"
    title, about = _case.title_and_about(ast.get_docstring(ast.parse(script.read_text())))
    with tempfile.TemporaryDirectory() as folder:
        found = pathlib.Path(folder, "result.json")
        command = [sys.executable, str(script), "--json", str(found), *arguments]
        process = subprocess.Popen(command, start_new_session=True)  # Ctrl-C is for the runner, which ends the case
        end = time.monotonic() + limit
        while process.poll() is None and time.monotonic() < end and not interrupt.came:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        if process.poll() is None:
            _end(process)
            return Result(title, about, failed=f"stopped at its limit of {limit:g} s")
        if process.returncode != 0:
            return Result(title, about, failed=f"it ended with {process.returncode}")
        return _result.from_json(json.loads(found.read_text()))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a case that still runs: it may tidy up, and then it and all that it has started are gone."""
    started = [*below(process.pid), process.pid]
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    for one in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    process.wait()


def run_all(todo: list[str], results: Results, path: pathlib.Path | None, arguments: list[str], limit: float) -> int:
    """Run cases one after the other until Ctrl-C; every result is kept at once. How many have failed."""
    failed, interrupt = 0, Interrupt()
    for number, name in enumerate(todo, 1):
        print(f"\n[{number}/{len(todo)}] {name}\n", flush=True)
        begun = time.perf_counter()
        result = run_case(name, arguments, limit, interrupt)
        if interrupt.came:
            break
        failed += bool(result.failed)
        print(f"\n{name}: {result.failed or 'done'} ({time.perf_counter() - begun:.0f} s)", flush=True)
        results.cases[name] = result
        results.pending = [one for one in results.pending if one != name]
        if path is not None:
            _result.store(results, path)
    return failed


def chosen_cases(names: list[str], resume: bool, results: Results) -> list[str]:
    known = _case.names()
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise SystemExit(f"run.py knows no case {', '.join(unknown)}. There are: {', '.join(known)}.")
    if names and resume:
        raise SystemExit("run.py goes on with --resume or runs the cases that are named, not both.")
    return [name for name in results.pending if name in known] if resume else names or known


def main() -> int:
    parser = _case.parser("Run the benchmarks and write their report.")
    parser.add_argument("cases", nargs="*", help="names of cases; all if there are none")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was stopped")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that a case may take")
    parser.add_argument("--results", type=pathlib.Path, help="another file for the results; no report is written then")
    chosen = parser.parse_args()
    path = (None if chosen.quick else report.RESULTS) if chosen.results is None else chosen.results.resolve()
    results = _result.load(path) if path is not None else Results()
    todo = chosen_cases(chosen.cases, chosen.resume, results)
    results.cases = {name: result for name, result in results.cases.items() if name in _case.names()}
    results.pending = [*todo, *(name for name in results.pending if name not in todo)]
    arguments = ["--quick"] * chosen.quick + [part for one in chosen.also for part in ("--also", one)]
    if path is not None:
        _result.store(results, path)  # should this be killed, the file knows what is left
    failed = run_all(todo, results, path, arguments, chosen.limit)
    if path == report.RESULTS:
        report.write(results)
    left = [name for name in todo if name in results.pending]
    if left:
        print(f"\nStopped; {len(left)} cases are left. `python benchmarks/run.py --resume` goes on with {left[0]}.")
        return 130
    print(f"\n{len(todo)} cases, {failed} failed.")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
