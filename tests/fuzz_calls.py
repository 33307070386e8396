"""Wrong arguments for every public callable: each is taken, or refused in words that name the call and the argument.

`python tests/fuzz_calls.py 6000` makes six thousand calls. Every one is made of its number, which a finding names:
`python tests/fuzz_calls.py --case NUMBER` makes it again.
"""

import argparse
import atexit
import collections
import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import io
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import fuzz_table
import jax
import numpy as np
import pipelines

import millstream as ms
from millstream.checkpoints import CheckpointStore
from millstream.files import remote_options
from millstream.states import _strategy_names as strategies

SECONDS = 30.0  # that a call may take
RAISED = "as the user's function raised it"
ADDRESSES = ("path", "paths", "shards", "root")  # that may have a password in them
# What makes a thing of a name of its own may be named as that.
ALIASES = {
    "Period.reached": "at",
    "Period.count": "at",
    "Period.since": "at",
    "Period": "at",
    "cloud.CloudOptions": "cloud.configure",
    "datasets.MNISTDiskSource": "MNISTDataset.make_disk_source",
    "sharding.make_ddp_mesh_config": "MeshConfig.make_ddp_mesh_config",
    "sharding.make_fsdp_mesh_config": "MeshConfig.make_fsdp_mesh_config",
}
REFUSALS = (TypeError, ValueError, OSError, KeyError, ImportError)


