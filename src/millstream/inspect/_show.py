"""The batch of any step, read as the run reads it, to look at."""

import collections
import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from millstream.inspect._cells import BEFORE, Reading, Row, as_leaf, cells_of, named_leaves, object_rows
from millstream.inspect._compare import raw_key
from millstream.inspect._replay import replay
from millstream.inspect._shown_batch import ShownBatch, ShownRow
from millstream.loader.batch_info import BatchInfo
from millstream.loader.loader import DataLoader
from millstream.loader.mixed import MixedLoader
from millstream.pipeline.compose import IndexedPipeline, SeekablePipeline
from millstream.pipeline.phased import PhasedPipeline
from millstream.pipeline.state import LoaderState, key_words
from millstream.plan.plan import STEP_LIMIT
from millstream.reading.contracts import PyTree
from millstream.reading.derived_sources import CollatedSource, is_random, named_parts
from millstream.reading.host_source import as_host_source
from millstream.reading.padding import PaddedSource
from millstream.text.errors import describe_value, listed, require_bool, require_names, require_path, whole_number
from millstream.text.summaries import value_text
from millstream.tokenizers import Tokenizer


def show(
    loader: DataLoader | MixedLoader,
    key: jax.Array | np.ndarray | None = None,
    step: int | np.integer = 0,
    *,
    state: PyTree | None = None,
    run: str | os.PathLike[str] | None = None,
    n: int = 16,
    before: bool | None = None,
    labels: Mapping[int, str] | Sequence[str] | None = None,
    tokenizer: Tokenizer | None = None,
    images: Sequence[str] | None = None,
) -> ShownBatch:
    """The batch of any step of any run, as a picture: the same samples, with the same bits, as the run has them.

    Images are shown as images, token ids as text with a color for each segment, long vectors as curves, and all else as
    words. Each row has the index of its sample and, in a mixture, its source. Rows that do not count are gray.

    Example:
        >>> digits = ms.ArraySampleSource(ms.datasets.DigitsDataset("train").as_array_dict())
        >>> images = ms.DataLoader([digits, ms.BatchTransform(64)])
        >>> batch = ms.inspect.show(images, jax.random.key(0), step=1234, n=2)
        >>> print(batch)
        step 1,234, epoch 53, batch 16 of 23
        64 rows, of which the first 2 are shown
        <BLANKLINE>
        row  index  image      label
        ────────────────────────────
          0    837  u8[8,8,1]  7
          1    490  u8[8,8,1]  8
        >>> batch.save("batch.html")

    Args:
        loader: A loader. A stream is drawn from its beginning up to the step.
        key: Of the run; `jax.random.key(0)` by default.
        step: The number of the batch, from 0 on.
        state: A state of the loader instead of `key` and `step`: the batch that comes next.
        run: The folder of a run that `ms.checkpoint` has saved, instead of `key`. `step` is then a step as the history
            of the run has it, from 1 on, as for `ms.replay`.
        n: How many rows are shown at most.
        before: Whether to show leaves that stages have changed beside what they were before the first random stage: as
            the source and the functions on the host before it give them. By default where there are random stages.
            True without random stages shows what the source gives.
        labels: Names of classes: a list, or a dict by number.
        tokenizer: What token ids are decoded by; they are shown as numbers without one.
        images: The leaves that are images, such as `["x"]`. By default that is told by their shape, dtype and name.
    """
    if not isinstance(loader, DataLoader | MixedLoader):
        raise TypeError(f"show needs loader to be a DataLoader or a MixedLoader. Got {describe_value(loader)}.")
    n = whole_number("show", "n", n, least=1)
    if run is not None:
        require_path("show", "run to be the path of a saved run", run)
    step = whole_number("show", "step", step, least=0, most=STEP_LIMIT)
    if run is not None and not step:
        raise ValueError("show with run= needs a step as the history of the run has it, from 1 on. Got step=0.")
    if before is not None:
        require_bool("show", "before", before)
    if sum(given is not None for given in (key, state, run)) > 1:
        raise ValueError("show takes one of key, state and run: each says which run the batch is of.")
    if state is not None and step:
        raise ValueError(f"show takes the step of the state, or step={step:,} with a key. Leave one of them out.")
    reading = Reading(
        _labels(labels), _tokenizer(tokenizer), None if images is None else require_names("show", "images", images)
    )
    batch, mask, info, drawn = _draw(loader, key, step, state, run)
    return _shown(loader, batch, mask, info, drawn, n, before, reading)


