"""What readers call in the soak: samples that carry their index, and what goes wrong at some. It loads no JAX."""

import dataclasses
import os
import pathlib
import random
import signal
import threading
import time
from typing import Any

import numpy as np

import millstream as ms

WIDTH = 3
PATIENCE = 60.0  # seconds that a hanging sample hangs at most, if nobody lets it go


class BadSample(OSError):
    """What a sample raises."""


def sample(index: int) -> dict[str, Any]:
    """A sample, which is a function of its index; all kinds of sources hold these."""
    return {"index": np.int32(index), "x": np.random.default_rng(index).random(WIDTH, np.float32)}


def packed(index: int) -> np.ndarray:
    """A sample as an image whose pixels are its bytes."""
    value = sample(index)
    data = value["index"].tobytes() + value["x"].tobytes()
    return np.frombuffer(data.ljust(4 * 4 * 3, b"\0"), np.uint8).reshape(4, 4, 3)


def from_picture(value: Any) -> Any:
    """The sample in an image."""
    data = value["image"].tobytes()
    return {"index": np.frombuffer(data, np.int32, 1)[0], "x": np.frombuffer(data, np.float32, WIDTH, 4)}


def from_columns(value: Any) -> Any:
    """The sample in a row of numbers."""
    return {"index": value["index"], "x": np.stack([value[f"x{column}"] for column in range(WIDTH)])}


def from_files(value: Any) -> Any:
    """The sample in the files of a tar file."""
    return {"index": value["index"], "x": value["x.npy"]}


def doubled(value: Any) -> Any:
    """A host map that rounds nothing."""
    return {**value, "x": value["x"] * np.float32(2)}


def shaken(value: Any, rng: Any) -> Any:
    """A random host map; the numbers of its generator are the test."""
    return {**value, "x": value["x"] if rng is None else value["x"] + rng.random(WIDTH, np.float32)}


def fill(index: int, arrays: Any, rng: Any) -> None:
    """A sample that is written in place."""
    for name, leaf in sample(index).items():
        arrays[name][...] = leaf


class Items:
    """A dataset whose items are asked for together."""

    def __init__(self, first: int, count: int) -> None:
        self._indices = range(first, first + count)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> Any:
        return sample(self._indices[number])

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self[number] for number in numbers]


@dataclasses.dataclass(frozen=True)
class Reader:
    """A function from an index to a sample."""

    first: int

    def __call__(self, index: int) -> Any:
        return sample(self.first + index)


@dataclasses.dataclass(frozen=True)
class Trouble:
    """A host map that changes nothing; at some samples it does what goes wrong.

    Args:
        folder: Where processes tell each other what has happened.
        at: The samples, and what happens there: a word, with " once" after it if it is to happen once.
        delay: Seconds that a sample takes at most.
    """

    folder: str
    at: tuple[tuple[int, str], ...] = ()
    delay: float = 0.0

    def __call__(self, value: Any) -> Any:
        index = int(value["index"])
        if self.delay:
            chance = random.Random(index)
            time.sleep(chance.choice([0.0, 0.0, 0.0, self.delay]) * chance.random())
        for target, what in self.at:
            if target == index:
                self._happen(what, index)
        return value

    def _happen(self, what: str, index: int) -> None:
        what, _, once = what.partition(" ")
        # Only workers die, and only readers hang: the main process, too, reads a few samples, to know what they are.
        reads = ms.reading.is_worker() or threading.current_thread() is not threading.main_thread()
        if not (what == "raise" or (reads if what == "hang" else ms.reading.is_worker())):
            return
        if once and not mark(self.folder, f"{what}-{index}"):
            return
        if what == "raise":
            raise BadSample(f"sample {index} is bad")
        if what == "hang":
            begun, released = time.monotonic(), pathlib.Path(self.folder, "released")
            while not released.exists() and time.monotonic() - begun < PATIENCE:
                time.sleep(0.05)
        else:
            os.kill(os.getpid(), getattr(signal, what))


def mark(folder: str, name: str) -> bool:
    """Write down that something happens; False if it has happened before."""
    try:
        os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True
