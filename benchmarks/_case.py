"""A case as a program: what it is asked for, and where its result goes."""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable

import _tables
from _result import Result, Table

FOLDER = pathlib.Path(__file__).parent
PROGRAMS = ("run", "report")


@dataclasses.dataclass(frozen=True)
class Options:
    """How a case is to be measured.

    Attributes:
        quick: Whether to see that it runs, on little data; the figures mean nothing then.
        also: Further Pythons by the name of what is in them, as in `grain-0.2.17`.
    """

    quick: bool = False
    also: dict[str, str] = dataclasses.field(default_factory=dict)

    def rounds(self, many: int) -> int:
        return 1 if self.quick else many

    def size(self, full: int, small: int) -> int:
        return small if self.quick else full


def names() -> list[str]:
    """All cases: the modules of this folder that are neither a shared part nor a program."""
    found = (path.stem for path in FOLDER.glob("*.py"))
    return sorted(name for name in found if not name.startswith("_") and name not in PROGRAMS)


def title_and_about(docstring: str | None) -> tuple[str, str]:
    """The first line of a case's docstring, and the rest of it as one paragraph per paragraph."""
    title, _, rest = (docstring or "").strip().partition("\n")
    return title, "\n\n".join(" ".join(part.split()) for part in rest.strip().split("\n\n"))


def parser(description: str) -> argparse.ArgumentParser:
    """What the runner and every case have in common."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="see that it runs; the figures mean nothing")
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=PYTHON", help="another Python, as in grain-0.2.17=PYTHON"
    )
    return parser


def main(measure: Callable[[Options], list[Table]]) -> None:
    """Run the case that this program is, print its tables, and keep them where `--json` says."""
    title, about = title_and_about(sys.modules["__main__"].__doc__)
    arguments = parser(title)
    arguments.add_argument("--json", type=pathlib.Path, help="the file for the result")
    chosen = arguments.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what is imported in fresh processes is compiled, as if installed
    load, begun = os.getloadavg()[0], time.perf_counter()
    try:
        tables = measure(Options(chosen.quick, dict(one.split("=", 1) for one in chosen.also)))
    except KeyboardInterrupt:
        sys.exit(130)
    seconds = round(time.perf_counter() - begun, 1)
    print("\n\n".join(map(_tables.markdown, tables)), flush=True)
    if chosen.json is not None:
        result = Result(title, about, tables, machine(), round(load, 1), seconds, quick=chosen.quick)
        chosen.json.write_text(json.dumps(dataclasses.asdict(result)))


def machine() -> dict[str, str]:
    """What was measured on: a processor, Python and packages, and what is to be said of each."""
    versions = {package: importlib.metadata.version(package) for package in ("millstream", "jax", "numpy")}
    return {_processor(): f"with {os.cpu_count()} cores", "Python": platform.python_version(), **versions}


def _processor() -> str:
    """Its model, where the system tells."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