def _labels(labels: Any) -> dict[int, str]:
    if labels is None:
        return {}
    pairs = labels.items() if isinstance(labels, Mapping) else enumerate(listed(labels) or [None])
    named = {number: name for number, name in pairs if isinstance(number, int | np.integer) and isinstance(name, str)}
    if len(named) != (len(labels) if isinstance(labels, Mapping) else len(listed(labels) or [None])):
        raise TypeError(
            'show needs labels to be a list of names, or a dict of names by number: {0: "cat", 1: "dog"}. '
            f"Got {describe_value(labels)}."
        )
    return {int(number): name for number, name in named.items()}


def _tokenizer(tokenizer: Any) -> Tokenizer | None:
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        raise TypeError(
            "show needs tokenizer to be an ms.tokenizers.Tokenizer. "
            f"Got {describe_value(tokenizer)}. Write ms.tokenizers.Tokenizer(tokenizer)."
        )
    return tokenizer


def _draw(loader: Any, key: Any, step: int, state: Any, run: Any) -> tuple[PyTree, Any, BatchInfo | None, int]:
    """The batch, its mask, what is known about it, and its step."""
    if run is not None:
        replayed = replay(run, loader, step)
        return replayed.batch, replayed.mask, replayed.info, replayed.data_step
    key = jax.random.key(0) if key is None else key_words("show", key)
    if isinstance(loader, MixedLoader) or isinstance(loader.pipeline, SeekablePipeline):
        if not isinstance(state, LoaderState | None):
            raise TypeError(f"show needs state to be one of loader.init_state(key). Got {describe_value(state)}.")
        state = loader.init_state(key, step) if state is None else state
        with contextlib.closing(loader.iterate(state, steps=1, with_info=True)) as batches:
            for batch, mask, info in batches:
                return batch, mask, info, info.step
        raise RuntimeError(
            f"show cannot make batch {int(state.step):,}: samples of it cannot be read, and the loader leaves such "
            'batches out. loader.replace(on_error="raise") shows their errors.'
        )
    drawn = 0 if state is not None else step
    state = loader.init_state(key) if state is None else state
    with contextlib.closing(loader.iterate(state, steps=drawn + 1)) as batches:
        batch, mask = collections.deque(batches, maxlen=1).pop()
    return batch, mask, None, drawn


def _shown(
    loader: Any, batch: PyTree, mask: Any, info: BatchInfo | None, step: int, n: int, before: bool | None, reading: Any
) -> ShownBatch:
    mask = _on_this_host(mask)
    rows, whole = _rows(batch, mask, min(n, mask.size))
    real = mask.reshape(-1)[: len(rows)].tolist()
    _add_beside(rows, info)
    indices = [] if info is None else info.indices.reshape(-1)[: len(rows)].tolist()
    notes = [_counts(mask, len(rows))]
    unchanged = _before(loader, info, indices, before)
    columns, how = cells_of(rows, real, reading)
    if unchanged is not None:
        columns = _with_before(columns, rows, unchanged, real, reading)
        if any(name.endswith(BEFORE) for name in columns):
            notes.append("before: what the stages were given")
    notes += [*how, *(f"{name}, of the whole batch: {value_text(value)}" for name, value in whole.items())]
    sources = None if info is None or info.sources is None else info.sources.reshape(-1).tolist()
    shown = tuple(
        ShownRow(
            indices[row] if indices and indices[row] >= 0 else None,
            "" if sources is None else str(sources[row]),
            real[row],
            _note(row, real[row], indices, info),
            {name: cell for name, cells in columns.items() if (cell := cells[row]) is not None},
        )
        for row in range(len(rows))
    )
    return ShownBatch(_title(loader, info, step), tuple(notes), tuple(columns), shown)


def _counts(mask: np.ndarray, shown: int) -> str:
    masked = mask.size - int(mask.sum())
    count = f"{mask.size:,} rows" if mask.size != 1 else "1 row"
    some = f", of which the first {shown:,} are shown" if shown < mask.size else ""
    gray = f"; {masked:,} {'does' if masked == 1 else 'do'} not count, shown in gray" if masked else ""
    return f"{count}{some}{gray}"


def _on_this_host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        raise ValueError(
            "show needs a batch that lies on the devices of this process. This one is divided among several processes: "
            "show the same step with loader.replace(sharding=None)."
        )
    return np.asarray(leaf)


