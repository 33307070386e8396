"""Where a run comes from: command line, host, and the commit of its program."""

import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

from millstream.callbacks._secrets import masked_command

_PATIENCE = 2.0  # seconds that the end of a run waits for git


def provenance() -> dict[str, Any]:
    """Command line and host."""
    return {"command": masked_command(sys.argv), "host": socket.gethostname()}


def _program_folder() -> pathlib.Path:
    """The folder of the script; that in which Python runs, if there is no script."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return pathlib.Path.cwd() if path is None else pathlib.Path(path).resolve().parent


class GitQuestion:
    """Asks git for the commit of the program, and whether files differ from it; no run waits for the answer."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self) -> None:
        """Start git; nothing happens where there is none."""
        self.end()
        command = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
        settings = {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        try:
            self._process = subprocess.Popen(
                command,
                cwd=_program_folder(),
                env={**os.environ, **settings},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            self._process = None

    def answer(self, *, wait: bool = False) -> dict[str, Any] | None:
        """The answer, once; None if there is none, or not yet.

        Args:
            wait: Whether to wait for it a little.
        """
        process = self._process
        if process is None or (process.poll() is None and not wait):
            return None
        try:
            text, _ = process.communicate(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            self.end()
            return None
        self._process = None
        return _read_status(text.decode(errors="replace")) if process.returncode == 0 else None

    def end(self) -> None:
        """Ask no more."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _read_status(text: str) -> dict[str, Any] | None:
    """The commit, and whether a file differs from it; None before the first commit."""
    lines = text.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "")
    if not commit or commit == "(initial)":
        return None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}
