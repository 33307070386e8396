"""Documents of different lengths in rows of one length."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millstream.files.plan_folder import PlanFolder, Plans, folder_of
from millstream.pipeline.pipeline import MAX_IN_GRAPH
from millstream.plan.ordering import Ordering, as_shuffle
from millstream.plan.packing import PackedRows, Packing, Rule, TooLong
from millstream.plan.selection import Named, Selection, digest_of
from millstream.reading.contracts import IndexedSource, PyTree
from millstream.reading.executor import Executor, require_executor
from millstream.reading.host_source import HostSource, as_host_source
from millstream.reading.packed_source import PackedSource, RowLeaves, Unscored
from millstream.reading.padding import as_leaf
from millstream.reading.samples import TRIED, first_sample
from millstream.reading.view import View, source_length, source_name
from millstream.text.errors import describe_value, require_choice, require_names, table, whole_number
from millstream.views._measure import Property, as_array, kept_tables, lengths_of
from millstream.views.regrouped import Identities, require_fixed

Number = int | float | np.number | np.bool_


def pack(
    source: IndexedSource,
    length: int,
    rule: Rule = "best-fit",
    *,
    leaves: str | Sequence[str] | None = None,
    lengths: Property | None = None,
    too_long: TooLong = "split",
    max_segments: int | None = None,
    eos: Number | Mapping[str, Number] | None = None,
    fill: Number | Mapping[str, Number] = 0,
    segments: str | None = "segments",
    positions: str | None = "positions",
    loss_mask: str | None = "loss_mask",
    unscored: Unscored = "first",
    block_size: int = 1 << 20,
    seed: int | None = 0,
    ordering: Ordering | None = None,
    executor: Executor | None = None,
    plans: Plans = None,
) -> View:
    """Rows of one length, each with several documents: what language models are trained on, with little padding.

    Which documents a row has is planned once, from their lengths. So there is a known number of rows, any of them is
    read alone, and they are shuffled, batched, mixed and resumed like other samples. A document in a row, or a piece of
    one, is a segment. `ms.transforms.segment_mask` keeps attention inside segments.

    Example:
        >>> source = ms.DatasetSource([{"tokens": np.arange(n) + 1} for n in (5, 3, 2, 4, 1)])
        >>> view = ms.views.pack(source, 8, eos=0)
        >>> len(view), sorted(view[0])
        (3, ['loss_mask', 'positions', 'segments', 'tokens'])
        >>> view = ms.views.pack(source, 8, "concat", seed=None)
        >>> view[0]["tokens"].tolist(), view[0]["segments"].tolist()
        ([1, 2, 3, 4, 5, 1, 2, 3], [1, 1, 1, 1, 1, 2, 2, 2])

    Args:
        source: A source or a view, whose samples are the documents: dicts of arrays, or lists, of one length.
        length: Tokens of a row.
        rule: "best-fit" puts each document into the row with the least room for it, the longest documents first, and
            leaves least padding. "first-fit" puts them into the first row with room for them, in their order. "concat"
            joins all documents and cuts every `length` tokens: only the last row is padded, and documents are cut
            anywhere.
        leaves: The leaves to pack, if not all of them; rows do not have the others.
        lengths: How long documents are, if it is known: an array; or a field or a function of a sample to find it by.
            By default the length of the first leaf, which a source with `lengths` knows, and for which others are
            read once.
        too_long: What becomes of a document that is longer than a row: "split" makes several segments of it, "cut"
            keeps its beginning, and "drop" leaves it out. "concat" splits.
        max_segments: How many segments a row may have. Not for "concat".
        eos: A token to append to every document, which counts to its length; for several leaves, a dict with a value
            for each. It is part of the document: where that is cut, there is none.
        fill: What the rest of a row is padded with: a number, or a dict with one for some leaves.
        segments: The name of the leaf that numbers the segments of a row from 1 on, with 0 for padding; None adds none.
        positions: The same for the leaf that counts the tokens of each segment from 0 on.
        loss_mask: The same for the leaf that is True for tokens that count in the loss, and False for padding.
        unscored: The token of a segment that does not count. "first": nothing in the row predicts it; multiply the loss
            of targets, `tokens[:, 1:]`, by `loss_mask[:, 1:]`. "last": it predicts nothing; multiply it by
            `loss_mask[:, :-1]`. "none": every token counts.
        block_size: How many documents are packed at a time, for "best-fit" and "first-fit". More take more memory.
        seed: Documents are packed in a random order, and a different number gives different rows; None keeps their
            own. Which order epochs go through the rows in is not decided by it, but by `ordering` and the run's key.
        ordering: "shuffle", "sequential" or a `Shuffle`; by default that of the source.
        executor: Where documents are measured, if they have to be.
        plans: Where lengths and rows are kept: a folder, or `ms.views.plans(folder)`; by default in memory.
    """
    require_fixed("pack", source, "pack its sources, and mix or weight those")
    require_executor("pack", executor)
    packing = _packing(length, rule, too_long, max_segments, block_size, seed)
    require_choice("pack", "unscored", unscored, ("first", "last", "none"))
    its_ordering: Any = source.ordering if ordering is None else ordering  # which the plan checks
    as_shuffle("pack", its_ordering)
    names = _packed_names(source, leaves)
    added = {"segments": segments, "positions": positions, "loss_mask": loss_mask}
    _require_new_names(names, added)
    row = RowLeaves(names, _ends(names, eos), _fills(names, fill), **added, unscored=unscored)
    by: Any = names[0] if lengths is None else lengths
    if not isinstance(by, str) and not callable(by):
        by = as_array("pack", "lengths", by)
    plan, digest = _plan(source, by, packing, row.eos is not None, executor, folder_of("pack", plans))
    base = _Packed(source, PackedRows(plan), packing.length, row, its_ordering)
    of = f" of {source.selection.words}" if isinstance(source, View) else ""
    name = Named(len(base), f"{base.words}, {rule} ({digest[:12]}){of}")
    return View(base, Selection().after(name), its_ordering)


class _Packed:
    """Rows of documents of a source."""

    arrays = None

    def __init__(
        self, source: IndexedSource, rows: PackedRows, length: int, row: RowLeaves, ordering: Ordering | str
    ) -> None:
        self.source = source
        self.ordering = ordering
        base = source.source if isinstance(source, View) else source
        self.shown_as, self.shown_length = source_name(base), source_length(base)
        self._rows = rows
        self.on_host: HostSource = PackedSource(source, rows, length, row)
        self.stamps = self.on_host.stamps
        full = 100 * rows.tokens / (len(rows) * length)
        self.words = f"{len(rows):,} rows of {length:,} tokens, {full:.2f} % full"

    def __len__(self) -> int:
        return len(self._rows)

    def spec(self) -> PyTree:
        """The shape and dtype of one row."""
        return self.on_host.spec()

    def read(self, indices: np.ndarray, out: PyTree | None = None) -> PyTree:
        """The rows at `indices`, stacked, as NumPy arrays."""
        return self.on_host.read(indices, out)

    def identities(self, caller: str, indices: np.ndarray, identities: Identities) -> np.ndarray:
        """Those of their first documents, if none is in two rows."""
        every = identities(caller, self.source, None) if isinstance(self.source, View) else None
        if self._rows.divides or (every is not None and len(np.unique(every)) < len(every)):
            raise ValueError(
                f"{caller}: some documents are in several of these rows, so that parts would have them in common. "
                "Divide the documents, and pack each part."
            )
        return identities(caller, self.source, self._rows.first_documents(indices))


def _packing(length: Any, rule: Any, too_long: Any, max_segments: Any, block_size: Any, seed: Any) -> Packing:
    length = whole_number("pack", "length", length, least=1, most=MAX_IN_GRAPH // 2)
    require_choice("pack", "rule", rule, ("best-fit", "first-fit", "concat"))
    require_choice("pack", "too_long", too_long, ("split", "cut", "drop"))
    block_size = whole_number("pack", "block_size", block_size, least=1)
    if max_segments is not None:
        max_segments = whole_number("pack", "max_segments", max_segments, least=1)
    if seed is not None:
        seed = whole_number("pack", "seed", seed, least=0, most=(1 << 63) - 1)
    if rule == "concat" and (too_long != "split" or max_segments is not None):
        given = "max_segments" if too_long == "split" else f"too_long={too_long!r}"
        raise ValueError(
            f"pack with rule 'concat' cuts every {length:,} tokens, whatever lies there, and cannot follow {given}. "
            "Use 'best-fit' or 'first-fit', or leave documents out with ms.views.select."
        )
    return Packing(length, rule, too_long, max_segments, block_size, seed)


def _packed_names(source: IndexedSource, leaves: Any) -> tuple[str, ...]:
    """The leaves that are packed, of which the first sample that can be read has values for the same tokens."""
    host = as_host_source(source)
    key = np.zeros(2, np.uint32) if host.keyed else None
    number, (sample, _) = first_sample(lambda index: host.read_sample(index, key), range(len(host))[:TRIED])
    if not isinstance(sample, dict):
        raise TypeError(
            f"pack needs samples that are dicts. Sample {number} is {describe_value(sample)}. Name its parts first, "
            "such as source.map(lambda sample: {'tokens': sample})."
        )
    given = [leaves] if isinstance(leaves, str) else None if leaves is None else require_names("pack", "leaves", leaves)
    names = list(sample) if given is None else given
    missing = [name for name in names if name not in sample]
    if missing:
        shown = ", ".join(map(str, sample))
        raise ValueError(f"pack: sample {number} has no leaf {missing[0]!r}. Its leaves: {shown}.")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"pack needs at least one leaf, and each once. Got {describe_value(names)}.")
    found = {name: _length(f"pack: sample {number}[{name!r}]", sample[name]) for name in names}
    length = next((one for one in found.values() if one is not None), None)
    fit = [name for name, one in found.items() if one is not None and one == length]
    if len(fit) < len(names):
        rows = (
            (name, describe_value(sample[name]) if one is None else f"{one:,} values") for name, one in found.items()
        )
        fix = f"Name the leaves to pack: leaves={fit!r}." if fit else "Make one an array or a list of numbers."
        raise ValueError(
            f"pack needs a value for each token in every leaf that it packs. Sample {number} has:\n{table(rows)}\n{fix}"
        )
    return tuple(names)


def _length(what: str, value: Any) -> int | None:
    """The length of a leaf; None if it is not an array with one."""
    try:
        return len(as_leaf(what, value))
    except (TypeError, ValueError):
        return None


def _require_new_names(names: tuple[str, ...], added: Mapping[str, Any]) -> None:
    taken = list(names)
    for argument, name in added.items():
        if name is None:
            continue
        if not isinstance(name, str):
            raise TypeError(f"pack needs {argument} to be the name of a leaf, or None. Got {describe_value(name)}.")
        if name in taken:
            raise ValueError(f"pack would make two leaves of the name {name!r}. Pass a different {argument}=.")
        taken.append(name)


def _ends(names: tuple[str, ...], eos: Any) -> dict[str, Any] | None:
    """What each leaf has after the end of a document."""
    if eos is None:
        return None
    ends = dict(eos) if isinstance(eos, Mapping) else dict.fromkeys(names[:1], eos)
    if ends.keys() != set(names):
        wanted = "{" + ", ".join(f"{name!r}: ..." for name in names) + "}"
        raise ValueError(f"pack needs eos to have a value for each leaf it packs: {wanted}. Got {describe_value(eos)}.")
    _require_numbers("eos", ends)
    return ends


def _fills(names: tuple[str, ...], fill: Any) -> dict[str, Any]:
    """What each leaf is padded with."""
    given = fill if isinstance(fill, Mapping) else dict.fromkeys(names, fill)
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ValueError(
            f"pack has fill for {unknown[0]!r}, which it does not pack: it packs {', '.join(map(repr, names))}."
        )
    _require_numbers("fill", given)
    return {name: given.get(name, 0) for name in names}


def _require_numbers(argument: str, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if not isinstance(value, Number):
            raise TypeError(f"pack needs {argument} to be a number for {name!r}. Got {describe_value(value)}.")


def _plan(
    source: IndexedSource,
    by: Any,
    packing: Packing,
    has_eos: bool,
    executor: Executor | None,
    folder: PlanFolder | None,
) -> tuple[np.ndarray, str]:
    """The plan of the rows, and its hash."""

    def make() -> list[np.ndarray]:
        lengths = lengths_of("pack", "lengths", source, by, executor, folder) + has_eos
        kept = lengths[lengths <= packing.length] if packing.too_long == "drop" else lengths
        if not kept.any():
            why = "are empty" if kept is lengths else f"are empty or longer than {packing.length:,}"
            raise ValueError(f"pack makes nothing of the {len(source):,} samples: all {why}.")
        return [packing.table(lengths)]

    if folder is None:
        (plan,) = make()
        return plan, digest_of(plan)
    (found,) = kept_tables("pack", source, folder, (by, packing, has_eos), ["rows"], make)
    return found
