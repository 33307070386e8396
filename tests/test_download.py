"""Downloads from a server that fails in every way it can."""

import contextlib
import dataclasses
import errno
import gzip
import hashlib
import http.server
import io
import os
import pathlib
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from formats import idx_bytes
from test_bad_input import refuses

import millstream as ms
from millstream.datasets import _download
from millstream.datasets._download import DownloadSettings, RefusedURL, RemoteFile, fetch, require_redirect, require_url
from millstream.errors import DownloadError
from millstream.files.lock import locked
from millstream.files.urls import shown

BODY = bytes(range(256)) * 1000
PIN = f"sha256:{hashlib.sha256(BODY).hexdigest()}"
QUICK = DownloadSettings(timeout=0.5, total_timeout=20, retries=2, backoff=0.01, size_limit=1 << 20)


class Server:
    """A server on this machine whose behaviour is one function for each path."""

    def __init__(self):
        self.requests: list[tuple[str, str | None]] = []
        self.answers = {}
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                owner.requests.append((self.path, self.headers.get("Range")))
                with contextlib.suppress(OSError):
                    owner.answers[self.path.partition("?")[0]](self)
                self.close_connection = True

            def log_message(self, format, *args):
                pass

        class Quiet(http.server.ThreadingHTTPServer):
            def handle_error(self, request, client_address):
                pass

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def url(self, path, answer):
        self.answers[path] = answer
        return f"http://{self.address}{path}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    yield server
    server.close()


def send(handler, body, status=200, length=None, **headers):
    handler.send_response(status)
    if length != "none":
        handler.send_header("Content-Length", str(len(body) if length is None else length))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def whole(handler):
    send(handler, BODY)


def ranged(handler, body=BODY, cut=None):
    """A server that can continue where it stopped; `cut` is where it stops the first time."""
    start = int((handler.headers.get("Range") or "bytes=0-")[6:-1])
    end = len(body) if cut is None or start else cut
    headers = {"Content_Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}
    send(handler, body[start:end], 206 if start else 200, length=len(body) - start, **headers)


def reset(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(BODY)))
    handler.end_headers()
    handler.wfile.write(BODY[:100])
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def drip(handler):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(60):
        handler.wfile.write(b"x")
        time.sleep(0.05)


def endless(handler):
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(bytes(1 << 16))


def stall(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(BODY)))
    handler.end_headers()
    handler.wfile.write(BODY[:1000])
    time.sleep(1.2)


def redirect(target):
    return lambda handler: send(handler, b"", 302, Location=target)


def remote(*urls, checksum: str | None = PIN, size=None, name="data.bin"):
    return RemoteFile(name, urls, checksum, size)


def left(folder):
    return sorted(path.name for path in folder.rglob("*"))


def test_a_file_arrives_whole_and_silently(server, tmp_path, capfd):
    path = fetch("Test", remote(server.url("/a", whole)), tmp_path, QUICK)
    assert path == tmp_path / "data.bin"
    assert path.read_bytes() == BODY
    assert left(tmp_path) == ["data.bin"]
    assert capfd.readouterr() == ("", "")
    assert fetch("Test", remote("https://nowhere.invalid/x"), tmp_path, QUICK) == path  # it is there already


