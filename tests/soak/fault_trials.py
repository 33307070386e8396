"""Trials of one fault after the other, in one process: `chaos.trials` starts it and reads outcomes.

What workers run is defined here, in the main script, so that no worker loads JAX.
"""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable

import jax
import numpy as np
from worker_processes import children, nurseries

import millstream as ms
from millstream.reading.workers import worker_group
from soak import chaos

SAMPLES, ROWS = 96, 4
KEY = jax.random.key(3)
TRIALS: dict[str, Callable[[chaos.Outcome, int, random.Random], None]] = {}
SPEC = {"x": jax.ShapeDtypeStruct((8,), np.float32), "index": jax.ShapeDtypeStruct((), np.int32)}

warnings.simplefilter("error")


def trial(function):
    """List a function as trials of the fault it is named after."""
    TRIALS[function.__name__] = function
    return function


def sample(index):
    time.sleep(0.001)
    return {"x": np.random.default_rng(index).random(8, np.float32), "index": np.int32(index)}


def loader_of(fn, executor=None, **options):
    ordering = options.pop("ordering", "shuffle")
    source = ms.DiskSampleSource(options.pop("samples", SAMPLES), fn, sample_spec=SPEC, ordering=ordering)
    executor = ms.Processes(2) if executor is None else executor
    return ms.DataLoader([source, ms.BatchTransform(ROWS)], executor=executor, **options)


def epoch(loader, key=KEY):
    return [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key))]


def differences(outcome, found, expected):
    """What is wrong with an epoch."""
    indices = collections.Counter(int(i) for batch, mask in found for i in batch["index"][mask])
    lost, repeated = SAMPLES - len(indices), sum(count - 1 for count in indices.values())
    outcome.lost += lost
    outcome.repeated += repeated
    same = len(found) == len(expected) and all(
        jax.tree.all(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), *pair))
        for pair in zip(found, expected, strict=True)
    )
    return [] if same else [f"the epoch differs: {lost} samples lost, {repeated} repeated"]


def once(folder, name):
    """True for the first process that asks; it also writes down when that was."""
    try:
        fd = os.open(pathlib.Path(folder) / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.write(fd, repr(time.monotonic()).encode())
    os.close(fd)
    return True


def when(folder, name):
    return float((pathlib.Path(folder) / name).read_text())


def talk_nonsense():
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, b"\xff" * 64)
    time.sleep(1)


def deaths():
    return {
        "exit 0": lambda: os._exit(0),
        "exit 123": lambda: os._exit(123),
        "SystemExit": lambda: sys.exit(3),
        "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "SIGBUS": lambda: os.kill(os.getpid(), signal.SIGBUS),
        "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "at start": lambda: os._exit(1),
        "nonsense on its socket": talk_nonsense,
        "a fork that keeps its socket": lambda: (os.fork() and os._exit(1)) or time.sleep(1) or os._exit(1),
        "a program that outlives it": lambda: subprocess.Popen(["sleep", "1"], close_fds=False) and os._exit(1),
    }


@trial
def death(outcome, runs, chance):
    """Each way to die, at a random sample or while starting; the time is that until it is noticed."""
    noticed = []
    bury = worker_group.WorkerGroup._on_death
    worker_group.WorkerGroup._on_death = lambda self, worker: noticed.append(time.monotonic()) or bury(self, worker)
    expected = epoch(loader_of(sample, ms.Threads(2)))
    for number in range(runs):
        kind, die = list(deaths().items())[number % len(deaths())]
        target = chance.randrange(SAMPLES)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")

            def deadly(index, die=die, target=target, folder=folder):
                if index == target and once(folder, "died"):
                    die()
                return sample(index)

            def startup(die=die, folder=folder):
                if once(folder, "died"):
                    die()

            at_start = kind == "at start"
            noticed.clear()
            executor = ms.Processes(2, startup=startup if at_start else None)
            loader = loader_of(sample if at_start else deadly, executor)
            failures = []
            try:
                failures = differences(outcome, epoch(loader), expected)
            except RuntimeError as error:
                noticed.append(time.monotonic())
                text = f"{error} {error.__notes__}"
                if kind != "SystemExit" or "SystemExit: 3" not in text or f"sample {target}," not in text:
                    failures = [repr(error)]
            seconds = noticed[0] - when(folder, "died") if noticed else 99.0
            failures += [f"noticed after {seconds:.2f} s"] * (seconds > 5)
            outcome.add([f"{kind}: {failure}" for failure in failures], seconds)


def strike(chance, waves, pause):
    """Kill all workers of this process, or some of them, so often; those that are there, whatever they are doing."""
    for _ in range(waves):
        time.sleep(pause())
        workers = children()
        some = workers if chance.random() < 0.7 else chance.sample(workers, chance.randint(0, len(workers)))
        some += nurseries() if chance.random() < 0.3 else []
        number = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
        for pid in some:
            chaos.kill(pid, number)


