"""Several sources in one batch, by weight."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from millstream.pipeline.pipeline import MAX_IN_GRAPH
from millstream.plan.block_order import block_order
from millstream.plan.mixture import Mixed, Part, block_size, mixed, mixed_once, reweighted
from millstream.plan.ordering import as_shuffle
from millstream.plan.selection import Selection
from millstream.reading.blocks import stored_blocks
from millstream.reading.contracts import IndexedSource
from millstream.reading.view import View, view_of
from millstream.text.errors import (
    describe_value,
    function_name,
    require_choice,
    require_mapping,
    require_number,
    table,
    whole_number,
)
from millstream.views._measure import require_source
from millstream.views.joins import joined_below

# A weight that stays, or a function of how many samples of the epoch have come before.
Weight = float | Callable[[np.ndarray], np.ndarray]


def mix(
    sources: Mapping[str, IndexedSource],
    weights: Mapping[str, Weight],
    *,
    samples: int | None = None,
    exhausted: Literal["repeat", "stop", "share"] = "repeat",
    times: int = 1,
    source_field: str | None = None,
) -> View:
    """Samples of several sources in every batch, in the proportions that their weights say.

    They are spread evenly: at any sample, the number of samples of each source so far is at most half a sample from
    exact for two sources, one for up to four, one and a half for up to eight, as long as weights stay. Where weights
    of three or more sources jump it may be a few samples, which later blocks make up for. Every source goes through its
    own epochs, in its own order, from one epoch of the mixture to the next. That is true of views that differ from
    epoch to epoch, too, such as another mixture.

    Example:
        >>> web, code = (ms.ArraySampleSource({"x": np.full(n, n)}) for n in (900, 100))
        >>> view = ms.views.mix({"web": web, "code": code}, {"web": 3, "code": 1})
        >>> loader = ms.DataLoader([view, ms.BatchTransform(256)])
        >>> batch, mask = next(loader.iterate(loader.init_state(jax.random.key(0))))
        >>> int((batch["x"] == 100).sum())
        64

    Args:
        sources: Sources or views by name, whose samples have the same structure, shapes and dtypes. Each has its own
            `ordering`, "shuffle", "sequential" or `Shuffle("blocks")`.
        weights: A number for each, at least 0, or a function of how many samples have come before in the epoch, such as
            `ms.views.ramp(0.1, 0.5, samples=100_000)`. Only their proportions count.
        samples: How many samples an epoch has; by default as many as all sources together. Weights that change start
            again with every epoch, so give all samples of the run to change them over the run.
        exhausted: What happens when a source has come `times` times in an epoch. "repeat" continues with its next one,
            however often. "stop" ends the epoch of the mixture before that. "share" leaves it out from there on, and
            the others share its weight, until all are exhausted.
        times: How often a source may come in an epoch, for "stop" and "share".
        source_field: The name of a field that is added to every sample, which has to be a dict: the number of its
            source, int32, in the order of `sources`.
    """
    require_mapping("mix", "sources", sources, "a dict of sources")
    if not sources:
        raise ValueError("mix needs at least one source. Got none.")
    for source in sources.values():
        require_source("mix", source)
    require_choice("mix", "exhausted", exhausted, ("repeat", "stop", "share"))
    whole_number("mix", "times", times, least=1, most=MAX_IN_GRAPH)
    if exhausted == "repeat" and times != 1:
        raise ValueError(
            "mix takes times= with exhausted='stop' or 'share': 'repeat' repeats a source as often as needed."
        )
    if exhausted != "repeat" and samples is not None:
        raise ValueError(
            f"mix takes samples= with exhausted='repeat' alone: with {exhausted!r} the sources end the epoch."
        )
    if not isinstance(source_field, str | None):
        raise TypeError(f"mix needs source_field to be the name of a field. Got {describe_value(source_field)}.")
    found = _weights_by_name("mix", list(sources), weights)
    orders = {name: _is_shuffled(name, source) for name, source in sources.items()}
    base, firsts = joined_below("mix", sources, source_field)
    selections = [_selection_of(source) for source in sources.values()]
    parts = [
        Part(name, len(source), orders[name], first, Selection(selection.functions))
        for (name, source), first, selection in zip(sources.items(), firsts, selections, strict=True)
    ]
    tables = [selection.tables for selection in selections]
    most = times * np.array([part.length for part in parts], np.int64)
    length = int(most.sum()) if samples is None else whole_number("mix", "samples", samples, least=1, most=MAX_IN_GRAPH)
    if length > MAX_IN_GRAPH:
        raise ValueError(
            f"mix would have {length:,} samples in an epoch. The most is {MAX_IN_GRAPH:,}; pass "
            + ("samples=, and the next epoch continues in every source." if exhausted == "repeat" else "fewer times.")
        )
    shares = _shares("mix", found, length)
    if exhausted == "share":
        return view_of(base, *mixed_once(shares, length, parts, most, tables), ordering="sequential")
    if exhausted == "stop":
        length = _length_until_one_ends(shares, length, most)
        while (_whole_epoch(*mixed(_shares("mix", found, length), length, parts)) > most).any():
            length -= 1  # rounding took one too many
        shares = _shares("mix", found, length)
    return view_of(base, *mixed(shares, length, parts, tables), ordering="sequential")


def reweight(mixture: View, weights: Mapping[str, Weight], *, after: int) -> View:
    """A mixture whose weights change at some sample of a run, decided while it runs.

    Up to there it is the same mixture, bit for bit. From there on it has the new weights, and every source continues
    where it was: no sample is lost, and none is repeated. Epochs keep their length. Weights can be changed again, after
    more samples.

    Example:
        >>> web, code = (ms.ArraySampleSource({"x": np.full(n, n)}) for n in (900, 100))
        >>> mixture = ms.views.mix({"web": web, "code": code}, {"web": 3, "code": 1}, samples=1024)
        >>> changed = ms.views.reweight(mixture, {"web": 1, "code": 1}, after=512)
        >>> loader = ms.DataLoader([changed, ms.BatchTransform(256)])
        >>> [int((batch["x"] == 100).sum()) for batch, _ in loader.iterate(loader.init_state(jax.random.key(0)))]
        [64, 64, 128, 128]

    Args:
        mixture: What `ms.views.mix`, or this, gave.
        weights: As for `ms.views.mix`: those that change are functions of the samples of an epoch.
        after: How many samples of the run come before the change, over all epochs.
    """
    require_source("reweight", mixture)
    function = mixture.selection.functions[0] if isinstance(mixture, View) else None
    if not isinstance(function, Mixed):
        raise TypeError(
            f"reweight needs what ms.views.mix gave. Got {mixture!r}. Change the weights first, then take parts of it."
        )
    least = function.changes[-1].after + 1 if function.changes else 1
    whole_number("reweight", "after", after, least=least, most=Mixed.run_limit - 1)
    found = _weights_by_name("reweight", [part.name for part in function.parts], weights)
    table: Any = mixture.selection.tables[0]
    changed = reweighted(function, table, _shares("reweight", found, function.length), after)
    return view_of(mixture.source, *changed, ordering="sequential")


@dataclasses.dataclass(frozen=True)
class ramp:
    """A weight that goes from one number to another, for `ms.views.mix`.

    Example:
        >>> ms.views.ramp(0.0, 1.0, samples=100)(np.array([0, 50, 100, 200])).tolist()
        [0.0, 0.5, 1.0, 1.0]

    Args:
        start: The weight at the beginning of an epoch.
        end: The weight from `samples` on.
        samples: How many samples of the mixture it takes.
        after: How many samples come before it begins.
        shape: "linear", or "cosine", which starts and ends slowly.
    """

    start: float
    end: float
    samples: int
    after: int = 0
    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            require_number("ramp", name, getattr(self, name))
        whole_number("ramp", "samples", self.samples, least=1)
        whole_number("ramp", "after", self.after, least=0)
        require_choice("ramp", "shape", self.shape, ("linear", "cosine"))

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """The weight after that many samples."""
        share = np.clip((np.asarray(samples, np.float64) - self.after) / self.samples, 0.0, 1.0)
        share = share if self.shape == "linear" else (1 - np.cos(np.pi * share)) / 2
        return self.start + (self.end - self.start) * share


@dataclasses.dataclass(frozen=True)
class levels:
    """A weight that changes at some samples, for `ms.views.mix`.

    Example:
        >>> ms.views.levels({0: 1.0, 1000: 0.25})(np.array([0, 999, 1000])).tolist()
        [1.0, 1.0, 0.25]

    Args:
        values: The weight from each number of samples on; one of them is 0.
    """

    values: Mapping[int, float]

    def __post_init__(self) -> None:
        require_mapping("levels", "values", self.values, "a dict such as {0: 1.0, 1000: 0.5}")
        for start, value in self.values.items():
            whole_number("levels", "the start of a weight", start, least=0)
            require_number("levels", "a weight", value)
        if 0 not in self.values:
            raise ValueError(f"levels needs a weight from 0 on. Got {describe_value(dict(self.values))}.")

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """The weight after that many samples."""
        starts = sorted(self.values)
        weights = np.array([self.values[start] for start in starts], np.float64)
        return weights[np.searchsorted(starts, samples, side="right") - 1]


def _weights_by_name(caller: str, names: list[str], weights: Any) -> dict[str, Weight]:
    require_mapping(caller, "weights", weights, "a dict with a weight for each source")
    if weights.keys() != set(names):
        rows = [("sources", ", ".join(map(repr, names))), ("weights", ", ".join(map(repr, weights)))]
        raise ValueError(f"{caller} needs a weight for each source. Got:\n{table(rows)}")
    for name, weight in weights.items():
        if not callable(weight):
            require_number(caller, f"the weight of {name!r}", weight)
    return {name: weights[name] for name in names}


def _is_shuffled(name: str, source: IndexedSource) -> bool:
    shuffle = as_shuffle("mix", source.ordering)
    if shuffle.words not in ("shuffle", "sequential", "blocks"):
        raise ValueError(f"mix takes sources that are shuffled or in sequence. {name!r} has ordering {shuffle!r}.")
    return shuffle.words == "shuffle"


def _selection_of(source: IndexedSource) -> Selection:
    """Which sample below views stands at each position of a source's own epochs; in blocks, if that is its order."""
    selection = source.selection if isinstance(source, View) else Selection()
    shuffle = as_shuffle("mix", source.ordering)
    if shuffle.mode != "blocks":
        return selection
    return selection.after(*block_order(shuffle, stored_blocks(shuffle, source), None))


