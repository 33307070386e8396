"""Samples may have any shape until a batch is made of them: on every source and executor, and through `map`."""

import csv
import io
import sqlite3
import sys
import tarfile
from typing import Any, NamedTuple

import cloudpickle
import datasets
import hypothesis.strategies as st
import jax
import numpy as np
import pandas as pd
import PIL.Image
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import assert_trees_equal
from hypothesis import given
from test_bad_input import refuses

import millstream as ms
from millstream.integrations.arrow import ArrowSource
from millstream.integrations.huggingface import HuggingFaceSource
from millstream.integrations.pandas import PandasSource
from millstream.integrations.parquet import ParquetSource
from millstream.integrations.polars import PolarsSource
from millstream.integrations.sqlite import SqliteSource
from millstream.integrations.webdataset import WebDatasetSource

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that workers do not import it, and JAX with it

ROWS = 11
EXECUTORS = pytest.mark.parametrize("executor", [None, ms.Threads(2), ms.Processes(1)], ids=str)


def on_executors(kinds, *in_workers):
    """Every kind in threads, and those of which a worker process reads differently from others in one."""
    pairs = [(kind, executor) for kind in kinds for executor in (None, ms.Threads(2))]
    pairs += [(kind, ms.Processes(1)) for kind in in_workers]
    return pytest.mark.parametrize(("kind", "executor"), pairs, ids=str)


BIG = 2**40 + 5


def record(n):
    """Text, a list of any length, a gap, a number."""
    return {"n": n, "ids": list(range(n, n + n % 5 + 1)), "text": "w" * n, "gap": None if n % 3 == 0 else n}


def columns():
    return {name: [record(n)[name] for n in range(ROWS)] for name in record(0)}


class Torch:
    """A dataset as PyTorch has it."""

    def __len__(self):
        return ROWS

    def __getitem__(self, n):
        return {**record(n), "ids": np.array(record(n)["ids"])}


def parquet(folder):
    pq.write_table(pa.table(columns()), folder / "t.parquet", row_group_size=4)
    return ParquetSource(folder / "t.parquet", ordering="sequential")


def sqlite(folder):
    db = sqlite3.connect(folder / "t.db")
    with db:
        db.execute("CREATE TABLE t (n INTEGER, ids TEXT, text TEXT, gap INTEGER)")
        rows = [(n, " ".join(map(str, ids)), text, gap) for n, ids, text, gap in zip(*columns().values(), strict=True)]
        db.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", rows)
    db.close()
    return SqliteSource(folder / "t.db", table="t", ordering="sequential")


