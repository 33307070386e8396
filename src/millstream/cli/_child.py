"""The beginning of every process of `millstream launch`: a file of its own that imports nothing of the package.

It runs a script or a module as Python would, and tells the launcher of a failure at once. Without that the launcher
would hear of it late: at its end, a process of `jax.distributed` waits minutes for the others, which wait for it.
"""

import contextlib
import os
import runpy
import sys
import types


def main() -> None:
    """Run `[number, report, guard, *command]` of `sys.argv`.

    The arguments are the number of the process, the pipe that takes failures, the pipe to the guard (see `_guard.py`),
    and what Python would be given: a script or `-m` and a module, and their arguments.
    """
    number, report, guard = map(int, sys.argv[1:4])
    own = os.getpid()
    os.write(guard, b"+%d\n" % os.getpid())
    os.close(guard)
    os.set_inheritable(report, False)  # a program that the script starts must not keep it open
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    code = _run(sys.argv[4:])
    if code != 0 and os.getpid() == own:  # what the script has forked ends for itself alone
        with contextlib.suppress(OSError):  # the launcher may be gone
            os.write(report, b"%d %d\n" % (number, code))
    sys.exit(code)


def _run(command: list[str]) -> int:
    try:
        if command[0] == "-m":
            sys.path[0], sys.argv = os.getcwd(), command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0], sys.argv = os.path.dirname(os.path.realpath(command[0])), command
            runpy.run_path(os.path.abspath(command[0]), run_name="__main__")
    except SystemExit as end:
        return _exit_code(end.code)
    except BaseException as error:
        error = error.with_traceback(_without_our_frames(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit_code(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    print(value, file=sys.stderr)
    return 1


def _without_our_frames(frames: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback from the script on, as if Python had started it."""
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    main()
