"""`millstream prepare`: samples into shards, as a script says."""

import argparse
import importlib.util
import os
import pathlib
import sys
from types import ModuleType
from typing import Any

_DESCRIPTION = """\
Write samples into shards with an index, once, for any number of runs to read (ms.prepare).

The script says what to prepare. It has a source, and may have a function and options of ms.prepare:

    source = ms.sources.JsonlSource("text.jsonl")
    def fn(sample): return {"ids": tokenize(sample["text"])}
    options = {"deduplicate": "text"}

A run that was stopped or killed is continued by the same command. However the work is divided, the
files are the same. Read them with ms.sources.PreparedSource(FOLDER).
"""


def add_arguments(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command to the parser of the command line."""
    parser = commands.add_parser(
        "prepare",
        help="write samples into shards, through a function, for any number of runs to read",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("script", help="a Python file with source, and, if need be, fn and options")
    parser.add_argument("--to", required=True, metavar="FOLDER", help="a folder of its own, where shards are written")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--workers", type=int, metavar="N", help="make shards in N processes (default: in this one)")
    where.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="make shards in the tasks of a Ray cluster: auto for the one that runs, local to start one here",
    )
    parser.add_argument(
        "--part",
        metavar="I/N",
        help="make every N-th shard from number I on, as task I of N in a job array, which are numbered from 0; the "
        "task that is finished last writes the index",
    )
    parser.set_defaults(run=lambda options: run(parser, options))


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the script, prepare what it says, and say what was written; returns the exit status."""
    if options.workers is not None and options.workers < 1:
        parser.error(f"--workers must be at least 1. Got {options.workers}.")
    part = _part(parser, options.part)
    if not os.path.isfile(options.script):
        parser.error(f"there is no script {options.script!r} in {os.getcwd()}. Check the path.")
    import millstream as ms  # JAX is loaded only now, so that --help answers at once

    asked = _asked(parser, _loaded(pathlib.Path(options.script)))
    executor = None if options.workers is None else ms.Processes(options.workers)
    given = {name: value for name, value in (("executor", executor), ("ray", options.ray), ("part", part)) if value}
    source = ms.prepare(directory=options.to, **asked | given)
    if source is None:
        print(f"{options.to}: this part is finished; others are not yet")
    else:
        print(f"{options.to}: {len(source):,} samples in {len(source.blocks):,} blocks")
    return 0


def _part(parser: argparse.ArgumentParser, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        parser.error(f"--part must be I/N with I from 0 to N - 1, such as 0/64. Got {text!r}.")
    return int(number), int(count)


def _loaded(path: pathlib.Path) -> ModuleType:
    """The script as a module. It is not registered, so that its functions reach other processes by value."""
    sys.path.insert(0, str(path.parent.absolute()))
    spec = importlib.util.spec_from_file_location("millstream_prepared_script", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _asked(parser: argparse.ArgumentParser, script: ModuleType) -> dict[str, Any]:
    """The arguments of `ms.prepare` that a script says."""
    if not hasattr(script, "source"):
        parser.error(f"{script.__file__} must say what to prepare: source = ... It has no such name.")
    options = getattr(script, "options", {})
    if not isinstance(options, dict):
        parser.error(f"options in {script.__file__} must be a dict of arguments of ms.prepare. Got {options!r}.")
    return {"source": script.source, "fn": getattr(script, "fn", None), **options}
