"""The command `millstream`."""

import argparse
import os
from collections.abc import Sequence

import millstream
from millstream.cli._launch import add_arguments as add_launch
from millstream.cli._prepare import add_arguments as add_prepare
from millstream.cli._report import add_arguments as add_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="millstream", description="Data pipelines and training loops for JAX.")
    parser.add_argument("--version", action="version", version=f"millstream {millstream.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train a small network on the embedded digits, check that the stream resumes exactly, write a report",
    )
    demo.add_argument("--epochs", type=_positive, default=40, help="epochs to train (default: 40)")
    demo.add_argument("--seed", type=int, default=0, help="seed of the run's key (default: 0)")
    demo.add_argument("--folder", type=_folder, help="where its record and report go (default: a new temporary folder)")
    demo.set_defaults(run=_demo)
    add_launch(commands)
    add_prepare(commands)
    add_report(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print("\nstopped")
        return 130


def _demo(options: argparse.Namespace) -> int:
    from millstream.cli._demo import run  # JAX is loaded only now, so that --help answers at once

    return run(epochs=options.epochs, seed=options.seed, folder=options.folder)


def _folder(text: str) -> str:
    if os.path.exists(text) and not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"must be a folder, got the file {text!r}")
    return text


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