FAULTS = {
    "cut with a length": (lambda handler: send(handler, BODY[:999], length=len(BODY)), {}, "stopped after 999 of"),
    "cut without a length": (lambda handler: send(handler, BODY[:999], length="none"), {}, "the sha256 of its 999"),
    "cut, size known": (
        lambda handler: send(handler, BODY[:999], length="none"),
        {"checksum": None, "size": len(BODY)},
        "stopped after 999 of 256000 bytes",
    ),
    "longer than it says": (lambda handler: send(handler, BODY, length=10), {}, "the sha256 of its 10 bytes"),
    "a web page": (lambda handler: send(handler, b"<html>", Content_Type="text/html"), {}, "sent a web page"),
    "not found": (lambda handler: send(handler, b"", 404), {}, "answered 404 Not Found"),
    "broken": (lambda handler: send(handler, b"", 503), {}, "answered 503 Service Unavailable"),
    "reset": (reset, {}, "the connection failed"),
    "slow drip": (drip, {}, "was not there after 0.6 seconds"),
    "endless": (endless, {}, "more than the 1048576 bytes"),
    "larger than known": (whole, {"size": 1000}, "more than the 1000 bytes"),
    "wrong checksum": (lambda handler: send(handler, BODY[:-1] + b"!"), {}, "the sha256 of its 256000 bytes is"),
    "wrong md5": (whole, {"checksum": "md5:" + "0" * 32}, "the md5 of its 256000 bytes is"),
    "packed unasked": (
        lambda handler: send(handler, gzip.compress(bytes(1 << 20)), Content_Encoding="gzip"),
        {},
        "in an encoding that was not asked for",
    ),
    "stall": (stall, {}, "was silent for 0.5 seconds"),
    "sent on to a file": (redirect("file:///etc/passwd"), {}, "sent on to file:///etc/passwd: file: is not used"),
    "sent on to ftp": (redirect("ftp://example.com/x"), {}, "sent on to ftp://example.com/x: ftp: is not used"),
    "sent on to http": (
        redirect("http://example.com/x"),
        {"checksum": None},
        "sent on to http://example.com/x: plain http is only used for files with a known SHA-256",
    ),
    "sent on by another header": (
        lambda handler: send(handler, b"", 302, URI="http://example.com/x"),
        {"checksum": None},
        "sent on to http://example.com/x: plain http is only used for files with a known SHA-256",
    ),
    "not http at all": (lambda handler: handler.wfile.write(b"hello\r\n"), {}, "the connection failed"),
    "continues elsewhere": (
        lambda handler: send(handler, BODY[:9], 206, Content_Range="bytes 5-13/256000", length=9),
        {},
        "it continued at a different place than asked",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_leaves_nothing(server, tmp_path, name):
    answer, options, words = FAULTS[name]
    patience = {"slow drip": {"total_timeout": 0.6}, "stall": {"retries": 0}}.get(name, {})
    settings = dataclasses.replace(QUICK, **patience)
    file = remote(server.url("/a", answer), **options)
    with refuses(DownloadError, "Test needs data.bin", f"http://{server.address}/a: ", words, "put it at"):
        fetch("Test", file, tmp_path, settings)
    assert left(tmp_path) == []


def test_a_full_disk_is_named_and_leaves_nothing(server, tmp_path, monkeypatch):
    def full(handle, chunk):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_download.os, "write", full)
    with refuses(
        DownloadError, "Test cannot write", str(tmp_path / "data.bin"), "No space left on device", "give a cache_dir"
    ):
        fetch("Test", remote(server.url("/a", whole)), tmp_path, QUICK)
    assert left(tmp_path) == []


def test_the_next_mirror_is_asked(server, tmp_path):
    urls = [server.url("/gone", FAULTS["not found"][0]), server.url("/bad", FAULTS["wrong checksum"][0])]
    path = fetch("Test", remote(*urls, server.url("/good", whole)), tmp_path, QUICK)
    assert path.read_bytes() == BODY
    assert [request[0] for request in server.requests] == ["/gone", "/bad", "/good"]


def test_errors_that_pass_are_tried_again(server, tmp_path):
    answers = iter([FAULTS["broken"][0], FAULTS["broken"][0], whole])
    fetch("Test", remote(server.url("/a", lambda handler: next(answers)(handler))), tmp_path, QUICK)
    assert len(server.requests) == 3
    assert left(tmp_path) == ["data.bin"]


def test_a_broken_download_goes_on_where_it_stopped(server, tmp_path):
    url = server.url("/a", lambda handler: ranged(handler, cut=100_000))
    assert fetch("Test", remote(url), tmp_path, QUICK).read_bytes() == BODY
    assert [request[1] for request in server.requests] == [None, "bytes=100000-"]


def test_many_breaks_are_no_reason_to_give_up(server, tmp_path):
    def slices(handler):
        start = int((handler.headers.get("Range") or "bytes=0-")[6:-1])
        headers = {"Content_Range": f"bytes {start}-{len(BODY) - 1}/{len(BODY)}"} if start else {}
        send(handler, BODY[start : start + 30_000], 206 if start else 200, length=len(BODY) - start, **headers)

    assert fetch("Test", remote(server.url("/a", slices)), tmp_path, QUICK).read_bytes() == BODY
    assert len(server.requests) == 9


@pytest.mark.parametrize(
    ("old", "requests"), [(BODY[:70_000], 1), (b"x" * 70_000, 2), (BODY + b"too long", 2), (BODY, 1)]
)
def test_what_a_killed_process_left_is_used_or_replaced(server, tmp_path, old, requests):
    (tmp_path / ".data.bin.part").write_bytes(old)

    def answer(handler):
        if int((handler.headers.get("Range") or "bytes=0-")[6:-1]) >= len(BODY):
            return send(handler, b"", 416)
        return ranged(handler)

    assert fetch("Test", remote(server.url("/a", answer)), tmp_path, QUICK).read_bytes() == BODY
    assert server.requests[0][1] == f"bytes={len(old)}-"
    assert len(server.requests) == requests
    assert left(tmp_path) == ["data.bin"]


def test_unpinned_parts_of_unknown_age_are_not_used(server, tmp_path):
    (tmp_path / ".data.bin.part").write_bytes(b"x" * 100)
    fetch("Test", remote(server.url("/a", ranged), checksum=None), tmp_path, QUICK)
    assert (tmp_path / "data.bin").read_bytes() == BODY


def test_addresses_are_shown_without_secrets(server, tmp_path):
    assert shown("https://me:word@host:81/a/b?token=1#x") == "https://host:81/a/b"
    url = server.url("/a", FAULTS["not found"][0]) + "?token=hidden"
    with pytest.raises(DownloadError) as caught:
        fetch("Test", remote(url), tmp_path, QUICK)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://example.com/x", "file:///etc/passwd", "ftp://example.com/x", "data:,x", "x"])
def test_only_https_is_asked_without_a_checksum(url, tmp_path):
    with refuses(DownloadError, "plain http is only used" if url.startswith("http:") else "is not used for downloads"):
        fetch("Test", remote(url, checksum=None), tmp_path, QUICK)


def test_https_is_never_left_for_http():
    require_redirect("https://a/x", "https://b/x", pinned=False)
    for target in ("http://a/x", "http://127.0.0.1/x", "ftp://a/x"):
        with pytest.raises(RefusedURL, match="it is not https"):
            require_redirect("https://a/x", target, pinned=True)
    require_url("http://a/x", pinned=True)
    with pytest.raises(RefusedURL, match="known SHA-256"):
        require_url("http://127.0.0.1.example.com/x", pinned=False)


def test_offline_one_error_says_which_file_to_put_where(tmp_path, monkeypatch):
    asked = []

    def offline(host, *args, **kwargs):
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", offline)
    monkeypatch.setenv("no_proxy", "*")
    with refuses(
        DownloadError,
        "MNISTDataset needs train-images-idx3-ubyte.gz, and no server gave it",
        "https://ossci-datasets.s3.amazonaws.com/mnist/train-images-idx3-ubyte.gz: the connection failed",
        "https://storage.googleapis.com/cvdf-datasets/mnist/train-images-idx3-ubyte.gz",
        "Name or service not known",
        f"put it at {tmp_path / 'mnist' / 'train-images-idx3-ubyte.gz'}",
    ):
        ms.datasets.MNISTDataset(cache_dir=tmp_path)
    assert asked == ["ossci-datasets.s3.amazonaws.com", "storage.googleapis.com"]  # once each: it would not help


def test_a_dataset_is_downloaded_once_and_then_found(server, tmp_path, monkeypatch):
    images, labels = np.arange(3 * 4, dtype=np.uint8).reshape(3, 2, 2), np.array([2, 0, 1], np.uint8)
    files = {}
    for name, array in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        body = gzip.compress(idx_bytes(array), mtime=0)
        url = server.url(f"/{name}.gz", lambda handler, body=body: send(handler, body))
        files[name] = remote(url, checksum=f"sha256:{hashlib.sha256(body).hexdigest()}", name=f"{name}.gz")
    monkeypatch.setattr(ms.datasets.MNISTDataset, "files", files)
    for _ in range(2):
        arrays = ms.datasets.MNISTDataset("train", tmp_path).as_array_dict()
        np.testing.assert_array_equal(arrays["image"][..., 0], images)
        assert arrays["label"].tolist() == [2, 0, 1]
    assert len(server.requests) == 2
    assert left(tmp_path) == ["mnist", *sorted(f"{name}.gz" for name in files)]


def test_a_terminal_sees_how_far_it_is(server, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    fetch("Test", remote(server.url("/a", whole), size=len(BODY)), tmp_path, QUICK)
    text = sys.stderr.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "data.bin: 0." in text
    assert "of 0.3 MB" in text
    assert text.endswith("\r\x1b[K")


def test_threads_download_once(server, tmp_path):
    def slow(handler):
        time.sleep(0.2)
        whole(handler)

    file = remote(server.url("/a", slow))
    threads = [threading.Thread(target=fetch, args=("Test", file, tmp_path, QUICK)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.requests) == 1
    assert left(tmp_path) == ["data.bin"]


def test_a_lock_that_is_never_released_is_named(tmp_path):
    with (
        locked(tmp_path / "lock", 1.0) as held,
        refuses(TimeoutError, str(tmp_path / "lock"), "0.2 seconds"),
        locked(tmp_path / "lock", 0.2),
    ):
        raise AssertionError("two holders")
    assert held
    assert left(tmp_path) == []


def test_a_file_system_without_locks_is_served_too(server, tmp_path, monkeypatch):
    from millstream.files import lock

    def unsupported(handle):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock, "_try_lock", unsupported)
    fetch("Test", remote(server.url("/a", whole)), tmp_path, QUICK)
    assert (tmp_path / "data.bin").read_bytes() == BODY
    assert left(tmp_path) == ["data.bin"]


CHILD = f"""
import pathlib, sys
from millstream.datasets._download import DownloadSettings, RemoteFile, fetch
fetch("Test", RemoteFile("data.bin", (sys.argv[1],), "{PIN}"), pathlib.Path(sys.argv[2]), DownloadSettings(timeout=5))
"""


def start_child(url: str, folder: pathlib.Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "no_proxy": "*"}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, url, str(folder)], stderr=subprocess.PIPE, text=True, env=environment
    )