def comma_separated(folder):
    with open(folder / "t.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(record(0)))
        writer.writeheader()
        for n in range(ROWS):
            writer.writerow({**record(n), "ids": " ".join(map(str, record(n)["ids"]))})
    return ms.CsvSource(
        folder / "t.csv", dtype={"n": np.int32, "ids": str, "text": str, "gap": str}, ordering="sequential"
    )


def tar(folder):
    with tarfile.open(folder / "t.tar", "w") as archive:
        for n in range(ROWS):
            ids = io.BytesIO()
            np.save(ids, record(n)["ids"])
            texts = {
                "txt": record(n)["text"].encode(),
                "gap.txt": str(record(n)["gap"] or "").encode(),
                "cls": b"%d" % n,
            }
            for name, data in {"npy": ids.getvalue(), **texts}.items():
                info = tarfile.TarInfo(f"{n:04}.{name}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return WebDatasetSource(str(folder / "t.tar"), ordering="sequential")


SOURCES = {
    "dataset": lambda folder: ms.DatasetSource(Torch(), "sequential"),
    "function": lambda folder: ms.DiskSampleSource(ROWS, record, ordering="sequential"),
    "parquet": parquet,
    "arrow": lambda folder: ArrowSource(
        pa.Table.from_batches(pa.table(columns()).to_batches(max_chunksize=4)), ordering="sequential"
    ),
    "polars": lambda folder: PolarsSource(pl.DataFrame(columns()), ordering="sequential"),
    "pandas": lambda folder: PandasSource(pd.DataFrame(columns()).astype({"gap": "Int64"}), ordering="sequential"),
    "hugging face": lambda folder: HuggingFaceSource(datasets.Dataset.from_dict(columns()), ordering="sequential"),
    "sqlite": sqlite,
    "csv": comma_separated,
    "tar": tar,
}


def regular(sample):
    """Numbers of one shape, from a sample of any of the sources."""
    assert not ms.reading.is_worker() or "jax" not in sys.modules or "datasets" in sys.modules  # which loads it
    ids, gap = sample.get("ids", sample.get("npy")), sample.get("gap", sample.get("gap.txt"))
    text, number = sample.get("text", sample.get("txt")), sample.get("n", sample.get("cls"))
    ids = np.array(ids.split(), int) if isinstance(ids, str) else np.asarray(ids)
    assert ids.ndim == 1 and type(text) is str
    gap = -1 if gap in (None, "") else int(gap)
    return {"n": int(number), "ids": np.pad(ids, (0, 8 - len(ids))), "letters": len(text), "gap": gap}


def stacked(samples):
    return {name: np.stack([regular(sample)[name] for sample in samples]) for name in regular(samples[0])}


def has_gap(sample):
    return sample.get("gap", sample.get("gap.txt")) in (None, "")


def drawn(loader, key, **options):
    batches = [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), **options)]
    return {name: np.concatenate([batch[name][mask] for batch, mask in batches]) for name in batches[0][0]}


EXPECTED = {name: values.astype(np.int32) for name, values in stacked([record(n) for n in range(ROWS)]).items()}


@on_executors(SOURCES, *SOURCES)
def test_samples_reach_host_functions_as_they_are(kind, executor, folder, key):
    source = SOURCES[kind](folder)
    loader = ms.DataLoader([source, ms.HostMapTransform(regular), ms.BatchTransform(4)], executor=executor)
    assert_trees_equal(drawn(loader, key), EXPECTED)


@pytest.mark.parametrize("kind", SOURCES)
def test_collate_functions_predicates_and_subscripts_get_them_as_well(kind, folder, key):
    source = SOURCES[kind](folder)
    collated = ms.DataLoader([source, ms.BatchTransform(4, collate=stacked)])
    assert_trees_equal(drawn(collated, key), EXPECTED)
    view = ms.views.select(source, has_gap)
    assert [regular(view[place])["n"] for place in range(len(view))] == [0, 3, 6, 9]
    assert_trees_equal(
        drawn(ms.DataLoader([view.map(regular), ms.BatchTransform(4)]), key)["n"], np.array([0, 3, 6, 9], np.int32)
    )


@pytest.mark.parametrize("kind", ["parquet", "arrow", "polars", "pandas", "hugging face", "sqlite"])
def test_rows_of_tables_reach_row_functions_as_they_are(kind, folder):
    source = SOURCES[kind](folder)
    rows = type(source)  # the same table, with a function on rows
    given = {
        "parquet": folder / "t.parquet",
        "arrow": pa.table(columns()),
        "polars": pl.DataFrame(columns()),
        "pandas": pd.DataFrame(columns())
        .astype({"gap": "Int64"})
        .astype(object)
        .where(pd.DataFrame(columns()).notna(), None),
        "hugging face": datasets.Dataset.from_dict(columns()),
        "sqlite": folder / "t.db",
    }[kind]
    options = {"table": "t"} if kind == "sqlite" else {}
    assert_trees_equal(rows(given, row_fn=regular, **options).read(np.arange(ROWS)), EXPECTED)


