"""A run in progress: where it is, what has come of it, and what becomes of errors."""

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from soak import oracle
from soak.cases import PROGRAMS, Case
from soak.fault import Disk
from soak.faults import ALWAYS, KINDS
from soak.pipelines import loader_of, words_of
from soak.trouble import Trouble

ERRORS = 12  # that may come of the faults of one run


class Run:
    """A case in progress.

    Args:
        case: The case.
        folder: Of its own.
        files: Where the files of all cases are.
        disk: A disk that can be full.
        log: A file that outlives the process, for entries; None keeps them in memory.

    Attributes:
        entries: What has come, in order.
        errors: What was raised, in words.
        faults: What goes wrong.
        steps: How many batches are to come.
        stream: What they must be.
    """

    def __init__(
        self, case: Case, folder: pathlib.Path, files: pathlib.Path, disk: Disk, log: pathlib.Path | None = None
    ) -> None:
        self.case, self.folder, self.log = case, folder, log
        self.chance = case.chance
        self.words = words_of(case.seed)
        self.stream = oracle.stream_of(case, self.words)
        self.steps = max(2, case.epochs * self.stream.steps_per_epoch // 2)
        if case.way == "scan":
            self.steps = -(-self.steps // self.stream.steps_per_epoch) * self.stream.steps_per_epoch
        self.entries: list[dict[str, Any]] = [] if log is None else read_log(log)
        self.errors: list[str] = []
        self._count = 0
        self._files = folder if "changed file" in case.faults else files
        self.faults = [
            KINDS[name](name, case, folder, disk, self.chance, self.steps)
            for name in case.faults
            if name not in PROGRAMS
        ]

    @property
    def position(self) -> int:
        """The step that comes next."""
        return self.entries[-1].get("after", 0) if self.entries else 0

    def loader(self) -> Any:
        """The loader, built again."""
        at = tuple(pair for fault in self.faults for pair in fault.at)
        trouble = Trouble(str(self.folder), at, max((fault.delay for fault in self.faults), default=0.0))
        timeout = max((fault.timeout for fault in self.faults), default=0.0)
        return loader_of(self.case, self._files, trouble, self.folder / "cache", timeout if timeout > 0 else None)

    def begin(self, loader: Any) -> Any:
        """The state to resume from, made of a few bytes; of plain values, for a stream, which has more to remember."""
        key = jax.random.key(self.case.seed)
        if not self.case.buffered:
            return loader.init_state(key, self.position)
        state = loader.init_state(key)
        if not self.entries:
            return state
        leaves, structure = jax.tree.flatten(state)
        saved = zip(leaves, self.entries[-1]["state"], strict=True)
        return jax.tree.unflatten(structure, [np.asarray(values, leaf.dtype) for leaf, values in saved])

    def take(self, after: int, batch: Any, mask: Any, state: Any = None) -> None:
        """A batch has come; from here on it counts as used."""
        leaves, mask = {name: np.asarray(leaf) for name, leaf in batch.items()}, np.asarray(mask)
        samples = leaves["index"][mask].tolist()
        entry = {"after": after, "digest": oracle.digest(leaves, mask), "samples": samples}
        if self.case.buffered:
            entry["state"] = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(state)]
        self.note(entry)
        self.came_by()

    def note(self, entry: dict[str, Any]) -> None:
        """Write down what has come, all or nothing."""
        if self.log is not None:
            with self.log.open("ab", buffering=0) as file:
                file.write(json.dumps(entry).encode() + b"\n")
        self.entries.append(entry)

    def came_by(self) -> None:
        """A batch more has been used: faults may strike."""
        self._count += 1
        for fault in self.faults:
            fault.batch(self._count)

    def show(self, loader: Any) -> None:
        """Let faults have the loader."""
        for fault in self.faults:
            fault.loader = loader

    def settle(self) -> None:
        """Wait for faults that are still to strike."""
        for fault in self.faults:
            fault.settle()

    def meet(self, error: BaseException) -> bool:
        """Continue after an error that has come of a fault; whether the loader has to be built again."""
        self.errors.append(f"{type(error).__name__}: {str(error)[:200]}")
        for fault in self.faults:
            if fault.expects(error) and len(self.errors) <= ERRORS:
                fault.told(error)
                if fault.name in ALWAYS:  # it will never come, so whoever continues steps over it
                    self.note({"after": self.position + 1, "told": fault.target})
                return fault.rebuilds
        raise error

    @contextlib.contextmanager
    def faulty(self) -> Iterator[None]:
        """A block in which faults strike."""
        with contextlib.ExitStack() as stack:
            for fault in self.faults:
                stack.enter_context(fault)
            yield


def read_log(path: pathlib.Path) -> list[dict[str, Any]]:
    """The entries of a run whose process has ended, however it did."""
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    return [json.loads(line) for line in lines[:-1]]
