"""Padding samples of different lengths, so that they can be stacked."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from millstream.pipeline.bucketed import BucketedPipeline
from millstream.pipeline.compose import HostPipeline
from millstream.reading.contracts import IndexedSource
from millstream.reading.host_source import HostSource
from millstream.reading.padding import PaddedLeaf, PaddedSource, Side, TooLong
from millstream.reading.samples import TRIED
from millstream.text.errors import describe_value, require_choice, require_mapping, whole_number
from millstream.transforms.host import HostStage

_MOST = (1 << 31) - 1


@dataclasses.dataclass(frozen=True, repr=False)
class PadTransform(HostStage):
    """Pad leaves of every sample along their first axis, where samples are read.

    It comes after the source, or after a `HostMapTransform`. A mask is added for each padded leaf: `batch["ids_mask"]`
    is True where `batch["ids"]` is real.

    Example:
        >>> source = ms.DatasetSource([{"ids": [5, 6]}, {"ids": [7]}], ordering="sequential")
        >>> loader = ms.DataLoader([source, ms.PadTransform({"ids": 0}, length=3), ms.BatchTransform(2)])
        >>> batch, mask = next(loader.iterate(loader.init_state(jax.random.key(0))))
        >>> batch["ids"].tolist(), batch["ids_mask"].tolist()
        ([[5, 6, 0], [7, 0, 0]], [[True, True, False], [True, False, False]])

    Args:
        fill: What to pad with, by the name of a leaf. Samples are dicts.
        length: What to pad to: a number for all of them, or a dict with one for some. Others are padded to the length
            of their bucket, after `ms.views.buckets`.
        side: "right" puts the padding after the values, "left" before them.
        too_long: What becomes of a longer leaf: "raise" refuses it, "cut end" and "cut start" keep the other end of it.
        mask: True adds a leaf "ids_mask" for "ids"; a dict such as {"ids": "attention_mask"} names it, and replaces a
            leaf of that name; False adds none.
        positions: The same for a leaf that counts the values from 0; True adds "ids_positions". It is 0 in the padding.
    """

    fill: Mapping[str, float | np.number | np.bool_]
    length: int | Mapping[str, int] | None = None
    side: Side = "right"
    too_long: TooLong = "raise"
    mask: bool | Mapping[str, str] = True
    positions: bool | Mapping[str, str] = False

    def __post_init__(self) -> None:
        require_mapping("PadTransform", "fill", self.fill, "a dict such as {'ids': 0}")
        if not self.fill:
            raise ValueError("PadTransform needs at least one leaf to pad, such as {'ids': 0}. Got none.")
        for name, value in self.fill.items():
            if not isinstance(value, int | float | np.number | np.bool_):
                raise TypeError(f"PadTransform needs a number to pad {name!r} with. Got {describe_value(value)}.")
        require_choice("PadTransform", "side", self.side, ("right", "left"))
        require_choice("PadTransform", "too_long", self.too_long, ("raise", "cut end", "cut start"))
        for name in ("mask", "positions"):
            self._check_names(name, getattr(self, name))
        self._require_padded("length", self._lengths)
        for leaf, length in self._lengths.items():
            if length is not None:
                whole_number("PadTransform", f"length of {leaf!r}", length, least=1, most=_MOST)
        added = [name for leaf in self._leaves() for name in (leaf.name, leaf.mask, leaf.positions) if name is not None]
        twice = next((name for name in added if added.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"PadTransform would make two leaves of the name {twice!r}. Name one of them differently.")

    def _check_names(self, argument: str, given: Any) -> None:
        if isinstance(given, bool):
            return
        require_mapping("PadTransform", argument, given, "True, False, or a dict such as {'ids': 'attention_mask'}")
        self._require_padded(argument, given)
        for leaf, name in given.items():
            if not isinstance(name, str):
                raise TypeError(
                    f"PadTransform needs {argument} to name a leaf for {leaf!r}. Got {describe_value(name)}."
                )

    def _require_padded(self, argument: str, given: Mapping[str, Any]) -> None:
        unknown = [name for name in given if name not in self.fill]
        if unknown:
            raise ValueError(
                f"PadTransform has {argument} for {unknown[0]!r}, which it does not pad: fill has "
                f"{', '.join(map(repr, self.fill))}."
            )

    @property
    def _lengths(self) -> Mapping[str, int | None]:
        return self.length if isinstance(self.length, Mapping) else dict.fromkeys(self.fill, self.length)

    def _leaves(self) -> list[PaddedLeaf]:
        def added(given: bool | Mapping[str, str], name: str, ending: str) -> str | None:
            if isinstance(given, bool):
                return f"{name}_{ending}" if given else None
            return given.get(name)

        lengths, masks, positions = self._lengths, self.mask, self.positions
        return [
            PaddedLeaf(name, fill, lengths.get(name), added(masks, name, "mask"), added(positions, name, "positions"))
            for name, fill in self.fill.items()
        ]

    def source_over(self, inner: IndexedSource, stream: HostPipeline) -> HostSource:
        lengths = stream.lengths if isinstance(stream, BucketedPipeline) else ()
        first = stream.plan.first_indices(TRIED)
        return PaddedSource(inner, self._leaves(), self.side, self.too_long, lengths, first)