@pytest.mark.parametrize("kind", ["dataset", "parquet", "arrow", "polars", "pandas", "hugging face"])
def test_what_nothing_makes_equal_is_refused_with_sample_and_both_shapes(kind, folder, key):
    data = {"ids": columns()["ids"]}
    options: Any = {"ordering": "sequential"}
    pq.write_table(pa.table(data), folder / "i.parquet", row_group_size=4)
    source = {
        "dataset": lambda: ms.DatasetSource([{"ids": np.array(ids)} for ids in data["ids"]], **options),
        "parquet": lambda: ParquetSource(folder / "i.parquet", **options),
        "arrow": lambda: ArrowSource(pa.table(data), **options),
        "polars": lambda: PolarsSource(pl.DataFrame(data), **options),
        "pandas": lambda: PandasSource(pd.DataFrame(data), **options),
        "hugging face": lambda: HuggingFaceSource(datasets.Dataset.from_dict(data), **options),
    }[kind]()
    loader = ms.DataLoader([source[[0, 5, 2, 4]], ms.BatchTransform(2)])
    with refuses(
        ValueError,
        "sample 2 does not match the spec",
        "found['ids']: shape (3,), int64",
        "spec['ids']:  shape (1,), int32",
        "pad it with PadTransform, or resize it in a HostMapTransform",
    ):
        drawn(loader, key)
    tolerant = loader.replace(on_error="skip item")
    assert drawn(tolerant, key)["ids"].ravel().tolist() == [0, 5]


def test_images_of_any_size_stay_images(key):
    images = [PIL.Image.new("L", (3 + n, 5), n) for n in range(6)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=6)})
    table = datasets.Dataset.from_dict({"image": images, "label": range(6)}, features=features)

    def pixel(sample):
        assert isinstance(sample["image"], PIL.Image.Image)
        return {"pixel": np.asarray(sample["image"].resize((2, 2)))[0, 0], "label": sample["label"]}

    rows = [{"image": image, "label": label} for label, image in enumerate(images)]
    for source in (ms.DatasetSource(rows), HuggingFaceSource(table)):
        for executor in (None, ms.Threads(2), *[ms.Processes(1)][: isinstance(source, HuggingFaceSource)]):
            found = drawn(ms.DataLoader([source.map(pixel), ms.BatchTransform(4)], executor=executor), key)
            np.testing.assert_array_equal(found["pixel"], found["label"])
            assert sorted(found["label"].tolist()) == list(range(6))
        with refuses(ValueError, "found['image']: shape (5,", "spec['image']:  shape (5, 3), uint8", "PadTransform"):
            drawn(ms.DataLoader([source, ms.BatchTransform(4)]), key)


def test_what_is_nothing_can_be_filled_or_is_refused(key):
    items = ms.DatasetSource([None, 5, None, 7], "sequential")
    filled = items.map(lambda item: {"x": np.int32(0 if item is None else item)})
    assert drawn(ms.DataLoader([filled, ms.BatchTransform(4)]), key)["x"].tolist() == [0, 5, 0, 7]
    with refuses(ValueError, "needs samples with at least one array. Got None", "ms.views.select"):
        ms.DataLoader([items, ms.BatchTransform(4)])


class Pair(NamedTuple):
    label: int
    pixels: np.ndarray


def test_functions_may_change_what_they_get(key):
    rows = [{"x": np.zeros(2), "deep": [np.zeros(2)], "text": "a"} for _ in range(4)]

    def change(sample):
        sample["x"] += 1
        sample["deep"][0] += 1
        sample["deep"].append(None)
        return {"sum": sample.pop("x").sum() + sample["deep"][0].sum()}

    source = ms.DatasetSource(rows).map(change)
    for _ in range(2):
        assert drawn(ms.DataLoader([source, ms.BatchTransform(4)]), key)["sum"].tolist() == [4] * 4
    assert not any(row["x"].any() or row["deep"][0].any() or len(row["deep"]) > 1 for row in rows)
    pairs = [Pair(n, np.zeros(2)) for n in range(4)]

    def shift(pair):
        assert type(pair) is Pair
        pair.pixels[:] = pair.label
        return pair

    found = ms.DatasetSource(pairs, "sequential").map(shift)
    assert [found[n].pixels.tolist() for n in range(4)] == [[n, n] for n in range(4)]
    assert not any(pair.pixels.any() for pair in pairs)


