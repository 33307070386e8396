"""What a process has, by name, so that what a run leaves behind can be told."""

import collections
import contextlib
import gc
import os
import pathlib
import re
import threading
import time

import jax
from worker_processes import children

from millstream.reading.workers.nursery import get_ready

_TEMPORARY = re.compile(r"\.part$|\.lock$|^\.(tmp|old|trash)|^ballast$")


def holdings() -> collections.Counter[str]:
    """What this process has, by name: threads of Python, open files, children and shared memory."""
    gc.collect()
    with contextlib.suppress(OSError):
        get_ready()  # what it has open is here before and after
    # A thread of another library that once called Python is known as a dummy, and for good.
    found = [f"thread {thread.name}" for thread in threading.enumerate() if not thread.name.startswith("Dummy")]
    found += ["a child process"] * len(children())
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(f"descriptor of {os.readlink(f'/proc/self/fd/{fd}')}")
    found += ["a shared segment"] * pathlib.Path("/proc/self/maps").read_text().count("memfd:millstream")
    return collections.Counter(re.sub(r"\[\d+\]|(?<=_)\d+|/fd", "", name) for name in found if "/proc" not in name)


def growth(before: collections.Counter[str], seconds: float = 10.0) -> list[str]:
    """What this process has more than before, once it has had time to release it."""
    deadline, cleared = time.monotonic() + seconds, False
    while more := holdings() - before:
        if time.monotonic() > deadline:
            break
        if time.monotonic() > deadline - 0.9 * seconds and not cleared:
            cleared = True
            jax.clear_caches()  # compiled programs that read on the host hold on to what they read from
        time.sleep(0.05)
    return sorted(more.elements())


def left_over(folder: pathlib.Path) -> list[str]:
    """Temporary files and locks below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if _TEMPORARY.search(path.name))
