"""`millstream report` and `millstream watch`: a page about a run."""

import argparse
import contextlib
import sys
import webbrowser

_DESCRIPTION = """\
Write one page of HTML about a run, to be looked at in a browser: curves, speed, where the time went, and what the
run is. A RUN is a folder of ms.record or ms.checkpoint, or a file of ms.callbacks.jsonl_logger or
ms.callbacks.csv_logger. Several are compared in one page.

With --watch nothing is written: the page is served to browsers on this machine while the run runs, and follows it.
"""
_WATCH = """\
Serve the page of `millstream report` to browsers on this machine while the runs run. It follows them, and may be
started before they are. Ctrl-C ends it.
"""


def add_arguments(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the commands to the parser of the command line."""
    parser = commands.add_parser(
        "report",
        help="write a page about a run: curves, speed, where the time went",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the page (default: report.html in the folder of the run, or beside its file; here, if there are several)",
    )
    goal.add_argument("--watch", action="store_true", help="serve the page instead, and follow the run")
    parser.set_defaults(run=run)
    watch = commands.add_parser(
        "watch",
        help="show a run in a browser while it runs",
        description=_WATCH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    watch.set_defaults(run=run, watch=True)
    for each in (parser, watch):
        each.add_argument("runs", nargs="+", metavar="RUN", help="a folder or a file that a run was written to")
        each.add_argument("--open", action="store_true", help="open the page in a browser")
        each.add_argument("--port", type=int, help="where to serve it (default: any free port); only of a watched run")


def run(options: argparse.Namespace) -> int:
    """Write the page, or serve it, and say where it is; returns the exit status."""
    # JAX is loaded only now, so that --help answers at once.
    from millstream.errors import DamagedCheckpoint

    if options.port is not None and not options.watch:
        print("millstream report needs --watch with --port: only a served page has a port.", file=sys.stderr)
        return 2
    try:
        return _serve(options) if options.watch else _write(options)
    except (OSError, ValueError, DamagedCheckpoint) as error:
        print(error, file=sys.stderr)
        return 2


def _write(options: argparse.Namespace) -> int:
    from millstream.report.page import write_report

    page = write_report(options.runs, options.output)
    print(page)
    _open(options, page.as_uri())
    return 0


def _serve(options: argparse.Namespace) -> int:
    from millstream.report.live import serve

    with serve(options.runs, options.port or 0) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"{server.url}  (Ctrl-C ends it)", flush=True)
        _open(options, server.url)
        server.serve_forever()
    return 0


def _open(options: argparse.Namespace, address: str) -> None:
    if options.open and not webbrowser.open(address):
        print("millstream found no browser to open it with.", file=sys.stderr)
