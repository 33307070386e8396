"""A page about runs that is served while they run, to browsers on this machine only."""

import contextlib
import hmac
import http.server
import os
import pathlib
import secrets
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from millstream.callbacks.log_file import RECORD
from millstream.errors import DamagedCheckpoint
from millstream.loops import History
from millstream.report._reading import RecordReader, read_run, tell_apart
from millstream.report._run_data import RunData
from millstream.report.page import make_page
from millstream.text.errors import describe_value, require_int, require_path

_CALLER = "millstream watch"
_ADDRESS = "127.0.0.1"
_OFTEN = 1.0  # seconds between two looks at the files
_SHARE = 0.01  # of a processor's time that looking may take
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


class _FollowedRun:
    """A run that may not be there yet, may grow, and may begin again.

    Args:
        path: Of its folder or file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = require_path(_CALLER, "the path of a run", path).expanduser().resolve()
        self._record: RecordReader | None = None
        self._stamp: Any = None
        self.wrong = ""
        self.run = RunData(self._path.name, "nothing yet", History())

    def refresh(self) -> bool:
        """Read what is new; returns whether anything is. What cannot be read leaves what was read before."""
        try:
            is_new, wrong = self._refresh(), ""
        except FileNotFoundError:
            is_new, wrong = False, ""  # not there yet, or set apart a moment ago
        except (OSError, ValueError, DamagedCheckpoint) as error:
            is_new, wrong = False, str(error)
        is_new, self.wrong = is_new or wrong != self.wrong, wrong
        return is_new

    def _refresh(self) -> bool:
        record = self._path / RECORD
        if record.exists():
            self._record = self._record or RecordReader(record, self._path.name)
            if not self._record.read():
                return False
            self.run = self._record.run()
            return True
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        self.run = read_run(self._path)
        return True


def _stamp(path: pathlib.Path) -> Any:
    """What differs when a file has grown, or a folder has one more checkpoint."""
    if path.is_dir():
        return sorted(path.iterdir())
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


class LivePage:
    """The newest page about runs, made again when it is asked for and something is new.

    Args:
        runs: Their folders or files, which need not be there yet.
    """

    def __init__(self, runs: Sequence[str | os.PathLike[str]]) -> None:
        self._paths = [*runs]
        self._runs = [_FollowedRun(path) for path in runs]
        self._lock = threading.Lock()
        self._due = 0.0
        self._version = 0
        self._page = b""

    def newest(self) -> tuple[str, bytes]:
        """The page and what tells it from those before it."""
        with self._lock:
            if time.monotonic() >= self._due:
                begun = time.thread_time()
                self.refresh()
                self._due = time.monotonic() + max(_OFTEN, (time.thread_time() - begun) / _SHARE)
            return f'"{self._version}"', self._page

    def refresh(self) -> None:
        """Make the page again, if anything is new."""
        if not any([followed.refresh() for followed in self._runs]) and self._version:
            return
        self._version += 1
        runs = [followed.run for followed in self._runs]
        tell_apart(runs, self._paths)
        wrong = [followed.wrong for followed in self._runs if followed.wrong]
        self._page = make_page(runs, is_live=True, wrong=wrong).encode()


class Server(http.server.ThreadingHTTPServer):
    """Serves one page to this machine, at an address that cannot be guessed.

    Args:
        page: What to serve.
        port: To listen on; 0 takes a free one.
    """

    daemon_threads = True

    def __init__(self, page: LivePage, port: int = 0) -> None:
        super().__init__((_ADDRESS, port), _Handler)
        self.page = page
        self._secret = secrets.token_urlsafe(16)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{_ADDRESS}:{self.server_port}/{self._secret}/"

    def accepts(self, host: str | None, path: str) -> HTTPStatus | None:
        """Why a request is not answered; None if it is.

        A page of a different site can have its own name lead here, but not with this host in the request.
        """
        if host not in (f"{_ADDRESS}:{self.server_port}", f"localhost:{self.server_port}"):
            return HTTPStatus.FORBIDDEN
        is_known = hmac.compare_digest(path.encode(), f"/{self._secret}/".encode())
        return None if is_known else HTTPStatus.NOT_FOUND


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = 30  # seconds until a connection that asks nothing is closed

    def do_GET(self) -> None:
        refused = self.server.accepts(self.headers.get("Host"), self.path)
        if refused is not None:
            self._answer(refused, {"Content-Type": "text/plain"}, refused.phrase.encode())
            return
        tag, page = self.server.page.newest()
        if self.headers.get("If-None-Match") == tag:
            self._answer(HTTPStatus.NOT_MODIFIED, {"ETag": tag}, b"")
        else:
            self._answer(HTTPStatus.OK, {**_HEADERS, "ETag": tag}, page)

    def _answer(self, status: HTTPStatus, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # a browser that has been closed
            self.wfile.write(body)

    def version_string(self) -> str:
        return "millstream"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are nobody's concern."""


def serve(runs: Sequence[str | os.PathLike[str]], port: int = 0) -> Server:
    """A server of a page about runs, which is to be started with `serve_forever`."""
    if not runs:
        raise ValueError(f"{_CALLER} needs at least one run. Got {describe_value(runs)}.")
    require_int(_CALLER, "port", port, least=0, most=65535)
    page = LivePage(runs)
    try:
        return Server(page, port)
    except OSError as error:
        wrong = f"{_CALLER} cannot listen on port {port}: {error.strerror}. Choose a different one, or none for any."
        raise type(error)(wrong) from None
