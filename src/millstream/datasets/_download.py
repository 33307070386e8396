"""Files from the network: verified, resumed, retried, and under their name only when they are whole."""

import contextlib
import dataclasses
import functools
import hashlib
import http.client
import os
import pathlib
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from email.message import Message
from typing import IO

from millstream.errors import DownloadError
from millstream.files.atomic import settle, temporary_path
from millstream.files.lock import locked
from millstream.files.safe_path import open_plain, plain_reader
from millstream.files.urls import is_loopback, shown
from millstream.text.bar_line import ProgressLine


class RefusedURL(Exception):
    """An address that must not be asked."""


def require_url(url: str, *, pinned: bool) -> None:
    """Refuse anything but https, and http without a pinned SHA-256 from another machine."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "https" or (parts.scheme == "http" and (pinned or is_loopback(parts.hostname or ""))):
        return
    if parts.scheme == "http":
        raise RefusedURL("plain http is only used for files with a known SHA-256")
    raise RefusedURL(f"{parts.scheme or 'no scheme'}: is not used for downloads, only https")


def require_redirect(source: str, target: str, *, pinned: bool) -> None:
    """Refuse to be sent from https to http, or to an address that would not be asked in the first place."""
    try:
        if source.startswith("https:") and not target.startswith("https:"):
            raise RefusedURL("it is not https")
        require_url(target, pinned=pinned)
    except RefusedURL as error:
        raise RefusedURL(f"refused to be sent on to {shown(target)}: {error}") from None


def make_opener(*, pinned: bool) -> urllib.request.OpenerDirector:
    """What opens https and http addresses, through the user's proxies, and no other kind."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(pinned),
    ):
        opener.add_handler(handler)
    return opener


class _Redirects(urllib.request.HTTPRedirectHandler):
    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned

    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message
    ) -> IO[bytes] | None:
        target = headers.get("location", headers.get("uri", ""))  # both of which urllib follows
        require_redirect(req.full_url, urllib.parse.urljoin(req.full_url, target), pinned=self.pinned)
        return super().http_error_302(req, fp, code, msg, headers)  # pyright: ignore[reportArgumentType]

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302  # pyright: ignore


class Unwritable(Exception):
    """The disk refused some bytes. No OSError, to be told apart from those of the connection."""


class Part:
    """A file under a temporary name, which grows from one attempt to the next.

    Args:
        path: Where it is.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    @property
    def size(self) -> int:
        """Bytes that have arrived."""
        return self.path.stat().st_size if self.path.exists() else 0

    def drop(self) -> None:
        """Forget them."""
        self.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def writer(self, start: int) -> Iterator[Callable[[bytes], None]]:
        """A function that writes bytes one after the other, from byte `start` on."""
        with _disk_errors():
            handle = open_plain(self.path, os.O_WRONLY | os.O_CREAT)
        try:
            with _disk_errors():
                os.ftruncate(handle, start)
                os.lseek(handle, start, os.SEEK_SET)

            def write(chunk: bytes) -> None:
                with _disk_errors():
                    while chunk:
                        chunk = chunk[os.write(handle, chunk) :]

            yield write
        finally:
            os.close(handle)


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unwritable(error.strerror) from error


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file that others publish.

    Args:
        name: Its name in the cache.
        urls: Where it is; the first that works is used.
        checksum: "sha256:..." or, where its publisher gives nothing better, "md5:...". None only with https.
        size: Its size in bytes, if that is known.
    """

    name: str
    urls: tuple[str, ...]
    checksum: str | None = None
    size: int | None = None

    @property
    def pinned(self) -> bool:
        """Whether nobody on the way could put another file in its place."""
        return self.checksum is not None and self.checksum.startswith("sha256:")


@dataclasses.dataclass(frozen=True)
class DownloadSettings:
    """How patient a download is.

    Args:
        timeout: Seconds without a byte, while connecting or reading, after which a server is given up.
        total_timeout: Seconds for a whole file, and for waiting for another process to fetch it.
        retries: How often all servers are tried again without getting any further.
        backoff: Seconds before the first retry; they double every time.
        size_limit: The most bytes of a file whose size is not known.
    """

    timeout: float = 30.0
    total_timeout: float = 7200.0
    retries: int = 3
    backoff: float = 0.5
    size_limit: int = 4 << 30