def fails_at_0(sample):
    found = regular(sample)
    if found["n"] == 0:
        raise OSError("this one is broken")
    return found


class Broken(Torch):
    def __getitem__(self, n):
        if n == 0:
            raise OSError("this one is broken")
        return {"text": "w" * n}


@on_executors(SOURCES, "dataset", "parquet", "tar")
def test_skipping_items_skips_sample_0_as_well(kind, executor, folder, key):
    loader = ms.DataLoader(
        [SOURCES[kind](folder).map(fails_at_0), ms.BatchTransform(4)], executor=executor, on_error="skip item"
    )
    assert_trees_equal(drawn(loader, key), {name: values[1:] for name, values in EXPECTED.items()})
    with refuses(OSError, "this one is broken", "HostMapTransform(fails_at_0) at sample 0"):
        loader.replace(on_error="raise")


@EXECUTORS
def test_a_broken_item_0_is_skipped_where_it_is_read(executor, folder, key):
    def rows(row):
        if row["n"] == 0:
            raise OSError("this one is broken")
        return {"n": row["n"]}

    shapes = parquet(folder)
    for source in (ms.DatasetSource(Broken()), ParquetSource(folder / "t.parquet", row_fn=rows)):
        source = source.map(lambda sample: {"n": len(sample["text"]) if "text" in sample else sample["n"]})
        loader = ms.DataLoader([source, ms.BatchTransform(4)], executor=executor, on_error="skip item")
        assert sorted(drawn(loader, key)["n"].tolist()) == list(range(1, len(shapes)))
    objects = ms.DataLoader(
        [ms.DatasetSource(Broken(), "sequential"), ms.BatchTransform(4)], executor=executor, on_error="skip item"
    )
    batch, mask = next(objects.iterate(objects.init_state(key)))
    assert (batch[0], batch[1], mask.tolist()) == (None, {"text": "w"}, [False, True, True, True])


# map


def double(sample):
    return {"x": sample["x"] * 2}


def noisy(sample, rng):
    return {"x": sample["x"] + rng.integers(0, 100)}


def numbers(ordering: Any = "shuffle"):
    return ms.HostArraySource({"x": np.arange(20, dtype=np.int32)}, ordering)


@EXECUTORS
@pytest.mark.parametrize("random", [False, True])
def test_a_map_is_the_stage_as_a_source(random, executor, key):
    fn, stage = (noisy, ms.RandomHostMapTransform) if random else (double, ms.HostMapTransform)
    batch = ms.BatchTransform(8)
    whole, weighted = numbers(), ms.views.weighted(numbers(), np.arange(20))
    for source in (weighted,) if isinstance(executor, ms.Processes) else (whole, whole[3:17:2], weighted):
        ways = [
            ms.DataLoader([source, stage(fn), batch], executor=executor),
            ms.DataLoader([source.map(fn, random=random), batch], executor=executor),
        ]
        state = ways[0].init_state(key, step=1)  # which both of them take
        found = [jax.device_get(list(way.iterate(state, steps=3))) for way in ways]
        assert_trees_equal(*found)


@given(start=st.integers(0, 10), stop=st.integers(11, 20), picks=st.lists(st.integers(0, 5), min_size=1))
def test_maps_and_views_change_places(start, stop, picks):
    source = numbers("sequential")
    known = [2 * n for n in range(20)][start:stop]
    for view in (source.map(double)[start:stop], source[start:stop].map(double)):
        assert isinstance(view, ms.views.View) and view.selection.functions == source[start:stop].selection.functions
        assert view.read(np.arange(len(view)))["x"].tolist() == known
        nested = view.map(double)[picks].map(double)
        assert isinstance(nested, ms.views.View)
        assert [nested[n]["x"] for n in range(len(nested))] == [4 * known[pick] for pick in picks]