def wait_for(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def test_a_killed_holder_releases_the_lock_and_its_part_is_used(server, tmp_path):
    release = threading.Event()

    def half(handler):
        start = int((handler.headers.get("Range") or "bytes=0-")[6:-1])
        if start:
            return ranged(handler)
        send(handler, BODY[:100_000], length=len(BODY))
        release.wait(120)

    url = server.url("/a", half)
    child = start_child(url, tmp_path)
    wait_for(lambda: (tmp_path / ".data.bin.part").exists() and (tmp_path / ".data.bin.part").stat().st_size == 100_000)
    child.kill()
    child.communicate()
    assert fetch("Test", remote(url), tmp_path, QUICK).read_bytes() == BODY
    release.set()
    assert server.requests[-1][1] == "bytes=100000-"
    assert left(tmp_path) == ["data.bin"]


@pytest.mark.parametrize("first", [0, 4])
def test_eight_processes_at_once_with_kills(server, tmp_path, first):
    killed = threading.Event()

    def slowly(handler):
        start = int((handler.headers.get("Range") or "bytes=0-")[6:-1])
        headers = {"Content_Range": f"bytes {start}-{len(BODY) - 1}/{len(BODY)}"} if start else {}
        send(handler, BODY[start : start + 1000], 206 if start else 200, length=len(BODY) - start, **headers)
        killed.wait(120)
        handler.wfile.write(BODY[start + 1000 :])

    url = server.url("/a", slowly)
    children = [start_child(url, tmp_path) for _ in range(8)]
    wait_for(lambda: server.requests)
    for child in children[first : first + 3]:
        child.kill()
        time.sleep(0.1)
    killed.set()
    results = [(child.communicate()[1], child.returncode) for child in children]
    assert sorted(code for _, code in results) == [-9] * 3 + [0] * 5
    assert all(text == "" for text, code in results if code == 0)
    assert (tmp_path / "data.bin").read_bytes() == BODY
    assert left(tmp_path) == ["data.bin"]
    assert 1 <= len(server.requests) <= 4
