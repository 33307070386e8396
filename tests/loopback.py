"""A server on this machine that gives files in parts, as stores do, and misbehaves when it is told to."""

import contextlib
import html
import http.server
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

Fault = Callable[[Any], bool]  # given the handler, answers in its place and says so


class Loopback:
    """Files by path, under `http://127.0.0.1:port`; also an S3 endpoint, whose paths are /bucket/key.

    `fault` is asked before every answer. `requests` has the path and the Range of each, `nbytes` what was sent of files
    in all, and `most` how many were answered at the same time.
    """

    def __init__(self, latency: float = 0.0) -> None:
        self.files: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.latency = latency
        self.nbytes = self.now = self.most = 0
        self._lock = threading.Lock()
        self.fault: Fault = lambda handler: False
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                with owner._lock:
                    owner.requests.append((self.path, self.headers.get("Range")))
                    owner.now += 1
                    owner.most = max(owner.most, owner.now)
                try:
                    with contextlib.suppress(OSError):
                        time.sleep(owner.latency)
                        if not owner.fault(self) and not owner.lists(self):
                            ranged(self, *owner.files.get(self.path.partition("?")[0], (None, {})))
                finally:
                    with owner._lock:
                        owner.now -= 1

            def count(self, nbytes: int) -> None:
                with owner._lock:
                    owner.nbytes += nbytes

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Quiet(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def put(self, path: str, body: bytes, **headers: str) -> str:
        """Give a file; its address."""
        self.files[path] = (body, headers or {"ETag": f'"{hash(body)}"'})
        return f"{self.address}{path}"

    def lists(self, handler: Any) -> bool:
        """Answer the question of S3 for the keys of a bucket, two at a time."""
        path, _, query = handler.path.partition("?")
        asked = dict(urllib.parse.parse_qsl(query))
        if asked.get("list-type") != "2":
            return False
        bucket, first = f"{path.rstrip('/')}/", int(asked.get("continuation-token", 0))
        names = [name.removeprefix(bucket) for name in sorted(self.files) if name.startswith(bucket)]
        names = [name for name in names if urllib.parse.unquote(name).startswith(asked.get("prefix", ""))]
        entries = "".join(
            f"<Contents><Key>{urllib.parse.unquote(name)}</Key><Size>{len(self.files[bucket + name][0])}</Size>"
            f"<ETag>{html.escape(self.files[bucket + name][1]['ETag'])}</ETag>"
            "<LastModified>2022-01-01T00:00:00.000Z</LastModified></Contents>"
            for name in names[first : first + 2]
        )
        more = f"<NextContinuationToken>{first + 2}</NextContinuationToken>" if first + 2 < len(names) else ""
        body = f"<ListBucketResult><IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}{entries}"
        return send(handler, 200, f"{body}</ListBucketResult>".encode(), Content_Type="application/xml")

    def start_counting(self) -> None:
        """Forget the requests so far."""
        with self._lock:
            self.requests.clear()
            self.nbytes = self.most = 0

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def send(handler: Any, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> bool:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)
    return True


def ranged(handler: Any, body: bytes | None, headers: dict[str, str], cut: int | None = None) -> bool:
    """The part that is asked for, honestly; `cut` ends the connection after that many bytes of it."""
    if body is None:
        return send(handler, 404)
    found = re.fullmatch(r"bytes=(\d*)-(\d+)", handler.headers.get("Range", ""))
    if found is None:
        handler.count(len(body))
        return send(handler, 200, body, None, **headers)
    first, last = (int(found[1]), int(found[2])) if found[1] else (max(len(body) - int(found[2]), 0), len(body))
    last = min(last, len(body) - 1)
    if first > last:
        return send(handler, 416)
    part = body[first : last + 1]
    handler.count(len(part[:cut]))
    send(handler, 206, part[:cut], len(part), Content_Range=f"bytes {first}-{last}/{len(body)}", **headers)
    if cut is not None:
        handler.close_connection = True
    return True


def reset(handler: Any) -> bool:
    """End the connection in the middle of everything."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True
    return True
