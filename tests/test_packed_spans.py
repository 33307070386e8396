"""Packed rows that are copied from arrays (`find_spans`): the same as those of documents that are read one by one."""

import mmap
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from conftest import assert_trees_equal
from hypothesis import given, settings

import millstream as ms
from millstream.reading import span_copy

ROW = 8
LENGTHS = [5, 0, 9, 3, 3, 1, 8, 2, 21, 4, 7, 6, 1, 1, 2, 12, 5, 3, 0, 8, 2, 2, 4]


class Flat(ms.sources.HostSource):
    """Documents that are slices of arrays: tokens, and a vector for each token."""

    whole_samples = True

    def __init__(self, lengths: Any, dtype: Any = np.int32, arrays: int = 1, ordering: Any = "sequential") -> None:
        self.lengths, self.ordering = np.asarray(lengths, np.int64), ordering
        self.spans_only = False
        self._number = np.arange(len(self.lengths)) % arrays  # of the array that each one is in
        self._ends = np.zeros(len(self.lengths), np.int64)
        self._arrays = []
        for number in range(arrays):
            own = self._number == number
            self._ends[own] = np.cumsum(self.lengths[own])
            tokens = np.arange(self.lengths[own].sum(), dtype=dtype) + dtype(1000 * number + 1)
            self._arrays.append({"tokens": tokens, "vectors": np.stack([tokens / 2, tokens / 4], axis=1)})
        self.sample_spec = ms.sources.spec_of("Flat", self._sample(0))

    def __len__(self) -> int:
        return len(self.lengths)

    def _sample(self, index: int) -> dict[str, np.ndarray]:
        end, arrays = self._ends[index], self._arrays[self._number[index]]
        return {name: array[end - self.lengths[index] : end] for name, array in arrays.items()}

    def read_rows(self, indices: np.ndarray, out: Any, keys: Any = None) -> None:
        assert not self.spans_only, "documents were read one by one"
        for row, index in enumerate(indices.tolist()):
            out[0][row] = self._sample(index)

    def find_spans(self, names: Any, indices: np.ndarray) -> Any:
        ends = self._ends[indices]
        begins, numbers = ends - self.lengths[indices], self._number[indices]
        for number in np.unique(numbers).tolist():
            rows: Any = slice(None) if len(self._arrays) == 1 else np.flatnonzero(numbers == number)
            yield rows, [(self._arrays[number][name], begins[rows], ends[rows]) for name in names]


def same(sample: Any) -> Any:
    return sample


def one_by_one(source: Any) -> Any:
    """The same documents without their arrays."""
    return source.map(same)


def read(view: Any) -> Any:
    return view.read(np.arange(len(view)))


def assert_same_rows(source: Any, **options: Any) -> None:
    length, rule = options.pop("length", ROW), options.pop("rule", "best-fit")
    lengths = source.lengths["tokens"] if isinstance(source.lengths, dict) else source.lengths
    view = ms.views.pack(source, length, rule, lengths=lengths, **options)
    expected = ms.views.pack(one_by_one(source), length, rule, lengths=lengths, **options)
    found = read(view)
    assert_trees_equal(found, read(expected))
    assert {name: leaf.dtype for name, leaf in found.items()} == {
        name: leaf.dtype for name, leaf in read(expected).items()
    }


@settings(max_examples=200)
@given(
    sizes=st.lists(st.integers(0, 12) | st.integers(0, 40), min_size=1, max_size=40).filter(any),
    length=st.integers(1, 16),
    rule=st.sampled_from(["best-fit", "first-fit", "concat"]),
    too_long=st.sampled_from(["split", "cut"]),
    has_eos=st.booleans(),
    unscored=st.sampled_from(["first", "last", "none"]),
    dtype=st.sampled_from([np.int32, np.int64, np.uint16]),
    arrays=st.integers(1, 3),
    leaves=st.sampled_from([["tokens"], ["tokens", "vectors"], ["vectors"]]),
    are_joined=st.booleans(),
)
def test_rows_that_are_copied_from_arrays_are_those_of_documents(
    sizes, length, rule, too_long, has_eos, unscored, dtype, arrays, leaves, are_joined
):
    options: dict[str, Any] = {} if rule == "concat" else {"too_long": too_long}
    eos = dict.fromkeys(leaves, 7) if has_eos else None
    source = Flat(sizes, dtype, arrays)
    fill = dict.fromkeys(leaves, 9)
    with mock.patch.object(span_copy, "_SHORT", 0 if are_joined else 1 << 60):
        assert_same_rows(
            source, length=length, rule=rule, leaves=leaves, eos=eos, fill=fill, unscored=unscored, **options
        )


def test_long_documents_are_copied_by_workers_as_by_threads(key):
    lengths = np.random.default_rng(0).integers(200, 900, 24)
    view = ms.views.pack(Flat(lengths), 1024, leaves=["tokens", "vectors"], eos={"tokens": 7, "vectors": 8})
    found = {}
    for executor in (ms.Processes(1), ms.Threads(1)):
        loader = ms.DataLoader([view, ms.BatchTransform(4)], executor=executor)
        found[executor] = [jax.device_get(batch) for batch, _ in loader.iterate(loader.init_state(key))]
    by_workers, by_threads = found.values()
    assert len(by_workers) > 2
    assert_trees_equal(by_workers, by_threads)


