"""Views with plan files in real processes: eight that start at once, and some that are killed on the way.

The interpreter is started once; its children are forks of it. Nothing of JAX runs in them.
"""

import collections
import os
import pathlib
import signal
import sys
import time

import numpy as np

import millstream as ms
from millstream.files import plan_file, plan_folder

SAMPLES = 600
SOURCE = ms.DatasetSource([{"x": np.int32(i)} for i in range(SAMPLES)], "sequential")


def keep(sample):
    number = int(sample["x"])
    with open(os.environ["LOG"], "ab", buffering=0) as log:
        log.write(number.to_bytes(4, "little"))
    time.sleep(float(os.environ.get("DELAY", "0")))
    if os.environ.get("KILL_AT") == str(number):
        os.kill(int(os.environ["BUILDER"]), signal.SIGKILL)
        time.sleep(60)
    return number % 3 == 0


def calls():
    """How often the predicate was called for each sample since this was asked last."""
    path = pathlib.Path(os.environ["LOG"])
    numbers = np.frombuffer(path.read_bytes(), "<u4") if path.exists() else []
    path.unlink(missing_ok=True)
    return collections.Counter(map(int, numbers))


def select(folder, executor=None):
    view = ms.views.select(SOURCE, keep, executor=executor, plans=folder)
    assert view.locate(np.arange(len(view))).tolist() == list(range(0, SAMPLES, 3))


def forked(job):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.environ["BUILDER"] = str(os.getpid())
            job()
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


def eight_at_once(folder):
    begin, go = os.pipe()
    children = [forked(lambda: (os.close(go), os.read(begin, 1), select(folder))) for _ in range(8)]
    os.close(go)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    assert calls() == collections.Counter(range(SAMPLES))  # one of them has looked at every sample, once


def killed_and_continued(folder):
    plan_file._INTERVAL = 0.0  # a record after every batch, where a user's run takes a second
    first, seen = 0, collections.Counter()
    for executor, at in [(None, 0), (None, 5), (None, 100), (ms.Threads(2), 450), (ms.Processes(2), 599)]:
        os.environ["DELAY"] = "0.005" if isinstance(executor, ms.Processes) else "0"
        os.environ["KILL_AT"] = str(at)
        assert died(lambda executor=executor: select(folder, executor))
        found = calls()
        assert at in found and min(found) >= first, (at, found, first)  # nothing before the place where it continued
        first, seen = min(found), seen | found
    os.environ["DELAY"], os.environ["KILL_AT"] = "0", ""
    assert died(lambda: killed_before_the_name(folder))
    found = calls()
    assert min(found) > 60, found  # it did not start over
    assert seen | found == collections.Counter(range(SAMPLES))  # within one process, every sample once
    assert not died(lambda: select(folder))
    assert not calls()  # all that was missing is the name


def killed_before_the_name(folder):
    plan_folder.settle = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    select(folder)


def died(job):
    """Whether a process was killed in a job; it must not fail in any other way."""
    status = os.waitpid(forked(job), 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


if __name__ == "__main__":
    _, command, place = sys.argv
    SOURCE[:1].spec()  # loads what all of them need
    {"eight": eight_at_once, "kill": killed_and_continued}[command](place)
    assert [path.suffix for path in pathlib.Path(place).iterdir()] == [".plan"], os.listdir(place)
