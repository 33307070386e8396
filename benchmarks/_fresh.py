"""Scripts that are measured in a fresh process each, by themselves."""

import pathlib
import subprocess
import sys

from _measure import Reading, Run


def fresh(script: str) -> Run:
    """A round that runs a script, which prints its seconds by the clock and of CPU."""

    def run() -> Reading:
        place = pathlib.Path(__file__).parent
        command = [sys.executable, "-c", script]
        printed = subprocess.run(command, cwd=place, stdout=subprocess.PIPE, text=True, check=True).stdout
        return Reading(*map(float, printed.split()))

    return run
