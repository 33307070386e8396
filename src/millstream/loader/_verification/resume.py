"""Going on from a saved position gives the rest of the stream, and seeking gives what drawing up to a step gives."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from millstream.checkpoints import CheckpointStore
from millstream.loader._verification.compare import Mismatch, on_host
from millstream.loader._verification.draws import Drawn
from millstream.loader._verification.pace import Pace
from millstream.loader._verification.result import Difference, VerificationRow
from millstream.loader._verification.stream import compare_batches, place_of
from millstream.loader.info import BatchInfo
from millstream.text.errors import describe_value

if TYPE_CHECKING:
    from millstream.loader.loader import DataLoader

_CHECK = "resume"
_LENGTH = 2  # batches that are drawn after each stop
_WITHIN = (8, 32, 1 << 31)  # a random place among the first so many steps: there may not be time for all

_CAUSE = (
    "Something that makes the batch is not in the state: a function or a source that remembers earlier calls. "
    "Make it depend on its arguments alone."
)


class Stops:
    """Keeps the positions at some steps of a stream, and the batches behind them; and goes on from there.

    Args:
        loader: The loader.
        key: The run's key.
        words: Its raw data.
        steps: How many batches will be drawn.
    """

    def __init__(self, loader: "DataLoader", key: Any, words: np.ndarray, steps: int) -> None:
        self._loader, self._key = loader, key
        length = loader.steps_per_epoch
        random = np.random.default_rng(words)
        drawn = [int(random.integers(1, max(2, min(steps, within)))) for within in _WITHIN]
        places = {place for place in (1, length - 1, length, length + 1, *drawn) if 0 < place < steps}
        self._wanted = {place + after for place in places for after in range(_LENGTH)}
        self._places = sorted(places)
        self._positions: dict[int, Any] = {}
        self._kept: dict[int, tuple[Any, BatchInfo | None]] = {}

    def see(self, drawn: Drawn) -> None:
        """Take in a batch of the stream."""
        if drawn.step + 1 in self._places:
            self._positions[drawn.step + 1] = drawn.position
        if drawn.step in self._wanted:
            self._kept[drawn.step] = on_host((drawn.value, drawn.mask), copied=True), drawn.info

    def row(self, pace: Pace) -> VerificationRow:
        """The check, at those places that the stream has reached."""
        places = [place for place in self._places if place in self._kept and place in self._positions]
        done: list[int] = []
        if not places:
            return VerificationRow(_CHECK, "left out", "the stream is too short to be stopped and resumed")
        indexed = self._loader._origin is not None
        try:
            saved = _through_json(self._positions, places) if indexed else _checkpointed(self._positions, places)
        except ImportError as error:
            return VerificationRow(_CHECK, "left out", str(error))
        with self._loader.replace() as loader:
            for place in places:
                if done and pace.is_over:
                    break
                for way, batches in self._ways(loader, place, saved[place], indexed):
                    difference = self._compare(way, place, batches)
                    if difference is not None:
                        return VerificationRow(_CHECK, "failed", f"not the same after {way}", difference)
                done.append(place)
                pace.show("place", len(done), len(places))
        seeking = "; seeking gives the same" if indexed else ""
        through = "" if indexed else " through a checkpoint"
        shown = ", ".join(map(str, done))
        evidence = f"saved{through} and resumed before steps {shown}: equal bit for bit{seeking}"
        return VerificationRow(_CHECK, "ok", evidence)

    def _ways(self, loader: "DataLoader", place: int, saved: Any, indexed: bool) -> Iterator[tuple[str, Any]]:
        if not indexed:
            yield "resuming", loader.iterate(saved, steps=_LENGTH)
            return
        resumed = loader.iterate(loader.init_state(self._key), steps=0)
        resumed.set_state({**saved, "left": _LENGTH})
        yield "resuming", resumed
        yield "seeking", loader.iterate(loader.init_state(self._key, step=place), steps=_LENGTH)

    def _compare(self, way: str, place: int, batches: Any) -> Difference | None:
        with contextlib.closing(batches):
            for step in range(place, place + _LENGTH):
                if step not in self._kept:
                    return None
                expected, info = self._kept[step]
                try:
                    wrong = compare_batches(expected, on_host(next(batches)))
                except Exception as error:
                    wrong = [Mismatch("batch", (), "a batch", describe_value(error))]
                if wrong:
                    where = f"{way} before step {place}, {place_of(step, info, wrong[0])}"
                    return Difference(_CHECK, where, wrong[0].shown, wrong[0].expected, wrong[0].found, _CAUSE)
        return None


def _through_json(positions: dict[int, Any], places: list[int]) -> dict[int, Any]:
    return {place: json.loads(json.dumps(positions[place])) for place in places}


def _checkpointed(positions: dict[int, Any], places: list[int]) -> dict[int, Any]:
    """The states of a stream, as a run would save and load them."""
    states = {str(place): positions[place] for place in places}
    with tempfile.TemporaryDirectory() as folder, CheckpointStore(folder) as store:
        store.save(0, states)
        loaded = store.load(like=jax.tree.map(lambda leaf: leaf, states)).tree
    return {place: loaded[str(place)] for place in places}