def test_a_function_is_called_when_its_samples_are_needed(key):
    calls = []

    def seen(sample):
        calls.append(int(sample["x"]))
        return sample

    mapped = numbers("sequential").map(seen, readers=1)[5:].map(double, readers=1)
    assert calls == []
    assert mapped[2]["x"] == 14 and calls == [7]
    ms.DataLoader([mapped, ms.BatchTransform(4)])
    assert set(calls) == {5, 7}  # the first sample says what samples are


def test_maps_are_sources_like_any_other(key):
    source = numbers("sequential")
    mapped = source.map(double)
    both = ms.views.concat(mapped[:3], source[:2], mapped)
    assert both.read(np.arange(len(both)))["x"].tolist() == [0, 2, 4, 0, 1, *range(0, 40, 2)]
    pairs = ms.views.zip({"plain": source, "double": mapped[::-1]})
    assert pairs[3]["double"]["x"] == 32 and pairs[3]["plain"]["x"] == 3
    words = ms.views.zip(ms.DatasetSource(["oat", "rye", "barley"], "sequential"), source[:3])
    letters = words.map(lambda pair: {"n": len(pair[0]) + pair[1]["x"]})
    assert drawn(ms.DataLoader([letters, ms.BatchTransform(3)]), key)["n"].tolist() == [3, 4, 8]
    assert len(ms.views.select(mapped, lambda sample: sample["x"] > 20)) == 9
    joined = ms.views.concat(source, numbers("sequential"))
    parts = [ms.views.split(made, {"a": 0.5, "b": 0.5}) for made in (joined, joined.map(double))]
    for plain, changed in zip(*parts, strict=True):
        assert plain.locate(np.arange(len(plain))).tolist() == changed.locate(np.arange(len(changed))).tolist()
    loader = ms.DataLoader([mapped[::2], ms.BatchTransform(4)])
    verification = loader.verify(executors=[ms.Threads(2)], hosts=[1, 2], progress=False)
    assert {row.check: row.result for row in verification.rows}["samples"] == "ok"


def test_ragged_sources_are_joined_and_made_equal_afterwards(key):
    short, long = ([{"ids": np.arange(n)} for n in lengths] for lengths in ((1, 2), (4, 1)))
    joined = ms.views.concat(ms.DatasetSource(short, "sequential"), ms.DatasetSource(long))
    padded = joined.map(lambda sample: {"ids": np.pad(sample["ids"], (0, 4 - len(sample["ids"])))})
    assert drawn(ms.DataLoader([padded, ms.BatchTransform(4)]), key)["ids"].sum(axis=1).tolist() == [0, 1, 6, 0]
    assert drawn(ms.DataLoader([joined[[0, 3]], ms.BatchTransform(2)]), key)["ids"].shape == (2, 1)
    with refuses(
        ValueError, "concat: sample 2", "found['ids']: shape (4,)", "spec['ids']:  shape (1,)", "PadTransform"
    ):
        drawn(ms.DataLoader([joined[[0, 2]], ms.BatchTransform(2)]), key)


def test_what_is_not_a_function_of_a_sample_is_refused():
    anything: Any = 3
    with refuses(TypeError, "map needs fn to be a function"):
        numbers().map(anything)
    with refuses(TypeError, "map needs random to be a bool. Got 3"):
        numbers().map(double, random=anything)
    with refuses(ValueError, "map needs readers to be an int of at least 1"):
        numbers().map(double, readers=0)


# Integers that 32 bits do not hold


def without_jax(sample):
    assert "jax" not in sys.modules or not ms.reading.is_worker()
    return sample


def ids(n):
    return {"x": np.float32(n), "id": np.int64(BIG + n)}


def big_csv(folder):
    (folder / "b.csv").write_text("x,id\n" + "".join(f"{n},{BIG + n}\n" for n in range(6)))
    return ms.CsvSource(folder / "b.csv", dtype={"x": np.float32, "id": np.int64}, ordering="sequential")


def big_sqlite(folder):
    db = sqlite3.connect(folder / "b.db")
    with db:
        db.execute("CREATE TABLE t (x REAL, id INTEGER)")
        db.executemany("INSERT INTO t VALUES (?, ?)", [(float(n), BIG + n) for n in range(6)])
    db.close()
    return SqliteSource(folder / "b.db", table="t", ordering="sequential")


