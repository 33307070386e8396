"""`millstream report`: a page about a run."""

import argparse
import sys
import webbrowser

_DESCRIPTION = """\
Write one page of HTML about a run, to be looked at in a browser: curves, speed, where the time went, and what the
run is. A RUN is a folder of ms.record or ms.checkpoint, or a file of ms.callbacks.jsonl_logger or
ms.callbacks.csv_logger. Several are compared in one page.
"""


def add_arguments(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command to the parser of the command line."""
    parser = commands.add_parser(
        "report",
        help="write a page about a run: curves, speed, where the time went",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a folder or a file that a run was written to")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the page (default: report.html in the folder of the run, or beside its file; here, if there are several)",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the page and say where it is; returns the exit status."""
    # JAX is loaded only now, so that --help answers at once.
    from millstream.errors import DamagedCheckpoint
    from millstream.report.page import write_report

    try:
        page = write_report(options.runs, options.output)
    except (OSError, ValueError, DamagedCheckpoint) as error:
        print(error, file=sys.stderr)
        return 2
    print(page)
    if options.open and not webbrowser.open(page.as_uri()):
        print("millstream report found no browser to open it with.", file=sys.stderr)
    return 0
