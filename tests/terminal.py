"""A terminal for programs under test: what a person would see on a screen of some width."""

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Callable

import pyte


def run_in_terminal(
    command: list[str],
    columns: int,
    environment: dict[str, str],
    on_screen: "Callable[[list[str], subprocess.Popen[bytes]], None] | None" = None,
) -> tuple[int, list[str]]:
    """Run a program in a pseudo-terminal; returns its exit status and the lines that are left on the screen.

    Args:
        command: The program.
        columns: The width of the terminal. It is high enough that nothing leaves it.
        environment: All of its environment.
        on_screen: Is given the lines whenever the program has written something, and its process.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    width = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=width, start_new_session=True, close_fds=True
    )
    os.close(theirs)
    screen = pyte.Screen(columns, 600)
    stream = pyte.ByteStream(screen)
    try:
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # Linux says it so when the program has closed its end
                break
            if not data:
                break
            stream.feed(data)
            if on_screen is not None:
                on_screen(_lines(screen), process)
        return process.wait(timeout=60), _lines(screen)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _lines(screen: pyte.Screen) -> list[str]:
    return "\n".join(line.rstrip() for line in screen.display).rstrip().split("\n")