def big_npy(folder):
    for name, column in table_of_ids().items():
        np.save(folder / f"{name}.npy", column)
    return ms.NpySource({"x": folder / "x.npy", "id": folder / "id.npy"}, ordering="sequential")


def table_of_ids():
    return {name: np.array([ids(n)[name] for n in range(6)]) for name in ("x", "id")}


BIG_SOURCES = {
    "dataset": lambda folder: ms.DatasetSource([ids(n) for n in range(6)], "sequential"),
    "arrays": lambda folder: ms.HostArraySource(table_of_ids(), "sequential"),
    "arrow": lambda folder: ArrowSource(pa.table(table_of_ids()), ordering="sequential"),
    "pandas": lambda folder: PandasSource(pd.DataFrame(table_of_ids()), ordering="sequential"),
    "hugging face": lambda folder: HuggingFaceSource(datasets.Dataset.from_dict(table_of_ids()), ordering="sequential"),
    "npy": big_npy,
    "csv": big_csv,
    "sqlite": big_sqlite,
}
TAKEN = [ms.transforms.InfoTransform("id"), ms.BatchTransform(4)]


@on_executors(BIG_SOURCES, "dataset", "arrays", "arrow")
def test_wide_integers_travel_beside_the_batch(kind, executor, folder, key):
    with ms.DataLoader([BIG_SOURCES[kind](folder).map(without_jax), *TAKEN], executor=executor) as loader:
        batches = loader.iterate(loader.init_state(key), with_info=True)
        batch, _, info = next(batches)
        assert list(batch) == ["x"] and batch["x"].tolist() == [0, 1, 2, 3]
        assert info.additional == {"id": [BIG, BIG + 1, BIG + 2, BIG + 3]}
        assert np.array(info.additional["id"]).dtype == np.int64
        _, mask, info = next(loader.iterate(batches.state, with_info=True))  # resumed
    assert mask.tolist() == [True, True, False, False] and info.additional["id"] == [BIG + 4, BIG + 5, None, None]


@pytest.mark.parametrize("kind", BIG_SOURCES)
def test_functions_get_wide_integers_and_batches_refuse_them(kind, folder, key):
    source = BIG_SOURCES[kind](folder)
    assert source[5]["id"] == BIG + 5
    view = ms.views.select(source, lambda sample: sample["id"] > BIG + 3)
    assert len(view) == 2
    low = source.map(lambda sample: {"low": np.int32(sample["id"] % 2**31)})
    assert drawn(ms.DataLoader([low, ms.BatchTransform(6)]), key)["low"].tolist() == [
        (BIG + n) % 2**31 for n in range(6)
    ]
    with refuses(ValueError, "JAX keeps int64 as int32", f"{BIG}", "InfoTransform", "jax_enable_x64"):
        drawn(ms.DataLoader([source, ms.BatchTransform(2)]), key)


def test_what_travels_beside_the_batch_is_kept_with_it(folder, key):
    source = ms.DatasetSource([{**ids(n), "text": "w" * n} for n in range(6)])
    taken = ms.transforms.InfoTransform(["id", "text"])
    expected = None
    for executor, cache in (
        (None, None),
        (None, ms.BatchCache(folder / "c")),
        (ms.Processes(1), ms.BatchCache(folder / "c")),
    ):
        loader = ms.DataLoader([source, taken, ms.BatchTransform(4)], executor=executor, cache=cache)
        found = [info.additional for _, _, info in loader.iterate(loader.init_state(key), with_info=True)]
        expected = found if expected is None else expected
        assert found == expected and {len(word) + BIG for word in found[0]["text"]} == set(found[0]["id"])