@trial
def kills(outcome, runs, chance):
    """One to eight workers are killed together, idle, busy or starting, once or in waves; no run ends."""
    expected = epoch(loader_of(sample, ms.Threads(2)))
    for number in range(runs):
        workers, doing = (4, 8, 3, 1, 6, 2, 7, 5)[number % 8], ("idle", "busy", "starting")[number % 3]
        loader, waves = loader_of(sample, ms.Processes(workers)), chance.randint(1, 4)
        stops = [] if doing == "starting" else chance.sample(range(1, len(expected)), waves)
        found, failures = [], []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batches = loader.iterate(loader.init_state(KEY))
            other = threading.Thread(target=strike, args=(chance, waves, lambda: chance.uniform(0, 0.2)))
            if doing == "starting":
                other.start()
            try:
                while len(found) < len(expected):
                    if len(found) in stops:
                        stops.remove(len(found))
                        strike(chance, 1, lambda doing=doing: 0.2 if doing == "idle" else 0.0)
                    found.append(jax.device_get(next(batches)))
                failures = differences(outcome, found, expected)
            except RuntimeError as error:
                failures = [f"it ended: {error}"]
            finally:
                batches.close()
                if doing == "starting":
                    other.join()
        outcome.add([f"{workers} workers, {doing}, {waves} waves: {failure}" for failure in failures])


class Local(Exception):
    pass


class TwoArguments(ValueError):
    def __init__(self, path, line):
        super().__init__(f"{path}:{line}")
        self.path, self.line = path, line


class HoldsLock(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class Mute(Exception):
    def __str__(self):
        raise ZeroDivisionError

    __repr__ = __str__

    def __reduce__(self):
        raise ZeroDivisionError


class Counting(Exception):
    made = 0

    def __init__(self, text):
        super().__init__(text)
        type(self).made += 1


def zoo():
    """Awkward exceptions: what raises them, the type that arrives, and part of its text."""

    def cyclic():
        first, second = ValueError("first"), ValueError("second")
        first.__cause__, second.__cause__ = second, first
        return first

    class InAFunction(LookupError):
        pass

    return [
        (lambda: Local("hello"), Local, "hello"),
        (lambda: TwoArguments("a.png", 7), TwoArguments, "a.png:7"),
        (lambda: HoldsLock("busy"), HoldsLock, "busy"),
        (Mute, Mute, "no text"),
        (lambda: ValueError("x" * 1_000_000), ValueError, "xxx"),
        (cyclic, ValueError, "first"),
        (lambda: ExceptionGroup("both", [Local("a"), KeyError("b")]), ExceptionGroup, "both"),
        (lambda: StopIteration(3), RuntimeError, "StopIteration"),
        (lambda: GeneratorExit(), RuntimeError, "GeneratorExit"),
        (lambda: SystemExit(3), RuntimeError, "SystemExit"),
        (lambda: KeyboardInterrupt(), RuntimeError, "KeyboardInterrupt"),
        (lambda: ValueError("bad", lambda: 0), ValueError, "bad"),
        (lambda: InAFunction("local"), InAFunction, "local"),
        (lambda: Counting("init"), Counting, "init"),
        (None, ValueError, "does not match the spec"),  # a value that cannot be sent
    ]


@trial
def exceptions(outcome, runs, chance):
    """Each exception of the zoo, at a random sample of a random batch, after all good batches before it."""
    with tempfile.TemporaryDirectory() as folder:
        targets = [chance.randrange(12 * number, 12 * number + 12) for number in range(15)]

        def raising(index):
            if index in targets:
                raised = zoo()[targets.index(index)][0]
                if raised is None:
                    return {"x": threading.Lock(), "index": np.int32(0)}
                open(f"{folder}/{index}", "w").write(repr(time.monotonic()))
                raise raised()
            return {"x": np.zeros(8, np.float32), "index": np.int32(index)}

        with loader_of(raising, ordering="sequential", samples=180) as loader:
            for number in range(runs):
                number %= 15
                target, (_, kind, message) = targets[number], zoo()[number]
                good, failures, seconds = 0, [], 0.0
                try:
                    for batch, _ in loader.iterate(loader.init_state(KEY, 3 * number), steps=3):
                        good += 1
                        assert batch["index"][-1] < target
                except Exception as error:
                    arrived, text = time.monotonic(), str(error)
                    notes = " ".join(error.__notes__)
                    named = kind.__name__ in [base.__name__ for base in type(error).__mro__]
                    if not named or message not in text or f"sample {target}," not in notes:
                        failures.append(f"{kind.__name__} arrived as {error!r} with {notes}")
                    if zoo()[number][0] is not None:
                        seconds = arrived - when(folder, str(target))
                else:
                    failures.append(f"{kind.__name__} did not arrive")
                if good != target // ROWS - 3 * number or seconds > 5:
                    failures.append(f"{kind.__name__}: {good} good batches before it, {seconds:.2f} s")
                outcome.add(failures, seconds)


def memory():
    text = pathlib.Path("/proc/self/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Anonymous:"))