def _shares(caller: str, weights: Mapping[str, Weight], length: int) -> np.ndarray:
    """The share of each source in every block of an epoch, at its middle."""
    size = block_size(length)
    starts = np.arange(-(-length // size), dtype=np.int64) * size
    middles = (starts + np.minimum(starts + size, length)) / 2
    columns = []
    for name, weight in weights.items():
        column = (
            _evaluated(caller, name, weight, middles) if callable(weight) else np.full(len(middles), weight, np.float64)
        )
        wrong = ~np.isfinite(column) | (column < 0)
        if wrong.any():
            at = int(np.argmax(wrong))
            where = f" after {starts[at]:,} samples" if callable(weight) else ""
            raise ValueError(
                f"{caller} needs weights that are finite and not negative. {name!r} has {column[at]}{where}."
            )
        columns.append(column)
    shares = np.stack(columns, axis=1)
    totals = shares.sum(axis=1)
    if not totals.all():
        at = int(np.argmin(totals))
        raise ValueError(f"{caller} needs a weight above zero at all times. All are zero after {starts[at]:,} samples.")
    return shares / totals[:, None]


def _evaluated(caller: str, name: str, weight: Callable[[np.ndarray], Any], samples: np.ndarray) -> np.ndarray:
    first, again = weight(samples), weight(samples)
    try:
        found, repeated = (np.broadcast_to(np.asarray(one, np.float64), samples.shape) for one in (first, again))
    except (TypeError, ValueError):
        raise ValueError(
            f"{caller} needs weights that are functions of arrays: {function_name(weight)}, of {name!r}, was given "
            f"{len(samples):,} numbers of samples, and returned {describe_value(first)}."
        ) from None
    if not np.array_equal(found, repeated, equal_nan=True):
        raise ValueError(
            f"{caller} needs a weight that depends on its argument alone. That of {name!r} differs when it is asked "
            "again."
        )
    return found


def _whole_epoch(function: Mixed, table: Any) -> np.ndarray:
    """How many samples of each source an epoch has."""
    return function.counts(table, np.array(function.length))


def _length_until_one_ends(shares: np.ndarray, length: int, most: np.ndarray) -> int:
    """About how many samples come before one source has given its last."""
    size = block_size(length)
    exact = np.cumsum(np.concatenate([np.zeros((1, len(most))), shares * size]), axis=0)
    over = exact > most
    if not over.any():
        return length
    block = int(np.argmax(over.any(axis=1)))  # the first row in which one has given too many
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = (most - exact[block - 1]) / shares[block - 1]
    return max(1, (block - 1) * size + int(np.nanmin(np.where(shares[block - 1] > 0, inside, np.inf))))
