"""Random cases for the soak: a pipeline, who reads it, how it is used up and what goes wrong, all from one number."""

import dataclasses
import random
from collections.abc import Collection

from millstream.plan.ordering import Shuffle

HOST = ("readers", "threads", "processes")
EXECUTORS = ("in graph", *HOST)
DRAWN = ("iterate", "block", "kept", "broken", "next_batch")
WAYS = (*DRAWN, "jit", "scan", "train", "fused")
LEFT_OUT = ("iterate", "block", "kept", "broken", "train")  # ways in which "skip batch" leaves a batch out
FILES = ("sqlite", "parquet", "arrow", "tar", "images")
SOURCES = ("arrays", "function", "fill", "items", "npy", "csv", *FILES)
GROUP = 8  # samples of the row groups and record batches of files
PROGRAMS = ("killed program", "terminated program", "interrupted program")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of fault, and the cases in which it can happen.

    Attributes:
        executors: Who reads.
        ways: How the stream is used up.
        sources: What is read.
        cached: Whether batches are kept on disk: always (True), never (False), or either (None).
        light: Whether it can happen besides others.
    """

    executors: Collection[str] = HOST
    ways: Collection[str] = WAYS
    sources: Collection[str] = SOURCES
    cached: bool | None = None
    light: bool = False


FAULTS = {
    "nothing": Kind(EXECUTORS),
    "killed worker": Kind(("processes",), light=True),
    "stopped worker": Kind(("processes",), (*DRAWN, "scan", "train"), cached=False),
    "hanging sample": Kind(HOST, (*DRAWN, "scan", "train")),
    "sample that raises once": Kind(HOST, (*DRAWN, "scan", "train", "fused"), light=True),
    "sample that always raises": Kind(HOST),
    "deadly sample": Kind(("processes",)),
    "slow disk": Kind(HOST, light=True),
    "full disk, cache": Kind(HOST, DRAWN, cached=True),
    "full disk, checkpoint": Kind(EXECUTORS, ("train", "fused")),
    "full shared memory": Kind(("processes",), (*DRAWN, "scan", "train"), cached=False),
    "changed file": Kind(HOST, DRAWN, FILES, cached=False),
    "closed by another thread": Kind(HOST, ("kept",), cached=False),
    "step that raises": Kind(EXECUTORS, (*DRAWN, "train"), light=True),
    "few descriptors": Kind(HOST, (*DRAWN, "train")),
    "interrupt": Kind(EXECUTORS, ("iterate", "block", "kept", "broken", "train")),
    "damaged cache": Kind(HOST, DRAWN, cached=True),
    "damaged checkpoint": Kind(EXECUTORS, ("train", "fused")),
    "killed program": Kind(EXECUTORS, ("iterate", "block", "next_batch", "train", "fused")),
    "terminated program": Kind(EXECUTORS, ("iterate", "next_batch", "train", "fused")),
    "interrupted program": Kind(EXECUTORS, ("iterate", "block", "next_batch", "train", "fused")),
}

# Each kind of fault comes once before chance decides, with all executors in turn.
FIRST = [
    (fault, list(kind.executors)[place % len(kind.executors)]) for place, (fault, kind) in enumerate(FAULTS.items())
]


@dataclasses.dataclass(frozen=True)
class Part:
    """One pipeline.

    Attributes:
        source: The kind of its source.
        first: The index of its first sample, as the sample has it.
        samples: How many samples it has.
        ordering: Their order.
        host_map: "doubled", "shaken" or none: a function on samples as they are read.
        device_map: "before", "random" or "after" the batch, or none: a compiled function.
        batches: Sizes and endings, innermost first.
    """

    source: str
    first: int
    samples: int
    ordering: Shuffle
    host_map: str | None
    device_map: str | None
    batches: tuple[tuple[int, str], ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """All that is random about a run.

    Attributes:
        number: What it was made from.
        parts: Its pipelines; several are mixed.
        interleaved: Whether several come in turn, or one after the other.
        buffered: Whether samples go through a replay buffer.
        executor: Who reads.
        workers: How many.
        ordered: Whether batches come in order.
        prefetch: How many batches are read ahead.
        on_error: What becomes of a sample that raises.
        cached: Whether batches are kept on disk.
        way: How it is used up.
        epochs: How long, in halves of an epoch.
        faults: What goes wrong.
        seed: Of the run's key.
    """

    number: int
    parts: tuple[Part, ...]
    interleaved: bool
    buffered: bool
    executor: str
    workers: int
    ordered: bool
    prefetch: int
    on_error: str
    cached: bool
    way: str
    epochs: int
    faults: tuple[str, ...]
    seed: int

    @property
    def is_program(self) -> bool:
        """Whether a whole program is ended from outside."""
        return any(fault in PROGRAMS for fault in self.faults)

    @property
    def chance(self) -> random.Random:
        """Of moments and targets."""
        return random.Random(self.number + 1)


def case_of(number: int) -> Case:
    """The case of a number. If its last three digits are small, they say which fault comes first."""
    chance = random.Random(number)
    place = number % 1000
    if place < len(FIRST):
        fault, executor = FIRST[place]
    else:
        fault = chance.choice(list(FAULTS))
        executor = chance.choice(list(FAULTS[fault].executors))
    return _drawn(number, chance, fault, executor)


def _drawn(number: int, chance: random.Random, fault: str, executor: str) -> Case:
    kind = FAULTS[fault]
    way = chance.choice(list(kind.ways))
    cached = kind.cached if kind.cached is not None else executor != "in graph" and chance.random() < 0.2
    faults = (fault, *_more(chance, fault, executor, way))
    on_error = "raise" if executor == "in graph" else _policy(chance, fault, way)
    alone = kind.sources is not SOURCES or cached or way in ("next_batch", "jit", "scan", "fused", "kept")
    count = 1 if alone or chance.random() < 0.8 else 2
    buffered = executor == "in graph" and count == 1 and way in (*DRAWN, "train") and chance.random() < 0.5
    peaceful = set(faults) <= {"nothing", "killed worker", "slow disk"} and way in ("iterate", "block") and not cached
    sources = kind.sources if executor != "in graph" else ("arrays",)
    return Case(
        number,
        tuple(_part(chance, 100 * place, list(sources), executor, buffered) for place in range(count)),
        chance.random() < 0.5,
        buffered,
        executor,
        chance.randint(1, 3),
        not (peaceful and count == 1 and executor in ("threads", "processes") and chance.random() < 0.7),
        chance.randint(0, 3),
        on_error,
        cached,
        way,
        chance.randint(2, 5),
        faults,
        chance.randrange(2**31),
    )


def _more(chance: random.Random, fault: str, executor: str, way: str) -> list[str]:
    """Faults that happen besides."""
    if fault == "nothing":
        return []
    fitting = [
        other
        for other, kind in FAULTS.items()
        if kind.light and other != fault and executor in kind.executors and way in kind.ways
    ]
    if fault in PROGRAMS:  # other processes that are ended would be mistaken for its own
        fitting = [other for other in fitting if other not in ("killed worker", "step that raises")]
    return chance.sample(fitting, min(len(fitting), chance.choice([0, 0, 1, 1, 2])))


def _policy(chance: random.Random, fault: str, way: str) -> str:
    tolerant = chance.choice(["skip item", "skip batch"])
    if fault in ("changed file", "few descriptors", "full disk, cache"):  # which would make every sample a bad one
        return "raise"
    if fault in ("sample that always raises", "deadly sample"):
        # Whoever steps from Python can step over the batch; a program and a training run need the others.
        return tolerant if way not in DRAWN else chance.choice(["raise", "raise", tolerant])
    return chance.choice(["raise", "raise", "raise", tolerant])


def _in_blocks(chance: random.Random) -> Shuffle | None:
    """A block shuffle, for one case of four; by a chance of its own, so that all else of a number stays what it is."""
    lanes, window = chance.choice([1, 2]), chance.choice([3, 8, 30])
    return Shuffle("blocks", block_size=GROUP, lanes=lanes, window=window) if chance.random() < 0.25 else None


def _part(chance: random.Random, first: int, sources: list[str], executor: str, buffered: bool) -> Part:
    ordering = Shuffle(chance.choice(["itemwise", "itemwise", "reseed", "repeat", "batchwise"]), chance.random() < 0.8)
    endings = ["pad", "drop"] if ordering.recurs else ["pad", "drop", "wrap"]
    batches = [(chance.choice([4, 6]), chance.choice(endings))]
    if chance.random() < 0.2 and not buffered:
        batches.append((2, chance.choice(endings)))
    compiled = ["before", "random", "after"]
    ordering = _in_blocks(random.Random(hash(chance.getstate()[1]))) or ordering
    return Part(
        chance.choice(sources),
        first,
        chance.choice([23, 48]),
        ordering,
        None if executor == "in graph" else chance.choice([None, "doubled", "shaken"]),
        None if buffered else chance.choice([None, *compiled]),
        tuple(batches),
    )
