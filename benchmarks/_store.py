"""A store on this machine: every request takes a while, however many there are at once, and all are counted.

As a program it serves the files of a folder in a process of its own: /name/anything is the file `name`, so that one
file stands for as many shards as are wanted, unless `anything` is itself the name of a file. HEAD and whole files are
answered, too, as clients of S3 ask for them, to whom `name` is a bucket.
"""

import asyncio
import contextlib
import json
import pathlib
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple


class Counts(NamedTuple):
    """What was asked of a store since it was last asked for its counts."""

    requests: int
    nbytes: int
    most: int


class Store:
    """The address of a store, and what was asked of it."""

    def __init__(self, address: str) -> None:
        self.address = address

    def counts(self) -> Counts:
        """What was asked since the last call."""
        with urllib.request.urlopen(f"{self.address}/counts") as answer:
            return Counts(*json.loads(answer.read()))


@contextlib.contextmanager
def serving(folder: pathlib.Path, latency: float) -> Iterator[Store]:
    """Serve the files of a folder for the length of a block."""
    command = [sys.executable, __file__, str(folder), str(latency)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Store(f"http://127.0.0.1:{process.stdout.readline().strip()}")
        finally:
            process.terminate()


def _span(found: re.Match[str] | None, size: int) -> tuple[int, int]:
    """The first and the last byte that are asked for, as HTTP has it: from one on, both, or the last few."""
    if found is None:
        return 0, size - 1
    if not found[1]:
        return max(size - int(found[2]), 0), size - 1
    return int(found[1]), min(int(found[2] or size), size - 1)


async def _serve(folder: pathlib.Path, latency: float) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    counts, now = [0, 0, 0], 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal now
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                method, path, _ = head.split(" ", 2)
                if path == "/counts":
                    body, counts[:] = json.dumps(counts).encode(), [0, 0, 0]
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                    await writer.drain()
                    continue
                now += 1
                counts[0] += 1
                counts[2] = max(counts[2], now)
                await asyncio.sleep(latency)
                _, name, *rest = path.split("/")
                body = files[rest[-1] if rest[-1] in files else name]
                found = re.search(r"(?mi)^range: bytes=(\d*)-(\d*)", head)
                first, last = _span(found, len(body))
                lines = [
                    "HTTP/1.1 200 OK" if found is None else "HTTP/1.1 206 Partial Content",
                    f"Content-Length: {last + 1 - first}",
                    f'ETag: "{path}"',
                ]
                if found is not None:
                    lines.append(f"Content-Range: bytes {first}-{last}/{len(body)}")
                sent = b"" if method == "HEAD" else body[first : last + 1]
                counts[1] += len(sent)
                writer.write("\r\n".join([*lines, "", ""]).encode() + sent)
                await writer.drain()
                now -= 1
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(pathlib.Path(sys.argv[1]), float(sys.argv[2])))