@trial
def epochs(outcome, runs, chance):
    """Many epochs with the same workers, some of them abandoned: the worst is KiB of memory per epoch.

    The pool keeps as many slots as were ever in use at once, and how many batches a worker still writes when its
    epoch is abandoned is a matter of luck: a slot or two more is not a leak, one more for every abandoned epoch is.
    """
    quick = {"x": np.zeros(8, np.float32), "index": np.int32(0)}
    with loader_of(lambda index: quick, samples=16) as loader:

        def one(number):
            for _ in loader.iterate(loader.init_state(KEY)):
                if number % 5 == 0:
                    break
            outcome.add([])

        for number in range(2 * runs):  # until caches are full
            one(number)
        before, used = chaos.holdings(), memory()
        for number in range(runs):
            one(number)
        leaks = {name: more for name, more in chaos.growth(before).items() if more > 2}
        outcome.worst = max(0.0, (memory() - used) / runs)
    outcome.leaks += bool(leaks)
    outcome.failures += [f"left: {leaks}"] * bool(leaks) + [f"{outcome.worst} KiB per epoch"] * (outcome.worst > 1)


def large(index):
    """So large that JAX uses the shared memory itself."""
    return {"x": np.full(1 << 15, index, np.float32), "index": np.int32(index)}


def large_loader(samples, executor, prefetch=2):
    spec = {**SPEC, "x": jax.ShapeDtypeStruct((1 << 15,), np.float32)}
    stages = [ms.DiskSampleSource(samples, large, sample_spec=spec), ms.BatchTransform(ROWS)]
    return ms.DataLoader(stages, executor=executor, prefetch=prefetch)


def right(batches, samples):
    """Whether these are batches of large samples, all of them."""
    indices = [np.asarray(batch["index"]) for batch in batches]
    same = all((np.asarray(b["x"]) == i[:, None]).all() for b, i in zip(batches, indices, strict=True))
    return same and sorted(np.concatenate(indices).tolist()) == list(range(samples))


@trial
def held(outcome, runs, chance):
    """Every batch is kept, in little shared memory: no deadlock, a warning that names the holder, all values right.

    The batches of the run before are kept too, and are none of that holder's.
    """
    for number in range(runs):
        loader = large_loader(SAMPLES, ms.Processes(2, memory_limit=8 * 530_000), prefetch=number % 3)
        begun = time.monotonic()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kept = [batch for batch, _ in loader.iterate(loader.init_state(KEY))]
        texts = [str(warning.message) for warning in caught]
        failures = [] if right(kept, SAMPLES) else ["wrong values"]
        told = r"(\d+) batches of this stream are held and fill its 4 MB .*held:\n  batch 0: a list of \1 "
        if len(texts) != 1 or not re.match(told, texts[0], re.DOTALL):
            failures.append(f"warned with {texts}")
        outcome.add(failures, time.monotonic() - begun)


@trial
def many_held(outcome, runs, chance):
    """Many batches are kept with few file descriptors; each of them is a run."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))
    before = chaos.holdings()
    loader = large_loader(ROWS * runs, ms.Processes(2))
    kept = [batch for batch, _ in loader.iterate(loader.init_state(KEY))]
    more = chaos.holdings()["fds"] - before["fds"]
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    outcome.runs = outcome.ok = len(kept)
    outcome.failures += [f"{more} more file descriptors"] * (more > 64)
    outcome.failures += ["wrong values"] * (not right(kept, ROWS * runs))


@trial
def warning_as_error(outcome, runs, chance):
    """The warning of a dead worker is an error: it is raised once, and the kept loader gives all its batches."""
    expected = epoch(loader_of(sample, ms.Threads(2)))
    for _ in range(runs):
        with loader_of(sample) as loader:
            raised, found = 0, []
            batches = loader.iterate(loader.init_state(KEY))
            while len(found) < len(expected):
                try:
                    found.append(jax.device_get(next(batches)))
                    if len(found) == 5:
                        chaos.kill(chance.choice(children()))
                except UserWarning as warning:
                    raised += 1
                    assert "Its batch is read again" in str(warning)
        outcome.add(differences(outcome, found, expected) + [f"raised {raised} times"] * (raised != 1))


@trial
def forked(outcome, runs, chance):
    """A stream is used in a fork of its process: refused there, and as good as before here."""
    expected = epoch(loader_of(sample, ms.Threads(2)))
    for _ in range(runs):
        loader = loader_of(sample)
        batches = loader.iterate(loader.init_state(KEY))
        found = [jax.device_get(next(batches))]
        ours, theirs = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of every fork
            child = os.fork()
        if child == 0:
            try:
                next(batches)
            except BaseException as error:
                os.write(theirs, repr(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(theirs)
        with open(ours) as file:
            text = file.read()
        failures = [] if "forked from it" in text and "RuntimeError" in text else [f"in the fork: {text}"]
        found += [jax.device_get(pair) for pair in batches]
        outcome.add(failures + differences(outcome, found, expected))


def main(seed: str, *rows: str) -> None:
    for row in rows:
        name, _, runs = row.partition("=")
        print(f"{name}: seed {seed}", file=sys.stderr, flush=True)
        outcome = chaos.Outcome(name)
        TRIALS[name](outcome, int(runs), random.Random(int(seed)))
        print(json.dumps(dataclasses.asdict(outcome)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