def _rows(batch: PyTree, mask: np.ndarray, count: int) -> tuple[list[Row], Row]:
    """The first samples of a batch, by leaf, and the leaves that have no row for each of them."""
    if (objects := object_rows(batch, mask)) is not None:
        return [{} if sample is None else named_leaves(sample) for sample in objects[:count]], {}  # None is padding
    rows: list[Row] = [{} for _ in range(count)]
    whole: Row = {}
    for name, leaf in named_leaves(jax.tree.map(_raw, batch)).items():
        if not isinstance(leaf, np.ndarray) or leaf.shape[: mask.ndim] != mask.shape:
            whole[name] = leaf
            continue
        flat = leaf.reshape(mask.size, *leaf.shape[mask.ndim :])
        for number, row in enumerate(rows):
            row[name] = flat[number]
    return rows, whole


def _raw(leaf: Any) -> Any:
    leaf = raw_key(leaf)
    return _on_this_host(leaf) if isinstance(leaf, jax.Array | np.ndarray) else leaf


def _add_beside(rows: list[Row], info: BatchInfo | None) -> None:
    """Add what the source returned beside the arrays."""
    for name, values in ({} if info is None else info.additional).items():
        for row, value in zip(rows, values, strict=False):
            row[name] = value


def _before(loader: Any, info: BatchInfo | None, indices: list[int], asked: bool | None) -> list[Row] | None:
    """The samples before the first random stage, None for padding; nothing if that is not asked for or not known."""
    pipeline = _pipeline_of(loader, info)
    if asked is False or pipeline is None or pipeline.source is None:
        return None
    source = as_host_source(pipeline.source) if pipeline.host is None else pipeline.host.source
    parts = [part for _, part in named_parts(source)]
    is_keyed = source.keyed or any(stage.keyed for stage in pipeline.stages)
    if not (asked or is_keyed):
        return None
    ends = (
        number
        for number, part in enumerate(parts)
        if is_random(part) or isinstance(part, CollatedSource | PaddedSource)
    )
    last = parts[max(next(ends, len(parts)) - 1, 0) if is_keyed else 0]
    if last.keyed:  # the source itself is random
        return None
    failed = set() if info is None else set(info.failed)
    there = np.array([index for row, index in enumerate(indices) if index >= 0 and row not in failed], np.int64)
    samples = iter(last.read_samples(there, None)[0]) if len(there) else iter(())
    return [
        named_leaves(next(samples)) if index >= 0 and row not in failed else {} for row, index in enumerate(indices)
    ]


def _pipeline_of(loader: Any, info: BatchInfo | None) -> Any:
    """The pipeline that a batch comes from; None if it is a stream."""
    if info is None:
        return None
    if isinstance(loader, MixedLoader):
        pipeline = loader.loaders[info.group or ""].pipeline
        return pipeline if isinstance(pipeline, IndexedPipeline) else None
    pipeline = loader.pipeline
    if isinstance(pipeline, PhasedPipeline):
        return pipeline.phases[pipeline.plan.phase_at(info.step)[0]]
    return pipeline


def _with_before(
    columns: dict[str, list[Any]], rows: list[Row], unchanged: list[Row], real: list[bool], reading: Reading
) -> dict[str, list[Any]]:
    """The columns, with those that a stage has changed beside what they were."""
    earlier, _ = cells_of(unchanged, real, reading)
    joined: dict[str, list[Any]] = {}
    for name, cells in columns.items():
        if name in earlier and any(
            not _is_same(one.get(name), other.get(name)) for one, other in zip(rows, unchanged, strict=True) if other
        ):
            joined[name + BEFORE] = earlier[name]
        joined[name] = cells
    return joined


def _is_same(one: Any, other: Any) -> bool:
    one, other = as_leaf(one), as_leaf(other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
    return type(one) is type(other) and bool(one == other)


def _note(row: int, is_real: bool, indices: list[int], info: BatchInfo | None) -> str:
    if info is not None and row in info.failed:
        return f"could not be read: {describe_value(info.failed[row])}"
    if is_real:
        return ""
    return "padding" if indices and indices[row] < 0 else "masked"


def _title(loader: Any, info: BatchInfo | None, step: int) -> str:
    if info is None:
        return f"step {step:,}"
    length = loader.steps_per_epoch
    of = "" if getattr(loader, "epoch_lengths", None) is not None or length is None else f" of {length:,}"
    group = "" if info.group is None else f", from {info.group!r}"
    return f"step {step:,}, epoch {info.epoch:,}, batch {info.step_in_epoch + 1:,}{of}{group}"
