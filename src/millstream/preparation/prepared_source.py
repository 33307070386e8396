"""Reading prepared data."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from millstream.files.data_files import File, is_remote
from millstream.files.file_index import chunks
from millstream.plan.ordering import Ordering
from millstream.preparation.blocks import Blocks
from millstream.preparation.index import Index, read_index
from millstream.reading.contracts import PyTree
from millstream.reading.dtypes import narrowed
from millstream.reading.host_source import FoundSpans, HostSource
from millstream.reading.samples import ObjectSpec, SampleSpec, spec_of
from millstream.sources.array import check_reading
from millstream.text.errors import require_int, require_path

_CALLER = "PreparedSource"


class PreparedSource(HostSource):
    """The samples that `ms.prepare` wrote, as they went in. Shards stay on disk and are mapped.

    It opens by `index.json` alone: structure, lengths and blocks of the samples are known without a look at the shards.
    A shard that is missing, of a different size or damaged is refused by name; `verify` compares all checksums.

    Example:
        >>> texts = ms.DatasetSource(["oat", "barley"], ordering="sequential")
        >>> _ = ms.prepare(texts, "prepared", lambda text: {"text": text, "ids": list(text.encode())})
        >>> source = ms.sources.PreparedSource("prepared", ordering="sequential")
        >>> source[1]["text"], source[0]["ids"], source.lengths["ids"].tolist()
        ('barley', array([111,  97, 116]), [3, 6])

    Args:
        folder: The folder, or its address.
        cache_bytes: How much unpacked data to keep, in each process: of Parquet, and of files of other machines.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.

    """

    reads_together = True  # one request for all rows of a batch

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        cache_bytes: int = 512 << 20,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        check_reading(_CALLER, ordering, prefetch_size)
        require_path(_CALLER, "folder to be a path", folder)
        require_int(_CALLER, "cache_bytes", cache_bytes, least=0)
        place = os.fspath(folder) if is_remote(folder) else os.path.abspath(os.path.expanduser(folder))
        index, file = read_index(_CALLER, place)
        self.stamps = [file.stamp]  # it has the checksums of all others
        self._index = index
        self._blocks = Blocks(place, index, cache_bytes)
        self.looks_ahead, self.divides_blocks = self._blocks.looks_ahead, self._blocks.divided
        self.cache_bytes = cache_bytes
        self.blocks: np.ndarray = self._blocks.sizes  # pyright: ignore[reportIncompatibleVariableOverride]
        self.ordering: Ordering = ordering
        self.prefetch_size = prefetch_size
        self.whole_samples = not all(index.fixed)
        self.sample_spec = _spec(index)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def lengths(self) -> Mapping[str, np.ndarray]:
        """How long every sample is, by the name of each field that has a length."""
        return self._blocks.lengths

    def read_rows(self, indices: np.ndarray, out: Sequence[np.ndarray], keys: np.ndarray | None = None) -> None:
        form, spec = self._index.form, self.sample_spec
        for rows, values in self._blocks.pieces(indices):
            if isinstance(spec, SampleSpec) and not self.whole_samples and not out[0].dtype.hasobject:
                stacked = form.sample([np.stack(part) if isinstance(part, list) else part for part in values])
                for name, target, leaf in zip(spec.names, out, spec.flatten(_CALLER, stacked), strict=True):
                    target[rows] = narrowed(f"{_CALLER}{name}", leaf, target.dtype)
                continue
            for row, *leaves in zip(rows.tolist(), *values, strict=True):
                spec.write(_CALLER, out, row, int(indices[row]), form.sample(leaves))

    def expect(self, indices: np.ndarray | None) -> None:
        if self.looks_ahead:
            self._blocks.expect(indices)

    def expect_blocks(self, indices: np.ndarray, bounds: np.ndarray) -> None:
        if self.looks_ahead:
            self._blocks.expect(indices, bounds)

    def find_spans(self, names: Sequence[str], indices: np.ndarray) -> Iterator[FoundSpans | None]:
        form = self._index.form
        places: PyTree = form.sample(range(len(form.leaves)))
        return self._blocks.find_spans([places[name] for name in names], indices)

    def verify(self) -> None:
        """Read all files and compare them with the checksums of the index; raises a ValueError that names the first.

        Example:
            >>> _ = ms.prepare(ms.DatasetSource(["oat"]), "verified")
            >>> ms.sources.PreparedSource("verified").verify()
        """
        for entry in self._index.files:
            file = self._blocks.files.open(entry.name)
            if _hash(file) != entry.sha256:
                raise ValueError(
                    f"{_CALLER}: {file.name} is damaged: its SHA-256 is not that of its index. Get it again, or "
                    "prepare the data again."
                )


def _hash(file: File) -> str:
    digest = hashlib.sha256()
    for _, data in chunks(file):
        digest.update(data)
    return digest.hexdigest()


def _spec(index: Index) -> SampleSpec | ObjectSpec:
    """The structure of a sample: shapes are those of the first."""
    form = index.form
    odd = next((leaf for leaf in form.leaves if not leaf.is_numbers), None)
    if odd is not None:
        return ObjectSpec(f"sample{odd.path}: {odd.words()}")
    import jax

    leaves = zip(form.leaves, index.first, strict=True)
    tree: PyTree = form.sample([jax.ShapeDtypeStruct(shape, leaf.dtype) for leaf, shape in leaves])
    return spec_of(_CALLER, tree)