def test_the_gil_is_held_only_while_memory_is_copied(tmp_path):
    path = tmp_path / "tokens"
    path.write_bytes(bytes(range(64)))
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    owned = np.arange(64)
    assert all(map(span_copy._is_owned, [owned, owned[3:], owned.reshape(8, 8)[:, 2].view(np.uint64)]))
    files = [np.memmap(path, np.uint8, "r"), np.frombuffer(mapped, np.uint16)]
    assert not any(span_copy._is_owned(array[1:].view(np.uint8)) for array in [*files, *map(np.asarray, files)])


def test_documents_that_are_too_long_are_left_out_of_arrays():
    assert_same_rows(Flat(LENGTHS, arrays=2), too_long="drop", eos={"tokens": 0, "vectors": 0})


@pytest.mark.parametrize("arrays", [1, 3])
def test_no_document_is_read_where_its_arrays_are_known(arrays):
    source = Flat(LENGTHS, np.int64, arrays)
    view = ms.views.pack(source, ROW, eos={"tokens": 0, "vectors": 0})
    part = ms.views.pack(source[::-2], ROW, "concat")
    source.spans_only = True
    assert (read(view)["segments"] > 0).sum() == sum(LENGTHS) + len(LENGTHS)
    assert (read(part)["segments"] > 0).sum() == sum(LENGTHS[::-2])


def test_rows_are_copied_into_memory_that_lies_apart():
    view = ms.views.pack(Flat(LENGTHS), ROW)
    expected = read(view)
    apart = {name: np.zeros((len(view), 2, *leaf.shape[1:]), leaf.dtype)[:, 0] for name, leaf in expected.items()}
    view.read(np.arange(len(view)), apart)
    assert_trees_equal(apart, expected)


VIEWS = {
    "packed": lambda source: ms.views.pack(source, ROW),
    "of a view": lambda source: ms.views.pack(source[::-2], ROW, too_long="drop"),
    "of a part": lambda source: ms.views.pack(ms.views.split(source, {"train": 0.7, "test": 0.3})[0], ROW),
    "of joined sources": lambda source: ms.views.pack(ms.views.concat(source, source[:5]), ROW, lengths="tokens"),
    "of chosen documents": lambda source: ms.views.pack(
        ms.views.select(source, lambda sample: len(sample["tokens"]) > 2), ROW, "concat"
    ),
    "mixture": lambda source: ms.views.mix(
        {"a": ms.views.pack(source[:9], ROW), "b": ms.views.pack(source[9:], ROW)}, {"a": 1, "b": 2}, samples=25
    ),
    "joined": lambda source: ms.views.concat(*(ms.views.pack(source, ROW, seed=seed) for seed in (1, 2))),
    "of noisy documents": lambda source: ms.views.pack(source.map(shaken, random=True), ROW, lengths=LENGTHS),
}


def shaken(sample: Any, rng: np.random.Generator) -> Any:
    return {name: leaf + leaf.dtype.type(rng.integers(0, 50)) for name, leaf in sample.items()}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_arrays_give_the_batches_of_documents(name, key):
    samples = [Flat(LENGTHS)._sample(index) for index in range(len(LENGTHS))]
    plain = ms.DatasetSource(samples, "shuffle")
    expected = drawn(ms.DataLoader([VIEWS[name](plain), ms.BatchTransform(4)]), key)
    executors = [None, ms.Threads(2), *([ms.Processes(1)] if name in ("packed", "mixture") else [])]
    for executor in executors:
        view = VIEWS[name](Flat(LENGTHS, ordering="shuffle"))
        with ms.DataLoader([view, ms.BatchTransform(4)], executor=executor) as loader:
            assert_trees_equal(drawn(loader, key), expected)


def drawn(loader: Any, key: Any) -> Any:
    return [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=5)]


# What is wrong with documents


@pytest.mark.parametrize("arrays", [1, 2])
@pytest.mark.parametrize(("planned", "message"), [(4, "length 3, and 4 was"), (2, "length 3, and 2 was planned")])
def test_a_document_of_a_different_length_than_planned_is_named(arrays, planned, message):
    view = ms.views.pack(Flat([3] * 4, arrays=arrays), 4, lengths=[3, 3, planned, 3], seed=None)
    with pytest.raises(ValueError, match=rf"sample 2\['tokens'\] has {message}"):
        read(view)


@pytest.mark.parametrize("arrays", [1, 2])
@pytest.mark.parametrize(("eos", "planned"), [(None, 24), ({"tokens": 0, "vectors": 0}, 24)])
def test_a_piece_of_a_document_that_became_shorter_is_named(arrays, eos, planned):
    view = ms.views.pack(Flat([5, 20], arrays=arrays), ROW, lengths=[5, 30], seed=None, eos=eos)
    with pytest.raises(ValueError, match=rf"has length 20, and more than {planned} was planned for it"):
        read(view)