def test_what_travels_beside_the_batch_reaches_no_step_and_works_on_a_mesh(key):
    source = ms.DatasetSource([ids(n) for n in range(8)], "sequential")
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for sharding in (None, mesh):
        loader = ms.DataLoader([source, *TAKEN], sharding=sharding)
        found = [info.additional["id"] for _, _, info in loader.iterate(loader.init_state(key), with_info=True)]
        assert found == [[BIG + n for n in range(4)], [BIG + n for n in range(4, 8)]]

        @jax.jit
        def step(total, batch):
            assert set(batch[0]) == {"x"}
            return ms.logs(), total + batch[0]["x"].sum()

        total = ms.train_loop(np.float32(0), loader, {ms.on_train_step: step}, stop=2, key=key).state
        assert total == 28
        _, total, _ = loader.scan_epoch(loader.init_state(key), np.float32(0), lambda t, b, _: (t + b["x"].sum(), None))
        assert total == 28


def test_joined_collated_and_repeated_samples_keep_what_is_beside_them(key):
    source = ms.DatasetSource([ids(n) for n in range(6)], "sequential")
    piped = ms.DataLoader([source[[5, 5, 0]], ms.HostMapTransform(lambda s: {**s, "y": s["x"]}), *TAKEN])
    (_, _, info), *_ = piped.iterate(piped.init_state(key), with_info=True)
    assert info.additional["id"] == [BIG + 5, BIG + 5, BIG, None]
    stack = ms.BatchTransform(3, collate=lambda samples: {"x": np.stack([sample["x"] for sample in samples])})
    collated = ms.DataLoader([source, TAKEN[0], stack])
    found = [info.additional["id"] for _, _, info in collated.iterate(collated.init_state(key), with_info=True)]
    assert found == [[BIG, BIG + 1, BIG + 2], [BIG + 3, BIG + 4, BIG + 5]]


def write_word(word, arrays, rng):
    arrays["n"][...] = len(word)
    return {"word": word}


def test_joined_sources_hand_on_what_is_beside_their_samples(key):
    fill = [ms.sources.FillSource(words, write_word, {"n": ((), np.int32)}) for words in (["oat", "rye"], ["barley"])]
    joined = ms.views.concat(*fill, ordering="sequential")
    zipped = ms.views.zip(joined, numbers()[:3], ordering="sequential")
    for source in (joined, joined[::-1], zipped, zipped.map(lambda pair: pair[1])):
        loader = ms.DataLoader([source, ms.BatchTransform(3)])
        _, _, info = next(loader.iterate(loader.init_state(key), with_info=True))
        assert sorted(info.additional["word"]) == ["barley", "oat", "rye"]


def test_fields_that_cannot_be_taken_are_refused(key):
    anything: Any = 3
    source = ms.DatasetSource([{"x": 1.0, "image": PIL.Image.new("L", (2, 2))}] * 3)
    with refuses(TypeError, "InfoTransform('id') needs samples that are dicts with 'id' in them", "Sample 0 is {'x'"):
        ms.DataLoader([source, *TAKEN])
    with refuses(TypeError, "InfoTransform('image'), at sample 0, can send back arrays and plain values", "['image']"):
        ms.DataLoader([source, ms.transforms.InfoTransform("image"), ms.BatchTransform(2)])
    with refuses(ValueError, "needs samples with at least one array. Got {}"):
        ms.DataLoader([source, ms.HostMapTransform(lambda s: {"x": s["x"]}), ms.transforms.InfoTransform("x")])
    with refuses(TypeError, "InfoTransform needs fields to be a list of names"):
        ms.transforms.InfoTransform(anything)
    with refuses(ValueError, "InfoTransform needs at least one field"):
        ms.transforms.InfoTransform([])
    with refuses(TypeError, "InfoTransform works on samples as they are read", "Move it up."):
        ms.DataLoader([source.map(lambda s: s["x"]), ms.BatchTransform(2), ms.transforms.InfoTransform("x")])


# Programs of PyTorch, of which the loader lines are ours


class Reviews:
    """A ragged dataset of text."""

    def __init__(self, texts, labels):
        self.texts, self.labels = texts, labels
        self.vocabulary = {
            word: number + 1 for number, word in enumerate(sorted({w for t in texts for w in t.split()}))
        }

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return [self.vocabulary[word] for word in self.texts[index].split()], self.labels[index]