class Unusable:
    """Something that has no repr, no length and no truth."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


# What arguments are replaced by; functions make new ones every time.
WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "-1": lambda: -1,
    "0": lambda: 0,
    "3": lambda: 3,
    "2**40": lambda: 2**40,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1j": lambda: 1j,
    "''": lambda: "",
    "'x'": lambda: "x",
    "'\\0'": lambda: "\0",
    "b''": lambda: b"",
    "[]": lambda: [],
    "[None]": lambda: [None],
    "{}": lambda: {},
    "{'x': object()}": lambda: {"x": object()},
    "{3: 'x'}": lambda: {3: "x"},
    "set()": set,
    "(1, 'a')": lambda: (1, "a"),
    "object()": object,
    "Unusable()": Unusable,
    "lambda: 0": lambda: lambda: 0,
    "raising": lambda: _raise,
    "int": lambda: int,
    "Ellipsis": lambda: ...,
    "range(3)": lambda: range(3),
    "generator": lambda: (number for number in range(3)),
    "np.zeros((2, 3))": lambda: np.zeros((2, 3)),
    "np.zeros(0)": lambda: np.zeros(0, np.int32),
    "np.array(['a'])": lambda: np.array(["a"]),
    "np.float32(1.5)": lambda: np.float32(1.5),
    "jnp scalar": lambda: jax.numpy.int32(1),
    "key": lambda: jax.random.key(0),
    "keys": lambda: jax.random.split(jax.random.key(0), 3),
    "old key": lambda: jax.random.PRNGKey(0),
    "Path('none')": lambda: pathlib.Path("none"),
    "folder": lambda: pathlib.Path("."),
    "'s3://'": lambda: "s3://",
    "'s3://?SECRET'": lambda: "s3://?SECRET",
    "'gs://:x@'": lambda: "gs://:x@",
    "'ftp://'": lambda: "ftp://",
    "'http://'": lambda: "http://",
    "datetime": lambda: datetime.datetime(2026, 1, 1),
    "timedelta": lambda: datetime.timedelta(seconds=1),
    "long list": lambda: list(range(1000)),  # of more leaves JAX would compile programs for minutes
}


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise LookupError(RAISED)


class Hung(BaseException):
    """A call took longer than it may."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, and what is wrong with it.

    Attributes:
        number: What it was made of.
        name: Of the callable.
        wrong: The names of wrong values, by argument.
    """

    number: int
    name: str
    wrong: dict[str, str]

    def __str__(self) -> str:
        return f"{self.number}: {self.name}({', '.join(f'{name}={value}' for name, value in self.wrong.items())})"


@functools.cache
def table() -> dict[str, fuzz_table.Call]:
    """All callables by name. Their files last as long as this process."""
    return fuzz_table.calls(pathlib.Path(_files.enter_context(tempfile.TemporaryDirectory(prefix="millstream-fuzz-"))))


_files = contextlib.ExitStack()
atexit.register(_files.close)


def name_of(number: int) -> str:
    """The callable of a case, without what it takes to make its arguments."""
    return random.Random(number).choice(sorted(table()))


def case_of(number: int) -> Case:
    """The case that a number stands for."""
    chance = random.Random(number)
    name = chance.choice(sorted(table()))
    names = list(dict.fromkeys([*table()[name].parameters, *table()[name].good, "surprise"]))
    count = min(len(names), 1 if chance.random() < 0.8 else chance.randint(2, 3))
    return Case(number, name, {argument: chance.choice(list(WRONG)) for argument in chance.sample(names, count)})


def run(case: Case) -> str:
    """What is wrong with how a call was answered; empty if nothing is."""
    call = table()[case.name]
    wrong = {name: WRONG[value]() for name, value in case.wrong.items()}
    positional = [value for name, value in wrong.items() if name.startswith("*")]
    named = call.good | {name: value for name, value in wrong.items() if not name.startswith("*")}
    try:
        with _bounded():
            function = call.bound()
            try:
                _use(function(*positional, **named))
            finally:
                if isinstance(owner := getattr(function, "__self__", None), ms.loader.BatchIterator | CheckpointStore):
                    owner.close()
    except Hung as error:
        return f"it takes longer than {SECONDS:g} s\n{_place(error)}"
    except Exception as error:
        return _judged(case, wrong, error)
    return ""


def _judged(case: Case, wrong: dict[str, Any], error: Exception) -> str:
    """What is wrong with an error; empty if nothing is."""
    said = error.args[0] if isinstance(error, KeyError) and error.args else error  # which shows itself as a repr
    text = "\n".join([str(said), *getattr(error, "__notes__", [])])
    if isinstance(error, ms.errors.DownloadError):
        right = {name for name, value in case.wrong.items() if value in ("None", "True", "3", "2**40")}
        return "" if set(wrong) <= right | {"cache_dir", "data_dir"} else f"it looks at {wrong} after a download"
    if RAISED in text or re.search(
        r"got an unexpected keyword argument|missing \d+ required positional|needs mlflow|Raised in step at step", text
    ):
        return ""
    functions = [value for value in wrong.values() if hasattr(value, "__qualname__")]
    if any(text.startswith(f"{function.__qualname__}() ") for function in functions):
        return ""  # Python itself says that a function of the user's takes other arguments
    notes = "\n".join(getattr(error, "__notes__", []))
    if notes and _names_call(case.name, notes) and (_names_argument(wrong, text) or "Raised in" in notes):
        return ""  # code of the user's, or of a package, was called: its error keeps its type
    own = wrong.get("name")  # which a loop has in errors in place of its function's name
    named = _names_call(case.name, text) or (isinstance(own, str) and own != "" and text.startswith(own))
    if not isinstance(error, REFUSALS) or not named or not _names_argument(wrong, text):
        return f"{type(error).__name__}: {text[:400]}\n{_place(error)}"
    asked = not isinstance(error, TypeError) and any("SECRET" in case.wrong.get(name, "") for name in ADDRESSES)
    shown = asked and "SECRET" in text
    return "SECRET is shown" if shown else ""


def _place(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "millstream" in frame.filename]
    return "\n".join(f"    {frame.filename}:{frame.lineno} {frame.line}" for frame in frames[-3:])


def _names_call(name: str, text: str) -> bool:
    """Whether a text names a callable as its user wrote it, or its class; "at" with what follows a name."""
    if name == "DataLoader" and text.startswith("A pipeline starts with a source"):
        return True
    *owners, plain = ALIASES.get(name, name).split(".")
    if any(owner in text for owner in owners if owner[0].isupper()):
        return True
    if re.fullmatch("[a-z]+", plain):
        verbs = (
            "needs|got|has|calls|cannot|can|takes|finds|found|knows|reads|writes|decorates|does|with|over|resumes|was|"
            "monitors"
        )
        return re.search(rf"(?<!\w){plain}(\(|:| ({verbs})\b)| at step \d+ of {plain}\.", text) is not None
    return plain in text


def _names_argument(wrong: dict[str, Any], text: str) -> bool:
    """Whether a text names one of the wrong arguments, or shows its value or type."""
    for name, value in wrong.items():
        words = {name.lstrip("*"), name.lstrip("*").rstrip("s"), type(value).__name__, getattr(value, "__name__", "")}
        with contextlib.suppress(RuntimeError):
            words |= {repr(value)[:60], str(value)[:60]}
        if isinstance(value, str) and "://" in value:
            words.add(value.partition("://")[0] + "://")  # the rest may be secret
        if isinstance(value, np.ndarray | jax.Array):
            words |= {f"shape {value.shape}", f"shape={value.shape}", "a does not exist"}
            words |= {"empty"} if value.size == 0 else set()
            words |= {repr(item) for item in value.ravel()[:1]} if isinstance(value, np.ndarray) else set()
        if isinstance(value, list | tuple | range):
            words |= {f"shape ({len(value)},)", *(f"{item!r} ({type(item).__name__})" for item in value[:1])}
        if isinstance(value, dict):
            words |= {repr(item) for pair in value.items() for item in pair} | {str(item) for item in value.values()}
        is_plain = isinstance(value, str | bytes | list | dict | set)
        if value is None or (is_plain and value in ("", b"", [], [None], {}, set())):
            words |= {"empty", "at least one", "Got none"}
        if any(word and word in text for word in words):
            return True
    return False


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """In an empty folder, without a network, for a limited time, with nothing shown and nothing left."""

    def ring(*_: Any) -> None:
        raise Hung

    def unreachable(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("there is no network here")

    here, folder = os.getcwd(), tempfile.mkdtemp(prefix="millstream-fuzz-")
    asked, before = socket.getaddrinfo, signal.signal(signal.SIGALRM, ring)
    cache = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = folder
    registered = dict(strategies._strategies)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            os.chdir(folder)
            socket.getaddrinfo = unreachable
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
                socket.getaddrinfo = asked
                os.chdir(here)
                os.environ.pop("XDG_CACHE_HOME")
                if cache is not None:
                    os.environ["XDG_CACHE_HOME"] = cache
                remote_options._configured.clear()
                strategies._strategies.clear()
                strategies._strategies.update(registered)
                shutil.rmtree(folder, ignore_errors=True)


def _use(thing: Any) -> None:
    """Use what was made as far as it takes to find what is wrong with it."""
    if isinstance(thing, ms.loops.Schedule):
        thing(ms.loops.Elapsed(steps=3, samples=12, epochs=1, samples_before=8, epochs_before=0))
    elif isinstance(thing, ms.Callback | ms.Observer):
        tasks = {ms.on_train_step: fuzz_table.step}
        ms.train_loop(0, [np.ones(2)] * 2, {**tasks, ms.every(1): thing}, epoch_duration=2, stop=2)
    elif isinstance(thing, ms.Threads | ms.Processes):
        ms.DataLoader([ms.HostArraySource(pipelines.data()), pipelines.BATCH], executor=thing)
    elif isinstance(thing, ms.Shuffle):
        ms.ArraySampleSource(pipelines.data(), ordering=thing)
    elif isinstance(thing, ms.BatchCache):
        ms.DataLoader([pipelines.source(), pipelines.BATCH], cache=thing)
    elif isinstance(thing, ms.Transform) or type(thing).__name__.endswith("Transform"):
        before = (
            []
            if isinstance(
                thing, ms.BatchTransform | ms.HostMapTransform | ms.PadTransform | ms.transforms.InfoTransform
            )
            else [pipelines.BATCH]
        )
        ms.DataLoader([pipelines.source(), *before, thing])
    elif hasattr(thing, "read") and hasattr(thing, "spec"):
        loader = ms.DataLoader([thing, pipelines.BATCH])
        if thing.arrays is None:
            loader.next_batch(loader.init_state(jax.random.key(0)))
    elif isinstance(thing, Iterator):
        next(thing, None)
        getattr(thing, "close", int)()


def findings(numbers: Iterable[int]) -> list[str]:
    """What is wrong with the answers to some cases."""
    found = []
    for number in numbers:
        case = case_of(number)
        if text := run(case):
            found.append(f"{case}\n  {text}")
    return found


def in_lanes(numbers: Sequence[int], lanes: int = 2, chunk: int = 1000) -> list[str]:
    """The same, in processes of their own, so that a crash is a finding, too."""
    waiting = [numbers[start : start + chunk] for start in range(0, len(numbers), chunk)]
    running: list[tuple[subprocess.Popen[str], Sequence[int]]] = []
    found = []
    while waiting or running:
        while waiting and len(running) < lanes:
            running.append((_lane(waiting[0]), waiting.pop(0)))
        process, part = running.pop(0)
        output, errors = process.communicate()
        rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        texts = [row["text"] for row in rows if "text" in row]
        found += filter(None, texts)
        if len(texts) == len(part) and process.returncode:
            found.append(f"after case {part[-1]} the process ended with {process.returncode}: {errors[-2000:]}")
        if len(texts) < len(part):
            broken = part[len(texts)]
            found.append(f"{case_of(broken)}\n  the process ended with {process.returncode}: {errors[-2000:]}")
            waiting[:0] = [part[len(texts) + 1 :]] if part[len(texts) + 1 :] else []
    return found


def _lane(numbers: Sequence[int]) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "--lane", *map(str, numbers)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=6000, help="how many calls")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--lanes", type=int, default=2, help="how many processes")
    parser.add_argument("--case", type=int, nargs="+", help="make these calls again, and no others")
    parser.add_argument("--lane", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.lane is not None:
        for number in options.lane:
            faulthandler.dump_traceback_later(10 * SECONDS, exit=True)  # also if the lane cannot end
            print(json.dumps({"text": "".join(findings([number]))}), flush=True)
        return
    if options.case is not None:
        found = findings(options.case)
        print(*map(case_of, options.case), sep="\n")
    else:
        found = in_lanes(range(options.first, options.first + options.count), options.lanes)
    print(*found, sep="\n")
    count = len(options.case or range(options.count))
    print(f"{count} calls of {len(table())} callables, {len(found)} answered badly")
    for name, number in collections.Counter(text.split()[1].partition("(")[0] for text in found).most_common(20):
        print(f"{number:5} {name}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