def test_numbers_that_jax_cannot_keep_are_named():
    source = Flat([3, 3, 3], np.int64)
    source._arrays[0]["tokens"][4] = 2**40
    with pytest.raises(ValueError, match=r"pack: sample 1\['tokens'\]: JAX keeps int64 as int32"):
        read(ms.views.pack(source, 3, seed=None))


def test_a_subclass_that_reads_something_else_is_read():
    class Doubled(Flat):
        def read_rows(self, indices: np.ndarray, out: Any, keys: Any = None) -> None:
            for row, index in enumerate(indices.tolist()):
                out[0][row] = {name: 2 * leaf for name, leaf in self._sample(index).items()}

    expected = read(ms.views.pack(Flat(LENGTHS), ROW))["tokens"]
    assert_trees_equal(read(ms.views.pack(Doubled(LENGTHS), ROW))["tokens"], 2 * expected)


# Sources that know where their documents lie


def token_files(folder: Any, dtype: Any) -> Any:
    for number in range(3):
        tokens = np.arange(40) % (7 + number)
        np.save(folder / f"{number}.npy", tokens.astype(dtype))
    return ms.sources.TokenFileSource(folder, end_token=0, ordering="sequential")


def lists(docs: int = 30) -> list[list[int]]:
    return [list(range(100 * number, 100 * number + number * 7 % 11)) for number in range(docs)]


def arrow(kind: str, rows: int = 30, gap: bool = False) -> Any:
    import pyarrow as pa

    values: list[Any] = lists()
    types = {"list": pa.list_(pa.int64()), "large": pa.large_list(pa.int32()), "16 bits": pa.list_(pa.uint16())}
    table = pa.table({"tokens": pa.array(values, types[kind])})
    if gap:
        values[20] = None
        table = pa.table({"tokens": pa.array(values, types[kind])})
    return pa.Table.from_batches(table.to_batches(max_chunksize=rows))


def arrow_source(table: Any) -> Any:
    from millstream.integrations.arrow import ArrowSource

    source = ArrowSource(table, ordering="sequential")
    source.lengths = np.array([len(doc) for doc in lists()])  # pyright: ignore[reportAttributeAccessIssue]
    return source


def arrow_file(folder: Any) -> Any:
    import pyarrow.feather

    path = folder / "documents.arrow"
    pyarrow.feather.write_feather(arrow("list"), path, compression="uncompressed", chunksize=7)
    return arrow_source(path)


def parquet(folder: Any) -> Any:
    import pyarrow.parquet as pq

    from millstream.integrations.parquet import ParquetSource

    pq.write_table(arrow("list"), folder / "documents.parquet", row_group_size=7)
    source = ParquetSource(folder / "documents.parquet", ordering="sequential")
    source.lengths = np.array([len(doc) for doc in lists()])  # pyright: ignore[reportAttributeAccessIssue]
    return source


def prepared(folder: Any, kind: Any) -> Any:
    documents = ms.DatasetSource([{"tokens": np.array(doc, np.int32)} for doc in lists()], "sequential")
    ms.prepare(documents, folder / "prepared", format=kind)
    return ms.sources.PreparedSource(folder / "prepared", ordering="sequential")


SOURCES = {
    "token files": lambda folder: token_files(folder, np.uint16),
    "token files of 64 bits, the other byte order": lambda folder: token_files(folder, ">i8"),
    "lists": lambda folder: arrow_source(arrow("list")),
    "large lists in batches": lambda folder: arrow_source(arrow("large", 4)),
    "lists of 16 bits in batches": lambda folder: arrow_source(arrow("16 bits", 7)),
    "an Arrow file": arrow_file,
    "Parquet": parquet,
    "prepared Arrow": lambda folder: prepared(folder, "arrow"),
    "prepared Parquet": lambda folder: prepared(folder, "parquet"),
    "prepared Megatron": lambda folder: prepared(folder, "megatron"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources_say_where_their_documents_lie(name, folder, monkeypatch):
    source = SOURCES[name](folder)
    assert_same_rows(source)
    assert_same_rows(source, eos=5, rule="concat", fill=3)
    lengths = source.lengths["tokens"] if isinstance(source.lengths, dict) else source.lengths
    view = ms.views.pack(source, ROW, lengths=lengths)

    def refuse(*_: Any) -> None:
        raise AssertionError("documents were read one by one")

    monkeypatch.setattr(source, "read_rows", refuse)
    assert (read(view)["segments"] > 0).sum() == lengths.sum()


def test_lists_with_a_gap_are_named():
    view = ms.views.pack(arrow_source(arrow("list", 7, gap=True)), ROW, seed=None)
    with pytest.raises(ValueError, match=r"sample 20\['tokens'\] needs to be an array or a list of numbers. Got None"):
        read(view)
    assert view.read(np.arange(3))["tokens"].shape == (3, ROW)
