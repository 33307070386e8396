"""Runs that are killed or told to leave at random moments, and taken up again until they are done.

`python -m soak.resume_trials NAME COUNT SEED`, in `tests`, prints an outcome as a line of JSON. Processes are forks of
this one, which has loaded JAX and started nothing of it.
"""

import dataclasses
import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback

import jax
import prepare_script
import resume_script as script
from jax._src import xla_bridge

import millstream as ms
from millstream.checkpoints import CheckpointStore
from millstream.files.lock import locked
from soak import chaos, checkpoint_damage

TESTS = pathlib.Path(__file__).parent.parent
PATIENCE = 300.0
KILLS = 6  # of one run; then it is let come to its end
TRIALS = {}


def trial(function):
    """List a function as trials of what it is named after."""
    TRIALS[function.__name__] = function
    return function


class Child:
    """A fork of this process that runs, or continues with, the run in a folder.

    Args:
        folder: Of the run.
        place: Where in it to send a signal, and when.
        options: Of `script.run`.
    """

    def __init__(self, folder, place=None, **options):
        assert not xla_bridge.backends_are_initialized()
        self._folder = pathlib.Path(folder)
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._run(place, options))

    def _run(self, place, options):
        if place is not None:
            script.faults.set(*place)
            script.faults.watch_files()
        try:
            script.run(self._folder, **options)
        except ms.errors.Preempted as leaving:
            return int(str(leaving.code))
        except BaseException as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            (self._folder / "error").write_text(traceback.format_exc())
            (self._folder / "reached").write_text(str(getattr(error, "loop_output", [None] * 3)[2].steps))
            return 1
        return 0

    def end(self):
        """Wait for its end: its exit code, minus the number of a signal."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        chaos.kill(self.pid)
        os.waitpid(self.pid, 0)
        return "hung"


def result(folder, code):
    """What a run came to, or what went wrong with it in words."""
    if code == 0:
        return json.loads((folder / "result.json").read_text()), []
    error = folder / "error"
    return None, [f"ended with {code}: {error.read_text() if error.exists() else ''}"]


def prepared(folder):
    """What an undisturbed run comes to; programs are compiled on the way. Trials that share a folder do it once."""
    script.use_cache(os.environ.get("JAX_COMPILATION_CACHE_DIR", folder / "cache"))
    told = folder / "expected.json"
    with locked(folder / "prepared", 4 * PATIENCE):
        _prepare(folder, told)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)  # who is killed must not be writing an entry
    return json.loads(told.read_text())


def _prepare(folder, told):
    if not told.exists():
        whole, parted = folder / "whole", folder / "parted"
        expected, wrong = result(whole, Child(whole).end())
        assert not wrong, wrong
        assert Child(parted, ("evaluation", 2, signal.SIGTERM)).end() == 143
        found, wrong = result(parted, Child(parted).end())
        wrong = wrong or script.differences(found, expected)
        assert not wrong, wrong
        told.write_text(json.dumps(expected))


def some_place(chance):
    """A place in a run and at what pass of it, or None: a time."""
    places = {"compile": 1, "step": 8, "evaluation": 6, "epoch begin": 2, "epoch end": 2, "save": 60, "shutdown": 1}
    place = chance.choice([None, *places])
    return None if place is None else (place, chance.randint(1, places[place]))


@trial
def killed_run(outcome, runs, chance, folder, name):
    """Kill -9 at random places and times of a run, again and again, until it is let come to its end."""
    expected, number = prepared(folder), 0
    while outcome.runs < runs:
        number, kills, places, code = number + 1, 0, [], None
        run = folder / f"{name}-{number}"
        while kills < min(KILLS, runs - outcome.runs):
            place = some_place(chance)
            child = Child(run, None if place is None else (*place, signal.SIGKILL), every=chance.choice([3, 6]))
            if place is None:
                time.sleep(chance.uniform(0.05, 1.0))
                chaos.kill(child.pid)
            places.append(place)
            code = child.end()
            if code != -signal.SIGKILL:
                break
            kills += 1
        if code == -signal.SIGKILL:
            code = Child(run, every=6).end()
        found, wrong = result(run, code)
        wrong = wrong or script.differences(found, expected)
        wrong += [
            f"left over: {name}" for name in os.listdir(run / "run") if name.startswith((".tmp", ".old", ".trash"))
        ]
        for _ in range(max(kills, 1)):
            outcome.add([f"{places}: {what}" for what in wrong])


@trial
def terminated_run(outcome, runs, chance, folder, name):
    """SIGTERM in each phase of a run: it saves, leaves with 143, and resumes as if nothing had been."""
    expected = prepared(folder)
    phases = {"compile": 1, "data": 40, "step": 15, "evaluation": 8, "epoch begin": 3, "epoch end": 3, "save": 60}
    phases |= {"first step": 1, "shutdown": 1}
    for number in range(runs):
        place, latest = list(phases.items())[number % len(phases)]
        place, run = (place, chance.randint(1, latest), signal.SIGTERM), folder / f"{name}-{number}"
        options = {"on_disk": True, "executor": "threads"} if place[0] == "data" else {}
        begun = time.monotonic()
        code = Child(run, place, **options).end()
        seconds = time.monotonic() - begun
        wrong = [] if code == 143 else [f"left with {code}"]
        saved = sorted(path.name for path in (run / "run").glob("0*"))
        found, failed = result(run, Child(run, **options).end())
        wrong += failed or script.differences(found, expected)
        outcome.add([f"{place}, saved {saved}: {what}" for what in wrong], seconds)


def fill_disk():
    """Let no file become longer than is enough for a log, but not for a checkpoint, once the last one is saved."""
    time.sleep(1.0)
    script.faults.slow = 1.0  # a save takes less than a step from here on
    resource.setrlimit(resource.RLIMIT_FSIZE, (1600, resource.RLIM_INFINITY))


@trial
def full_disk_run(outcome, runs, chance, folder, name):
    """A disk that is full from a random step on, as a limit to the size of files: told, and nothing there is lost."""
    expected = prepared(folder)
    for number in range(runs):
        run, at, every = folder / f"{name}-{number}", chance.randint(4, 11), chance.choice([1, 2, 3])
        code = Child(run, ("step", at, None, fill_disk), every=every).end()
        wrong = [] if code == 1 else [f"ended with {code}"]
        due = -(-at // every) * every  # this save fails, and that is told after the step after it at the latest
        text = (run / "error").read_text()
        told = f"while the checkpoint of step {due} was saved" in text and "File too large" in text
        wrong += [] if told else [f"full from step {at}, saving each {every}, it said: {text}"]
        wrong += [] if int((run / "reached").read_text()) <= due + 1 else ["told late"]
        with CheckpointStore(run / "run", read_only=True) as store:
            wrong += [] if store.steps() == list(range(every, due, every))[-3:] else [f"{store.steps()} are left"]
        wrong += [f"left over: {left}" for left in os.listdir(run / "run") if left.startswith(".")]
        found, failed = result(run, Child(run).end())
        outcome.add(wrong + (failed or script.differences(found, expected)))


@trial
def damaged_checkpoint(outcome, runs, chance, folder, name):
    """Checkpoints that are damaged or forged: the one before is used, or an error names them."""
    counts, failures = checkpoint_damage.trials(runs, chance.randrange(1 << 30))
    outcome.failures += failures
    outcome.runs, outcome.ok = sum(counts.values()), sum(counts.values()) - len(failures)


@trial
def killed_preparation(outcome, runs, chance, folder, name):
    """Kill -9 one preparation of shards again and again: its files are those of an undisturbed one."""
    wrong = []
    try:
        prepare_script.kill(folder / name, runs, chance.randrange(1 << 30))
    except AssertionError:
        wrong = [traceback.format_exc()]
    for _ in range(runs):
        outcome.add(wrong)


def outcome_of(name, runs, seed, folder=None, **variables):
    """The outcome of some trials, in a process of their own.

    Args:
        name: What is done.
        runs: How often.
        seed: Of all chance.
        folder: One that several trials share; None: one that is deleted afterwards.
        variables: Of its environment, besides those of this process.
    """
    print(f"{name}: seed {seed}")
    command = [
        sys.executable,
        "-m",
        "soak.resume_trials",
        name,
        str(runs),
        str(seed),
        *([] if folder is None else [folder]),
    ]
    environment = os.environ | variables | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True)
    if run.returncode:
        return chaos.Outcome(name, runs, failures=[run.stderr[-8000:]])
    return chaos.Outcome(**json.loads(run.stdout.splitlines()[-1]))


def main(name, runs, seed, folder=None):
    outcome = chaos.Outcome(name)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as temporary:
        base = pathlib.Path(temporary if folder is None else folder)
        TRIALS[name](outcome, int(runs), random.Random(int(seed)), base, f"{name}-{seed}")
    print(json.dumps(dataclasses.asdict(outcome)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
