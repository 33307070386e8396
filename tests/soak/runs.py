"""A case from its beginning to its end, in this process."""

import pathlib
import re
import shutil
import traceback
import warnings
from typing import Any

from soak.cases import Case
from soak.fault import Disk, Fault
from soak.leaks import growth, holdings, left_over
from soak.run import Run
from soak.verdict import Verdict
from soak.ways import use_up

# On a machine with much else to do, a killed worker may take longer than anybody waits for it. That it goes is checked.
_SLOW_TO_DIE = r"ResourceWarning: subprocess \d+ is still running"
# Python's own import leaves the file open that it is reading when Ctrl-C comes.
_CUT_IMPORT = r"ResourceWarning: unclosed file <_io\.\w+ name='[^']+\.pyc?'"


def run_case(case: Case, base: pathlib.Path, files: pathlib.Path, disk: Disk) -> dict[str, Any]:
    """Run a case in this process; what came of it, as plain values."""
    full = disk.folder is not None and any(fault.startswith("full disk") for fault in case.faults)
    folder = (disk.folder if full and disk.folder is not None else base) / f"case-{case.number}"
    folder.mkdir()
    before, wrong = holdings(), []
    run = Run(case, folder, files, disk)
    verdict = Verdict(case, run.stream, run.steps, run.faults)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with run.faulty():
                use_up(run)
            wrong = verdict.judge(run.entries).wrong
        except (Exception, KeyboardInterrupt) as error:
            wrong = [f"unexpected: {''.join(traceback.format_exception(error))}"]
    wrong += unexpected_warnings(run.faults, caught)
    faults = {name: 1 for name in case.faults} | {fault.name: fault.struck for fault in run.faults}
    summary = {"faults": faults, "lost": verdict.lost, "repeated": verdict.repeated, "errors": run.errors}
    del run, verdict
    leaks = growth(before)
    leaks += [f"the file {name}" for name in left_over(folder)]
    shutil.rmtree(folder)
    return {**summary, "wrong": wrong + [f"left: {leak}" for leak in leaks], "leaks": len(leaks)}


def unexpected_warnings(faults: list[Fault], caught: list[Any]) -> list[str]:
    """Warnings that nothing explains."""
    known = [_SLOW_TO_DIE, _CUT_IMPORT, *(pattern for fault in faults for pattern in fault.warnings)]
    texts = [f"{warning.category.__name__}: {warning.message}" for warning in caught]
    return [f"warned: {text}" for text in texts if not any(re.search(one, text, re.DOTALL) for one in known)]