def pad_collate(batch, longest=6):
    ids = np.zeros((len(batch), longest), np.int64)
    for row, (tokens, _) in enumerate(batch):
        ids[row, : len(tokens)] = tokens
    return ids, np.array([label for _, label in batch])


@EXECUTORS
def test_the_text_of_a_torch_user(executor, key):
    texts = ["a fine mill", "no", "grain and water and wind", "so so", "stones turn", "never again please"]
    dataset = Reviews(texts, [1, 0, 1, 0, 1, 0])
    loader = ms.DataLoader([ms.DatasetSource(dataset), ms.BatchTransform(4, collate=pad_collate)], executor=executor)
    seen = {}
    for (tokens, labels), mask, info in loader.iterate(loader.init_state(key), with_info=True):
        for row in np.flatnonzero(mask):
            found = [int(token) for token in tokens[row] if token]
            seen[int(info.indices[row])] = found, int(labels[row])
    assert seen == {index: dataset[index] for index in range(len(dataset))}


class Resize:
    def __init__(self, size):
        self.size = size

    def __call__(self, image):
        return image.resize(self.size[::-1])


class ToTensor:
    def __call__(self, image):
        return np.asarray(image, np.float32).transpose(2, 0, 1) / 255


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = (np.array(value, np.float32)[:, None, None] for value in (mean, std))

    def __call__(self, pixels):
        return (pixels - self.mean) / self.std


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, value):
        for transform in self.transforms:
            value = transform(value)
        return value


class Flowers:
    """Images of several sizes, and a transform, as in torchvision's datasets."""

    def __init__(self, transform=None):
        self.transform = transform

    def __len__(self):
        return 10

    def __getitem__(self, index):
        image = PIL.Image.new("RGB", (20 + index, 30 - index), (25 * index, 0, 255))
        return image if self.transform is None else self.transform(image), index % 2


@EXECUTORS
def test_the_images_of_a_torchvision_user(executor, key):
    transform = Compose([Resize((8, 6)), ToTensor(), Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))])
    inside = ms.DatasetSource(Flowers(transform))
    after = ms.DatasetSource(Flowers()).map(lambda pair: (transform(pair[0]), pair[1]))
    batches = []
    for source in (inside, after):
        loader = ms.DataLoader([source, ms.BatchTransform(4)], executor=executor)
        batches.append(jax.device_get(list(loader.iterate(loader.init_state(key)))))
        (images, labels), _ = batches[-1][0]
        assert images.shape == (4, 3, 8, 6) and images.dtype == np.float32 and labels.shape == (4,)
        assert np.ptp(images[0], axis=(1, 2)).max() == 0 and images[0, 2, 0, 0] == 2
    assert_trees_equal(*batches)


def test_a_sample_that_raises_once_leaves_the_fingerprint_as_it_is():
    """A run saved in that moment was refused when it was resumed: its contents were hashed in a different form."""
    failing = []

    def read(index):
        if failing:
            raise failing.pop()
        return {"x": np.full(2, index, np.float32)}

    source = ms.DiskSampleSource(5, read)
    healthy = ms.DataLoader([source, ms.BatchTransform(2)]).contents()
    failing.append(OSError("gone for a moment"))
    assert ms.DataLoader([source, ms.BatchTransform(2)]).contents() == ()  # unknown, and not different
    assert ms.DataLoader([source, ms.BatchTransform(2)]).contents() == healthy != ()


def test_reading_ahead_that_memory_cannot_hold_says_what_to_change(key):
    source = ms.DiskSampleSource(5, lambda index: {"x": np.zeros(2**18, np.float32)}, prefetch_size=2**31 - 1)
    loader = ms.DataLoader([source, ms.BatchTransform(2)])
    with pytest.raises(
        MemoryError, match=r"batches of 2\.1 MB each, which there is not\. Pass a smaller prefetch= to the"
    ):
        next(loader.iterate(loader.init_state(key)))
