"""`ms.prepare` in real processes: killed at random moments, two at once, interrupted, on a full disk.

`python tests/prepare_script.py kill FOLDER 50 SEED` kills one job 50 times. The interpreter is started once; its
children are forks of it. Nothing of JAX runs in them.
"""

import contextlib
import hashlib
import os
import pathlib
import random
import resource
import signal
import sys
import time
import traceback

import numpy as np

import millstream as ms

SAMPLES = 1200
SOURCE = ms.DatasetSource([f"document {i % 900} " * (1 + i % 6) for i in range(SAMPLES)], "sequential")
OPTIONS = {"deduplicate": True, "samples_per_shard": 20}
PATIENCE = 120.0


def tokens(text):
    time.sleep(float(os.environ.get("DELAY", "0")))
    return {"text": text, "ids": np.frombuffer(text.encode(), np.uint8)}


def forked(folder, **options):
    """A fork of this process that prepares."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            ms.prepare(SOURCE, folder, tokens, **OPTIONS, **options)
            status = 0
        except KeyboardInterrupt:
            status = 130
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    with contextlib.suppress(ProcessLookupError):  # whoever is first: it may be killed before it has run at all
        os.setpgid(child, child)
    return child


def finish(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(folder):
    """The names of all files, and a hash of each."""
    files = sorted(path for path in pathlib.Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def shards(folder):
    """When each finished shard was written."""
    return {path.name: path.stat().st_mtime_ns for path in pathlib.Path(folder).glob("*.arrow")}


def records(folder):
    return {path.name for path in (pathlib.Path(folder) / ".prepare").glob("*.json") if path.stem.isdecimal()}


def until(done, child):
    """Wait until something is so, or a process has ended."""
    begun = time.monotonic()
    while not done() and time.monotonic() - begun < PATIENCE:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.002)


def undisturbed(folder):
    ms.prepare(SOURCE, folder, tokens, **OPTIONS)
    return contents(folder)


def kill(folder, times, seed):
    """Kill a job at random moments: before its first shard, in the middle of one, between two."""
    chance, job, killed, kept = random.Random(seed), folder / "job", 0, 0
    OPTIONS["samples_per_shard"] = max(1, 100 // times)  # so that there is always something left to do
    wanted = undisturbed(folder / "straight")
    os.environ["DELAY"] = "0.005"
    for number in range(times):
        before, finished = shards(job), records(job)
        sound = {name for name in before if name.removesuffix(".arrow") + ".json" in finished}
        child = forked(job, executor=[None, ms.Processes(2), ms.Threads(2)][number % 3])
        if chance.random() < 0.8:
            until(lambda finished=finished: len(records(job)) > len(finished), child)
        time.sleep(chance.random() * 0.05)
        os.killpg(child, signal.SIGKILL)
        killed += finish(child) == -signal.SIGKILL
        after = shards(job)
        assert all(after[name] == before[name] for name in sound), "a finished shard was made again"
        kept = max(kept, len(records(job)))
    os.environ["DELAY"] = "0"
    assert finish(forked(job, executor=ms.Processes(2))) == 0
    assert contents(job) == wanted
    print(f"killed {killed} of {times} times, {kept} shards kept at most")


def together(folder):
    """Two processes at once, and three parts of a job array at once."""
    wanted = undisturbed(folder / "straight")
    os.environ["DELAY"] = "0.0005"
    children = [forked(folder / "job") for _ in range(2)]
    children += [forked(folder / "parts", part=(number, 3)) for number in range(3)]
    assert [finish(child) for child in children] == [0] * 5
    assert contents(folder / "job") == wanted
    assert contents(folder / "parts") == wanted
    print("the same")


def interrupt(folder):
    """Ctrl-C leaves finished shards and nothing else; the next call continues with them."""
    wanted, job = undisturbed(folder / "straight"), folder / "job"
    os.environ["DELAY"] = "0.002"
    for executor in (None, ms.Processes(2)):
        begun = len(records(job))
        child = forked(job, executor=executor)
        until(lambda begun=begun: len(records(job)) > begun + 2, child)
        os.kill(child, signal.SIGINT)
        assert finish(child) == 130
        left = contents(job)
        assert not [name for name in left if name.endswith((".part", ".lock"))], left
        assert {name.removesuffix(".arrow") for name in shards(job)} == {name[:5] for name in records(job)}
    os.environ["DELAY"] = "0"
    assert finish(forked(job)) == 0
    assert contents(job) == wanted
    print("continued")


def full(folder):
    """A disk without room is named, and what is finished stays."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
            ms.prepare(SOURCE, folder / "job", lambda text: {"text": text * 100}, samples_per_shard=20)
        except OSError as error:
            print("".join(traceback.format_exception_only(error)))
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    assert finish(child) == 0
    assert not [name for name in contents(folder / "job") if name.endswith(".part")]


if __name__ == "__main__":
    command, folder, *rest = sys.argv[1:]
    {"kill": kill, "together": together, "interrupt": interrupt, "full": full}[command](
        pathlib.Path(folder), *map(int, rest)
    )
