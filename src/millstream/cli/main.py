"""The command `millstream`."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence

import millstream
from millstream.cli._completion import add_arguments as add_completion
from millstream.cli._completion import commands_in
from millstream.cli._launch import add_arguments as add_launch
from millstream.cli._prepare import add_arguments as add_prepare
from millstream.cli._report import add_arguments as add_report

_DEMO = """\
Train a small network on handwritten digits that come with the package. The same run in a second
process is killed and resumed: both end with the same weights, bit for bit. Nothing is downloaded;
it takes less than half a minute on two cores.
"""
_EXAMPLES = {
    "completion": ["source <(millstream completion bash)", "millstream completion fish | source"],
    "demo": ["millstream demo", "millstream demo --epochs 40 --folder run --open"],
    "launch": ["millstream launch -n 2 --cpu train.py --epochs 3", "millstream launch -n 4 -m my_project.train"],
    "prepare": ["millstream prepare tokens.py --to tokens --workers 8"],
    "report": ["millstream report run --open", "millstream report run other -o both.html"],
    "watch": ["millstream watch run --open", "millstream watch run other --port 8123"],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = make_parser()
    if not given:
        parser.print_help()
        return 0
    _require_command(parser, given[0])
    options = parser.parse_args(given)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print("\nstopped")
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line, with all commands."""
    parser = argparse.ArgumentParser(
        prog="millstream",
        description="Data pipelines and training loops for JAX that resume exactly.",
        epilog="Start with: millstream demo. millstream COMMAND --help has examples.",
    )
    parser.add_argument("--version", action="version", version=f"millstream {millstream.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train a small network, kill it, resume it, compare, and write a report",
        description=_DEMO,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument("--epochs", type=_positive, default=20, metavar="N", help="epochs to train (default: 20)")
    demo.add_argument("--seed", type=_seed, default=0, metavar="N", help="seed of the run's key (default: 0)")
    demo.add_argument(
        "--folder",
        type=_folder,
        metavar="FOLDER",
        help="where its record and report go (default: a new temporary folder)",
    )
    demo.add_argument("--open", action="store_true", help="open the report in a browser")
    demo.set_defaults(run=_demo)
    add_launch(commands)
    add_prepare(commands)
    add_report(commands)
    add_completion(commands, make_parser)
    for name, command in commands.choices.items():
        command.epilog = "\n".join(["examples:", *(f"  {line}" for line in _EXAMPLES.get(name, []))])
    return parser


def _require_command(parser: argparse.ArgumentParser, name: str) -> None:
    """Refuse a command that there is not, with the one that may be meant."""
    names = [command.name for command in commands_in(parser)]
    if not name.startswith("-") and name not in names:
        near = difflib.get_close_matches(name, names, 1)
        meant = f"Did you mean {near[0]}?" if near else f"There are {', '.join(names)}."
        parser.error(f"there is no command {name!r}. {meant}")


def _demo(options: argparse.Namespace) -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # two processes cannot share an accelerator, nor do they need one
    from millstream.cli._demo import run  # JAX is loaded only now, so that --help answers at once

    return run(epochs=options.epochs, seed=options.seed, folder=options.folder, open_page=options.open)


def _folder(text: str) -> str:
    if os.path.exists(text) and not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"must be a folder, got the file {text!r}")
    return text


def _positive(text: str) -> int:
    value = _seed(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