class _Fault(Exception):
    """What went wrong with one server; `final` if asking it again cannot help."""

    def __init__(self, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


def fetch(
    caller: str, remote: RemoteFile, folder: pathlib.Path, settings: DownloadSettings | None = None
) -> pathlib.Path:
    """The file in `folder`, downloaded if it is not there. Processes that ask at the same time download it once."""
    settings = DownloadSettings() if settings is None else settings
    final = folder / remote.name
    progress = ProgressLine(remote.name)
    waiting = functools.partial(progress.say, "another process is downloading it")
    try:
        if final.exists():
            return final
        with locked(folder / f".{remote.name}.lock", settings.total_timeout, waiting) as alone:
            if final.exists():
                return final
            # Only one process at a time has the part under this name, and finds what a killed one left of it.
            part = Part(temporary_path(final, alone=alone))
            if not remote.pinned:
                part.drop()  # bytes of unknown age that no checksum would tell apart
            try:
                _Transfer(remote, part, progress, settings).run()
                settle(part.path, final)
            except _Unavailable as error:
                part.drop()
                raise DownloadError(_advice(caller, remote, final, error.faults)) from None
            except (Unwritable, OSError) as error:
                part.drop()
                raise DownloadError(
                    f"{caller} cannot write {final}: {error}. Make room, or give a cache_dir."
                ) from error
    finally:
        progress.close()
    return final


def _advice(caller: str, remote: RemoteFile, final: pathlib.Path, faults: dict[str, str]) -> str:
    lines = "\n".join(f"  {shown(url)}: {fault}" for url, fault in faults.items())
    return (
        f"{caller} needs {remote.name}, and no server gave it:\n{lines}\n"
        f"Get the file in another way and put it at {final}; it will be used as it is."
    )


class _Unavailable(Exception):
    def __init__(self, faults: dict[str, str]) -> None:
        super().__init__(faults)
        self.faults = faults


class _Transfer:
    """One file on its way: what has arrived, from whom to ask the rest, and until when."""

    def __init__(self, remote: RemoteFile, part: Part, progress: ProgressLine, settings: DownloadSettings) -> None:
        self.remote = remote
        self.part = part
        self.progress = progress
        self.settings = settings
        self.limit = settings.size_limit if remote.size is None else remote.size
        self.deadline = time.monotonic() + settings.total_timeout
        self.opener = make_opener(pinned=remote.pinned)

    def run(self) -> None:
        """Fetch the file into its part, or raise what each server did."""
        faults: dict[str, str] = {}
        alive, attempt, most = list(self.remote.urls), 0, self.part.size
        while alive and attempt <= self.settings.retries and time.monotonic() < self.deadline:
            if attempt:
                time.sleep(self.settings.backoff * 2 ** (attempt - 1))
            attempt += 1
            for url in list(alive):
                try:
                    self._ask(url)
                    return
                except _Fault as fault:
                    faults[url] = str(fault)
                    if fault.final:
                        alive.remove(url)
                if self.part.size > most:  # a connection that breaks often still gets there
                    attempt, most = 1, self.part.size
                if not self.remote.pinned:
                    self.part.drop()  # another server may have another version
        raise _Unavailable(faults)

    def _ask(self, url: str) -> None:
        resumed = self.part.size > 0
        try:
            require_url(url, pinned=self.remote.pinned)
            with self._open(url) as response:
                self._receive(response)
        except RefusedURL as error:
            raise _Fault(str(error), final=True) from None
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 416 or not resumed:
                gone = 400 <= error.code < 500 and error.code not in (408, 429)
                raise _Fault(f"it answered {error.code} {error.reason}", final=gone) from None
            # There is nothing after the part: it is whole, or not a part of this file.
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise _Fault(f"it was silent for {self.settings.timeout:g} seconds") from None
            # Without a name server there is no network, and waiting for it would only delay the advice.
            text = f"the connection failed ({str(reason) or type(reason).__name__})"
            raise _Fault(text, final=isinstance(reason, socket.gaierror)) from None
        self._verify(resumed)

    def _open(self, url: str) -> http.client.HTTPResponse:
        headers = {"User-Agent": "millstream", "Accept-Encoding": "identity"}
        if self.part.size:
            headers["Range"] = f"bytes={self.part.size}-"
        request = urllib.request.Request(url, headers=headers)
        return self.opener.open(request, timeout=self.settings.timeout)

    def _receive(self, response: http.client.HTTPResponse) -> None:
        if response.headers.get_content_type() == "text/html":
            raise _Fault("it sent a web page instead of the file", final=True)
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise _Fault("it sent the file in an encoding that was not asked for", final=True)
        done = self.part.size if response.status == 206 else 0
        if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            self.part.drop()
            raise _Fault("it continued at a different place than asked")
        rest = response.headers.get("Content-Length")
        total = done + int(rest) if rest is not None and rest.isdecimal() else self.remote.size
        self._require_size(total or 0)
        share = "" if self.remote.size is None else f" of {self.remote.size / 1e6:.1f}"
        with self.part.writer(done) as write:
            while chunk := response.read1(1 << 16):
                done += len(chunk)
                self._require_size(done)
                write(chunk)
                self.progress.show(f"{done / 1e6:.1f}{share} MB")
                if time.monotonic() > self.deadline:
                    raise _Fault(f"the file was not there after {self.settings.total_timeout:g} seconds", final=True)
        if total is not None and done != total:
            raise _Fault(f"it stopped after {done} of {total} bytes")

    def _require_size(self, size: int) -> None:
        if size > self.limit:
            self.part.drop()
            raise _Fault(f"it sends more than the {self.limit} bytes that the file may have", final=True)

    def _verify(self, resumed: bool) -> None:
        if self.remote.checksum is None:
            return
        kind, _, expected = self.remote.checksum.partition(":")
        with plain_reader(self.part.path) as file:
            found = hashlib.file_digest(file, functools.partial(hashlib.new, kind, usedforsecurity=False)).hexdigest()
        if found != expected:
            size = self.part.size
            self.part.drop()
            # A part that an earlier process left may be at fault; the whole file is then asked for again.
            raise _Fault(f"the {kind} of its {size} bytes is {found}, not {expected}", final=not resumed)
