"""A store on this machine: every request takes a while, however many there are at once, and all are counted.

As a program it serves the files of a folder in a process of its own: /name/anything is the file `name`, so that one
file stands for as many shards as are wanted.
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


async def _serve(folder: pathlib.Path, latency: float) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    counts, now = [0, 0, 0], 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal now
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                path = head.split(" ", 2)[1]
                if path == "/counts":
                    body, counts[:] = json.dumps(counts).encode(), [0, 0, 0]
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                    await writer.drain()
                    continue
                now += 1
                counts[0] += 1
                counts[2] = max(counts[2], now)
                await asyncio.sleep(latency)
                body = files[path.split("/")[1]]
                found = re.search(r"(?mi)^range: bytes=(\d*)-(\d+)", head)
                assert found is not None, head
                first, last = (int(found[1]), int(found[2])) if found[1] else (len(body) - int(found[2]), len(body))
                first, last = max(first, 0), min(last, len(body) - 1)
                counts[1] += last + 1 - first
                lines = (
                    "HTTP/1.1 206 Partial Content",
                    f"Content-Length: {last + 1 - first}",
                    f"Content-Range: bytes {first}-{last}/{len(body)}",
                    f'ETag: "{path}"',
                )
                writer.write("\r\n".join([*lines, "", ""]).encode() + body[first : last + 1])
                await writer.drain()
                now -= 1
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(pathlib.Path(sys.argv[1]), float(sys.argv[2])))
