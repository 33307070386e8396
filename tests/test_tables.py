"""Tables as sources: frames of Polars and pandas, tables and files of Arrow, Parquet files."""

import collections
import datetime
import itertools
import os
import shutil
import subprocess
import sys
import threading
import tracemalloc
from typing import Any

import cloudpickle
import jax
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from conftest import CACHE, assert_trees_equal
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from loopback import Loopback
from test_bad_input import refuses

import millstream as ms
from millstream.errors import FileChanged
from millstream.files import arrow_memory, remote_options
from millstream.integrations import cloud
from millstream.integrations.arrow import ArrowSource
from millstream.integrations.pandas import PandasRows, PandasSource
from millstream.integrations.parquet import ParquetSource
from millstream.integrations.polars import PolarsSource

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that workers do not import it, and JAX with it

ROWS = 11
DTYPES = [
    *(
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
    ),
]


def numbers():
    """A column of every kind of number, and the row number."""
    random = np.random.default_rng(0)
    columns = {name: random.integers(0, 2 if name == "bool" else 100, ROWS).astype(name) for name in DTYPES}
    return {**columns, "label": np.arange(ROWS, dtype=np.int32)}


def written(path, table, rows=4, **options):
    """A table as a file, by the name of the file, in chunks of that many rows."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows, **options)
    else:
        with pa.ipc.new_file(path, table.schema, **options) as file:
            file.write_table(table, max_chunksize=rows)
    return path


def compressed(path, table):
    return written(path, table, options=pa.ipc.IpcWriteOptions(compression="zstd"))


SOURCES = {
    "polars": lambda table, folder, **options: PolarsSource(pl.DataFrame(table), **options),
    "pandas": lambda table, folder, **options: PandasSource(table.to_pandas(), **options),
    "pandas of Arrow": lambda table, folder, **options: PandasSource(
        table.to_pandas(types_mapper=pd.ArrowDtype), **options
    ),
    "table": lambda table, folder, **options: ArrowSource(
        pa.Table.from_batches(table.to_batches(max_chunksize=4)), **options
    ),
    "slice": lambda table, folder, **options: ArrowSource(pa.concat_tables([table] * 3).slice(ROWS, ROWS), **options),
    "file": lambda table, folder, **options: ArrowSource(written(folder / "t.arrow", table), **options),
    "compressed": lambda table, folder, **options: ArrowSource(compressed(folder / "z.arrow", table), **options),
    "parquet": lambda table, folder, **options: ParquetSource(written(folder / "t.parquet", table), **options),
    "parquet, passing": lambda table, folder, **options: ParquetSource(
        written(folder / "p.parquet", table), cache_bytes=100, **options
    ),
}
COUNTING = pa.proxy_memory_pool(pa.default_memory_pool())  # never collected: threads of pyarrow use it to the end
IN_CHUNKS = ["table", "file", "compressed", "parquet", "parquet, passing"]


@pytest.fixture(params=SOURCES)
def make(request, folder):
    return lambda table, **options: SOURCES[request.param](table, folder, **options)


@pytest.fixture(params=IN_CHUNKS)
def make_chunked(request, folder):
    return lambda table, **options: SOURCES[request.param](table, folder, **options)


def nested(dtype=np.float32):
    """Three kinds of lists, and the arrays that they are."""
    random = np.random.default_rng(1)
    flat, deep = random.random((ROWS, 3)).astype(dtype), random.random((ROWS, 2, 3)).astype(dtype)
    kind = pa.from_numpy_dtype(dtype)
    columns = {
        "fixed": pa.array(flat.tolist(), pa.list_(kind, 3)),
        "any": pa.array(flat.tolist(), pa.list_(kind)),
        "deep": pa.array(deep.tolist(), pa.list_(pa.list_(kind), 2)),
    }
    return pa.table(columns), {"fixed": flat, "any": flat, "deep": deep}


def test_numbers_of_every_kind_stay_what_they_are(make):
    source, expected = make(pa.table(numbers())), numbers()
    order = np.array([10, 3, 3, 0, 7])
    with jax.numpy_dtype_promotion("standard"):
        canonical = {
            name: column[order].astype(jax.dtypes.canonicalize_dtype(column.dtype)) for name, column in expected.items()
        }
    assert len(source) == ROWS
    assert_trees_equal(source.read(order), canonical)


def test_lists_become_axes(make):
    table, expected = nested()
    order = np.array([8, 0, 10])
    assert_trees_equal(make(table).read(order), {name: array[order] for name, array in expected.items()})


@pytest.mark.parametrize("name", ["polars", "pandas of Arrow", "table", "file", "parquet"])
def test_empty_lists_are_axes_without_values(name, folder):
    kind = pa.list_(pa.list_(pa.int32()))
    source = SOURCES[name](pa.table({"x": pa.array([[]] * ROWS, kind), "label": np.arange(ROWS)}), folder)
    assert source.read(np.array([3, 5]))["x"].shape == (2, 0, 0)


def test_no_rows_are_read_as_no_rows(make):
    assert make(pa.table(numbers())).read(np.arange(0))["label"].shape == (0,)


def test_tensors_keep_their_shape(folder):
    arrays = np.arange(ROWS * 6, dtype=np.int32).reshape(ROWS, 2, 3)
    plain = pa.FixedShapeTensorArray.from_numpy_ndarray(arrays)
    turned = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int32(), (2, 3), permutation=[1, 0]), plain.storage
    )
    table = pa.table({"plain": plain, "turned": turned})
    for source in (ArrowSource(table), ArrowSource(written(folder / "t.arrow", table))):
        found = source.read(np.array([9, 2]))
        np.testing.assert_array_equal(found["plain"], arrays[[9, 2]])
        np.testing.assert_array_equal(found["turned"], arrays[[9, 2]].transpose(0, 2, 1))


def test_numbers_that_jax_cannot_keep_are_refused(make):
    source = make(pa.table({"big": np.array([1] * 10 + [2**40])}))
    assert source.read(np.array([0]))["big"].dtype == np.int32
    with refuses(ValueError, "['big']: JAX keeps int64 as int32", str(2**40)):
        source.read(np.array([3, 10]))


def test_a_missing_value_is_none_and_refused_in_a_batch(make):
    source = make(pa.table({"x": pa.array([1] * 9 + [None, 2], pa.int32()), "y": np.arange(ROWS)}))
    if isinstance(source, PandasSource) and source[9]["x"] is not None:  # where it has become NaN, unless it says Int32
        source = PandasSource(pd.DataFrame({"x": pd.array([1] * 9 + [None, 2], "Int32")}))
    assert source[9]["x"] is None and source[10]["x"] == 2
    assert source.read(np.array([10, 1]))["x"].tolist() == [2, 1]
    with refuses(ValueError, "sample 9 does not match the spec", "found['x']: None", "Fill the gap"):
        source.read(np.array([1, 9]))


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "pandas"])  # which has NaN there
def test_a_missing_value_inside_of_lists_is_refused_by_sample(name, folder):
    lists = [[[1, 2]]] * 9 + [[[3, None]], [[5, 6]]]
    source = SOURCES[name](pa.table({"x": pa.array(lists, pa.list_(pa.list_(pa.int32()), 1))}), folder)
    assert source.read(np.array([10, 8]))["x"].tolist() == [[[5, 6]], [[1, 2]]]
    with refuses(ValueError, "sample 9 does not match the spec", "spec['x']:  shape (1, 2), int32"):
        source.read(np.array([10, 9]))


def test_lists_of_another_length_are_refused_by_sample(make):
    source = make(pa.table({"x": pa.array([[1, 2]] * 9 + [[3], [5, 6]], pa.list_(pa.int32()))}))
    assert source[9]["x"].tolist() == [3] and source[9]["x"].dtype == np.int32
    assert source.read(np.array([10, 2]))["x"].tolist() == [[5, 6], [1, 2]]
    found, expected = "found['x']: shape (1,), int32", "spec['x']:  shape (2,), int32"
    with refuses(ValueError, "sample 9 does not match the spec", found, expected, "PadTransform"):
        source.read(np.array([10, 9]))


def test_what_is_missing_in_a_frame_is_none():
    for column in (
        pd.array([1, 2, None], dtype="Int32"),
        pd.array([True, False, None], dtype="boolean"),
        pd.array(["a", "b", None], dtype="string"),
        pd.Categorical(["a", "b", None]),
        pd.array([1.5, 2.5, None], dtype=pd.ArrowDtype(pa.float32())),
        [np.zeros(2), np.zeros(2), None],
    ):
        source = PandasSource(pd.DataFrame({"x": column}))
        assert source[2]["x"] is None and source[1]["x"] is not None


def test_nan_is_a_number(make):
    values = np.array([np.nan] * ROWS, np.float32)
    assert np.isnan(make(pa.table({"x": pa.array(values, from_pandas=False)})).read(np.arange(ROWS))["x"]).all()


WORDS = pa.table(
    {
        "text": [f"word {number}" for number in range(ROWS)],
        "day": [datetime.date(2024, 1, 1 + number) for number in range(ROWS)],
        "some": pa.array([None if number % 2 else number for number in range(ROWS)], pa.int64()),
        "many": [list(range(number)) for number in range(ROWS)],
    }
)


@pytest.mark.parametrize("column", ["text", "day"])
def test_text_and_dates_stay_what_they_are(make, column, key):
    source = make(WORDS, columns=[column], ordering="sequential")
    assert source[3] == {column: WORDS[column][3].as_py()}
    loader = ms.DataLoader([source, ms.BatchTransform(2)])
    assert next(loader.iterate(loader.init_state(key)))[0][1] == {column: WORDS[column][1].as_py()}


def lengths(row):
    assert row["some"] is None or row["some"] % 2 == 0 or row["some"] != row["some"]
    return {"letters": np.int32(len(row["text"])), "day": np.int32(row["day"].day), "many": np.int32(len(row["many"]))}


def test_a_row_function_takes_what_is_no_number(make):
    source = make(WORDS, row_fn=lengths)
    found = source.read(np.array([10, 0, 4]))
    assert_trees_equal(
        found,
        {
            "letters": np.array([7, 6, 6], np.int32),
            "day": np.array([11, 1, 5], np.int32),
            "many": np.array([10, 0, 4], np.int32),
        },
    )


def test_an_error_of_a_row_function_names_the_sample(make):
    source = make(WORDS, row_fn=lambda row: {"x": np.int32(1 // (row["day"].day - 9))})
    with refuses(ZeroDivisionError, "the row_fn of", "at sample 8"):
        source.read(np.array([3, 8]))


def test_categories_become_codes_where_those_are_fixed():
    kind = pl.Enum(["low", "high"])
    enum = PolarsSource(pl.DataFrame({"x": pl.Series(["high", "low", "high"], dtype=kind)}))
    assert enum.read(np.arange(3))["x"].tolist() == [1, 0, 1]
    categories = PandasSource(pd.DataFrame({"x": pd.Categorical(["b", "a", "b"], categories=["b", "a"])}))
    assert categories.read(np.arange(3))["x"].tolist() == [0, 1, 0]
    assert PolarsSource(pl.DataFrame({"x": pl.Series(["a"], dtype=pl.Categorical)}))[0] == {"x": "a"}
    assert ArrowSource(pa.table({"x": pa.array(["a"]).dictionary_encode()}))[0] == {"x": "a"}


def test_encoded_numbers_are_decoded(folder):
    table = pa.table({"x": pa.array([7, 9, 7] * 4, pa.int32()).dictionary_encode()})
    for source in (ArrowSource(table), ParquetSource(written(folder / "t.parquet", table))):
        assert source.read(np.array([4, 0]))["x"].tolist() == [9, 7]


@pytest.mark.parametrize(
    "kind", [pa.time32("s"), pa.duration("s"), pa.timestamp("us", "UTC"), pa.decimal128(5, 2), pa.null(), pa.binary()]
)
def test_columns_of_nothing_make_no_batch(kind):
    source = ArrowSource(pa.table({"x": pa.nulls(3, kind)}))
    assert source[1] == {"x": None}
    with refuses(ValueError, "ArrowSource needs samples with at least one array. Got {'x': None}"):
        ms.DataLoader([source, ms.BatchTransform(2)])


def test_names_with_dots_are_names(make):
    table = pa.table({"a": np.arange(ROWS), "a.b": -np.arange(ROWS), "c.d": np.arange(ROWS) % 3})
    assert make(table, columns=["a"]).read(np.array([4]))["a"].tolist() == [4]
    assert make(table).read(np.array([4]))["a.b"].tolist() == [-4]


def test_wrong_columns_are_refused(make):
    table = pa.table(numbers())
    with refuses(TypeError, "needs a list of columns", "write ['label']"):
        make(table, columns="label")
    with refuses(ValueError, "Column 'lable' is there 0 times", "'bool'"):
        make(table, columns=["lable"])
    with refuses(ValueError, "Column 'label' is there 1 times and asked for 2 times"):
        make(table, columns=["label", "label"])
    with refuses(ValueError, "needs at least one column"):
        make(table, columns=[])
    with refuses(TypeError, "needs a list of columns. Got 3 (int)"):
        make(table, columns=3)
    assert list(make(table, columns=["label", "int8"]).read(np.arange(2))) == ["int8", "label"]


def test_tables_without_rows_are_refused(folder):
    names = ["polars", "pandas", "pandas of Arrow", "file", "parquet"]
    for kind, name in itertools.product([pa.int32(), pa.list_(pa.int32())], names):
        with refuses(ValueError, "Source needs at least one row"):
            SOURCES[name](pa.table({"x": pa.array([], kind)}), folder)
    with refuses(ValueError, "ArrowSource needs at least one row"):
        ArrowSource(pa.table({"x": pa.array([], pa.int32())}))


def test_other_things_are_refused():
    lazy: Any = pl.LazyFrame({"x": [1]})
    with refuses(TypeError, "PolarsSource needs a DataFrame", "frame.collect()"):
        PolarsSource(lazy)
    kind: Any
    for kind in (PolarsSource, PandasSource, PandasRows):
        with refuses(TypeError, f"{kind.__name__} needs a", "DataFrame", "Got 3 (int)"):
            kind(3)
    for kind in (ArrowSource, ParquetSource):
        with refuses(TypeError, f"{kind.__name__} needs a path, or a list of paths", "Got 3 (int)"):
            kind(3)
        with refuses(TypeError, f"{kind.__name__} needs a path, or a list of paths", "{'t.parquet'} (set)"):
            kind({"t.parquet"})  # whose order is another one in every process
    with refuses(TypeError, "PandasSource needs columns with text as names", "Got 0 (int)"):
        PandasSource(pd.DataFrame(np.zeros((2, 2))))
    with refuses(ValueError, "ParquetSource needs cache_bytes"):
        ParquetSource("t.parquet", cache_bytes=-1)


@pytest.mark.parametrize(
    "kind, package",
    [(PolarsSource, "polars"), (PandasSource, "pandas"), (ArrowSource, "pyarrow"), (ParquetSource, "pyarrow")],
)
def test_a_missing_package_says_how_to_install_it(kind, package, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    with refuses(ImportError, f"{kind.__name__} needs {package}. Run: pip install '{package}>="):
        kind("x")


# Files.


def parts(folder, suffix=".parquet", sizes=(4, 5, 2)):
    """The table of numbers in several files."""
    table, start = pa.table(numbers()), 0
    for number, size in enumerate(sizes):
        written(folder / f"part-{number}{suffix}", table.slice(start, size), 3)
        start += size
    return folder


@pytest.mark.parametrize("kind, suffix", [(ParquetSource, ".parquet"), (ArrowSource, ".arrow")])
def test_many_files_are_one_table(kind, suffix, folder):
    parts(folder, suffix)
    (folder / f"_part{suffix}").write_text("of another program")
    paths = sorted(folder.glob("part*"))
    for source in (kind(folder), kind(str(folder / f"p*{suffix}")), kind(paths), kind([paths[0], *paths[1:]])):
        assert source.read(np.arange(ROWS))["label"].tolist() == list(range(ROWS))
    assert kind(paths[::-1], ["label"]).read(np.arange(ROWS))["label"].tolist() == [9, 10, *range(4, 9), *range(4)]


@pytest.mark.parametrize("kind, suffix", [(ParquetSource, ".parquet"), (ArrowSource, ".arrow")])
def test_a_folder_is_read_without_what_programs_keep_for_themselves(kind, suffix, folder):
    parts(folder, suffix)
    for name in ("_temporary/0", ".ipynb_checkpoints"):
        (folder / name).mkdir(parents=True)
        parts(folder / name, suffix)
    (folder / f"part-9{suffix}").mkdir()  # some programs write folders of parts that are named like a file
    written(folder / f"part-9{suffix}" / f"part-0{suffix}", pa.table(numbers()))
    assert len(kind(folder)) == 2 * ROWS


@pytest.mark.parametrize("kind, suffix", [(ParquetSource, ".parquet"), (ArrowSource, ".arrow")])
def test_a_column_that_is_twice_in_one_of_several_files_is_named(kind, suffix, folder):
    one = written(folder / f"one{suffix}", pa.table({"x": [1, 2], "y": [1, 2]}))
    other = written(folder / f"other{suffix}", pa.table([[3], [3], [3]], names=["x", "y", "y"]))
    for columns in (None, ["y"]):
        with refuses(ValueError, "the same columns in all files", "'y': int64 and int64, int64"):
            kind([one, other], columns)
    assert kind([one, other], ["x"]).read(np.arange(3))["x"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind, suffix", [(ParquetSource, ".parquet"), (ArrowSource, ".arrow")])
def test_files_that_disagree_are_shown_side_by_side(kind, suffix, folder):
    parts(folder, suffix, (4, 7))
    written(folder / f"part-2{suffix}", pa.table({"label": np.arange(3.0), "int8": np.arange(3, dtype=np.int8)}))
    with refuses(
        ValueError,
        "the same columns in all files",
        f"part-0{suffix} and",
        f"part-2{suffix}",
        "'label': int32 and double",
    ):
        kind(folder)
    assert len(kind(folder, ["int8"])) == ROWS + 3


def test_paths_that_lead_nowhere_are_named(folder):
    for kind, suffix in ((ParquetSource, ".parquet"), (ArrowSource, ".arrow")):
        with refuses(FileNotFoundError, f"needs files named {suffix}", str(folder)):
            kind(folder)
        with refuses(FileNotFoundError, f"{folder}/*{suffix} does not exist"):
            kind(f"{folder}/*{suffix}")
        with refuses(ValueError, "needs at least one file"):
            kind([])


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_file_that_is_cut_short_is_named(suffix, folder):
    kind = {".parquet": ParquetSource, ".arrow": ArrowSource}[suffix]
    whole = written(folder / f"whole{suffix}", pa.table(numbers())).read_bytes()
    path = folder / f"cut{suffix}"
    for size in [*range(0, 64), *range(64, len(whole) - 1, 97), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with refuses(ValueError, str(path), "damaged, cut short, or no"):
            kind(path)


def test_a_flipped_bit_in_a_file_with_checksums_is_named_or_harmless(folder):
    path = written(folder / "whole.parquet", pa.table(numbers()), write_page_checksum=True)
    whole, found = path.read_bytes(), collections.Counter()
    damaged = folder / "damaged.parquet"
    expected = ParquetSource(path, ["label", "float64"]).read(np.arange(ROWS))
    pages = len(whole) - int.from_bytes(whole[-8:-4], "little") - 8  # the footer, which has no checksum, begins here
    for place in range(4, pages, 13):
        damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        try:
            assert_trees_equal(ParquetSource(damaged, ["label", "float64"]).read(np.arange(ROWS)), expected)
            found["harmless"] += 1
        except ValueError as error:
            assert str(damaged) in str(error), error
            found["named"] += 1
    assert found["named"] > 10, found


def test_a_flipped_bit_in_an_arrow_file_never_ends_the_process(folder):
    """Arrow has no checksums. But lengths that lead out of the file ended the interpreter with SIGSEGV."""
    table = pa.table({"ids": [list(range(row % 7)) for row in range(20)], "text": [str(row) for row in range(20)]})
    whole, found = written(folder / "whole.arrow", table).read_bytes(), collections.Counter()
    damaged = folder / "damaged.arrow"
    for place, bit in itertools.product(range(8, len(whole), 5), (0, 7)):
        damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        try:
            source = ArrowSource(damaged, ordering="sequential")
            found[len([source[row] for row in range(len(source))])] += 1
        except ValueError as error:
            assert str(damaged) in str(error) or "ArrowSource" in str(error), error
            found["named"] += 1
    assert found["named"] > 100, found


def rewritten(path):
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))


def replaced(path):
    other = path.with_suffix(".new")
    shutil.copy2(path, other)  # of the same size and time
    other.replace(path)


def truncated(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("change", [rewritten, replaced, truncated, os.remove])
@pytest.mark.parametrize("kind, suffix", [(ParquetSource, ".parquet"), (ArrowSource, ".arrow")])
def test_a_file_that_changes_under_way_is_named(kind, suffix, change, folder, key):
    folder = parts(folder, suffix)
    source = kind(folder, ["label"], ordering="sequential", cache_bytes=0)
    loader = ms.DataLoader([source, ms.BatchTransform(2)], executor=ms.Threads(1), prefetch=1)
    with loader.iterate(loader.init_state(key)) as batches:
        next(batches)
        change(folder / f"part-2{suffix}")
        with refuses(FileChanged, f"part-2{suffix}"):
            for _ in batches:
                pass
    if kind is ParquetSource:
        with refuses(OSError, "samples 9 to 10", f"part-2{suffix}"):
            source.read(np.array([10]))


def test_thousands_of_files_need_no_descriptors(folder):
    for number in range(40):
        written(folder / f"{number:03}.parquet", pa.table({"x": np.full(3, number)}))
        written(folder / f"{number:03}.arrow", pa.table({"x": np.full(3, number)}))
    before = len(os.listdir("/proc/self/fd"))
    sources = [ParquetSource(folder), ArrowSource(folder)]
    copies = [cloudpickle.loads(cloudpickle.dumps(source)) for source in sources]
    for source in (*sources, *copies):
        assert source.read(np.arange(120))["x"].tolist() == np.repeat(np.arange(40), 3).tolist()
        assert len(os.listdir("/proc/self/fd")) < before + 10


def test_a_copy_carries_paths_and_no_data(folder):
    table = pa.table({"x": np.arange(50_000), "y": np.random.default_rng(0).random(50_000)})
    for path in (written(folder / "t.parquet", table, 5000), written(folder / "t.arrow", table, 5000)):
        source = (ParquetSource if path.suffix == ".parquet" else ArrowSource)(path)
        source.read(np.arange(0, 50_000, 100))
        data = cloudpickle.dumps(source)
        assert len(data) < 5000
        assert_trees_equal(cloudpickle.loads(data).read(np.array([49_999])), source.read(np.array([49_999])))


def test_parquet_holds_no_more_than_it_may(folder):
    values, limit = np.arange(4 << 20, dtype=np.int32), 512 << 10  # 64 groups of 256 KB
    path = written(folder / "t.parquet", pa.table({"x": values}), len(values) // 64, use_dictionary=False)
    source = ParquetSource(path, cache_bytes=limit)
    usual = pa.default_memory_pool()
    pa.set_memory_pool(COUNTING)
    tracemalloc.start()
    try:
        for number in range(4):
            order = np.random.default_rng(number).integers(0, len(values), 256)
            np.testing.assert_array_equal(source.read(order)["x"], values[order])
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)
    assert source._table._chunks._cache.nbytes <= limit  # pyright: ignore[reportAttributeAccessIssue]
    assert COUNTING.max_memory() + held < values.nbytes / 2


def test_parquet_decodes_a_group_once_while_it_is_kept(folder, monkeypatch):
    reads = []
    read = pq.ParquetFile.read_row_groups

    def counted(self, groups, **options):
        reads.extend(groups)
        return read(self, groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", counted)
    table = pa.table({"x": np.arange(100)})
    source = ParquetSource(written(folder / "t.parquet", table, 10))
    threads = [threading.Thread(target=lambda: source.read(np.arange(100))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(reads) in (list(range(10)), [0, *range(10)])  # the first was looked at for the spec
    reads.clear()
    small = ParquetSource(folder / "t.parquet", cache_bytes=400)  # five groups
    for indices in (np.arange(50), np.arange(30), np.arange(60), np.arange(20, 60)):
        assert small.read(indices)["x"].tolist() == indices.tolist()
    assert collections.Counter(reads) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}


@pytest.mark.parametrize("kind, suffix", [(ParquetSource, ".parquet"), (ArrowSource, ".arrow")])
def test_files_of_other_machines_are_read_and_watched(kind, suffix, folder, monkeypatch):
    monkeypatch.setattr(remote_options, "_configured", {})
    cloud.configure(cache_folder=folder / "cache", cache_limit=0, retries=0)
    table = pa.table({"x": np.arange(5000, dtype=np.int32), "y": np.random.default_rng(0).random(5000)})
    body = written(folder / f"t{suffix}", table, 500).read_bytes()
    server = Loopback()
    try:
        url = server.put(f"/t{suffix}", body)
        source = kind(url, ["x"], cache_bytes=0)
        order = np.array([4999, 17, 2500, 17])
        assert source.read(order)["x"].tolist() == order.tolist()
        assert cloudpickle.loads(cloudpickle.dumps(source)).read(order)["x"].tolist() == order.tolist()
        server.put(f"/t{suffix}", body[::-1])
        with refuses(FileChanged, url, "samples 4500 to 4999"):
            source.read(np.array([4600]))
    finally:
        server.close()


# Streams.


def epochs(loader, key, steps):
    return [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=steps)]


def loader_of(source, executor=None):
    return ms.DataLoader([source, ms.BatchTransform(4)], executor=executor, prefetch=2)


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in ("pandas of Arrow", "slice", "compressed")])
def test_every_executor_gives_the_same_stream(name, folder, key):
    columns = numbers()
    source = SOURCES[name](pa.table(columns), folder)
    expected = epochs(loader_of(ms.HostArraySource(columns)), key, 7)
    for executor in (None, ms.Threads(3), ms.Processes(2 if name == "parquet" else 1)):
        assert_trees_equal(epochs(loader_of(source, executor), key, 7), expected)


def no_jax(row):
    return {"letters": np.int32(len(row["text"])), "jax": np.bool_("jax" in sys.modules)}


@pytest.mark.parametrize("name", ["polars", "parquet"])
def test_workers_call_row_functions_without_jax(name, folder, key):
    source = SOURCES[name](WORDS, folder, row_fn=no_jax)
    for batch, mask in epochs(loader_of(source, ms.Processes(1)), key, 3):
        assert not batch["jax"].any()
        assert set(batch["letters"][mask].tolist()) <= {6, 7}


def test_a_stream_goes_on_where_it_was(make, key):
    loader = loader_of(make(pa.table(numbers())))
    expected = epochs(loader, key, 8)
    for step in range(8):
        state = loader.init_state(key, step=step)
        assert_trees_equal([jax.device_get(pair) for pair in loader.iterate(state, steps=8 - step)], expected[step:])


def test_an_epoch_has_every_row_once(make, key):
    loader = loader_of(make(pa.table(numbers())))
    pairs = epochs(loader, key, 2 * loader.steps_per_epoch)
    labels = np.concatenate([batch["label"][mask] for batch, mask in pairs])
    assert collections.Counter(labels.tolist()) == dict.fromkeys(range(ROWS), 2)


def test_a_missing_value_costs_a_tolerant_stream_its_row_and_nothing_else(make_chunked, key):
    lists = pa.array([[1, 2]] * 6 + [[3, None]] + [[5, 6]] * 4, pa.list_(pa.int32()))
    source = make_chunked(pa.table({"x": lists, "label": np.arange(ROWS, dtype=np.int32)}), ordering="sequential")
    loader = ms.DataLoader([source, ms.BatchTransform(4)], on_error="skip item")
    seen = [batch["label"][mask] for batch, mask in epochs(loader, key, 3)]
    assert np.concatenate(seen).tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10]


def test_samples_can_be_any_objects(make, key):
    source = make(WORDS, row_fn=lambda row: row["text"], ordering="sequential")
    for executor in (None, ms.Threads(2)):
        loader = ms.DataLoader([source, ms.BatchTransform(4)], executor=executor)
        batch, _ = next(loader.iterate(loader.init_state(key)))
        assert batch == ["word 0", "word 1", "word 2", "word 3"]


# Rows of pandas.


def fill(row, arrays, rng):
    arrays["label"][...] = row["label"]
    return {"text": row["text"]}


def test_rows_of_a_frame_are_items(key):
    frame = pd.DataFrame(
        {"text": [f"word {number}" for number in range(ROWS)], "label": np.arange(ROWS, dtype=np.int8)}
    )
    frame.index = pd.Index(np.arange(ROWS)[::-1])  # rows are counted, whatever the index says
    rows = PandasRows(frame)
    assert len(rows) == ROWS and rows[np.int64(3)] == {"text": "word 3", "label": 3} and rows[-1]["text"] == "word 10"
    assert type(rows[0]["label"]) is np.int8
    assert [row["label"] for row in rows[2:8:2]] == [2, 4, 6] and len(rows[2:8:2]) == 3
    with refuses(IndexError):
        rows[ROWS]
    source = ms.sources.FillSource(rows, fill, {"label": ((), np.int32)}, ordering="sequential")
    loader = ms.DataLoader([source, ms.BatchTransform(4)], executor=ms.Processes(1))
    seen = [
        (batch["label"].tolist(), info.additional["text"])
        for batch, mask, info in loader.iterate(loader.init_state(key), with_info=True)
    ]
    assert seen[0] == ([0, 1, 2, 3], ["word 0", "word 1", "word 2", "word 3"])
    numbers_only = ms.DatasetSource(PandasRows(frame, ["label"]), "sequential")
    assert numbers_only.read(np.array([4, 1]))["label"].tolist() == [4, 1]


def test_rows_reach_workers_through_shared_memory():
    words = pd.array(["a long word"] * 10_000, dtype="string[pyarrow]")  # of themselves only later versions choose it
    frame = pd.DataFrame({"text": words, "x": np.arange(10_000)})
    buffers = []
    assert len(cloudpickle.dumps(PandasRows(frame), protocol=5, buffer_callback=buffers.append)) < 5000
    assert sum(buffer.raw().nbytes for buffer in buffers) > 150_000


READS = """
import sys
import numpy as np
import millstream as ms
from millstream.integrations.arrow import ArrowSource
from millstream.integrations.parquet import ParquetSource

folder = sys.argv[1]
for source in (ArrowSource(f"{folder}/rows.arrow"), ParquetSource(f"{folder}/rows.parquet")):
    numbers = source.map(lambda row: {"x": row["x"], "n": np.int32(len(row["ids"])), "ok": row["ok"]})
    assert numbers.read(np.array([2, 0]))["n"].tolist() == [0, 2]
samples = [{"ids": np.arange(3), "text": ["a", "b"], "ok": True}] * 4
made = ms.prepare(ms.DatasetSource(samples), f"{folder}/prepared")
assert [sample["text"] for sample in made] == [["a", "b"]] * 4
print("pandas" in sys.modules)
"""


def test_reading_and_writing_arrow_loads_no_pandas(folder):
    """Pyarrow's own conversions load it wherever it is installed: 0.4 s in every worker process."""
    table = pa.table({"x": [1.0, 2.0, 3.0], "ids": [[1, 2], [3], []], "ok": [True, False, True]})
    pq.write_table(table, folder / "rows.parquet")
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    command = [sys.executable, "-c", READS, str(folder)]
    found = subprocess.run(command, env=os.environ | CACHE, capture_output=True, text=True, timeout=120)
    assert (found.stdout, found.stderr) == ("False\n", "")


@given(hnp.arrays(st.sampled_from("? i1 u2 i4 u8 f2 f4 f8".split()), st.integers(0, 40)), st.data())
def test_numbers_share_memory_with_arrow_and_are_those_of_pyarrow(values, data):
    made = arrow_memory.array_of(values)
    made.validate(full=True)
    assert made.equals(pa.array(values)) or np.isnan(values).any()
    start = data.draw(st.integers(0, len(values)))
    part = made.slice(start, data.draw(st.integers(0, len(values) - start)))
    found, theirs = arrow_memory.numbers_of(part), part.to_numpy(zero_copy_only=False)
    assert found.dtype == theirs.dtype == values.dtype and not (len(part) and found.flags.writeable)
    np.testing.assert_array_equal(found, theirs)
    assert values.dtype == bool or not len(part) or np.shares_memory(found, values)
    np.testing.assert_array_equal(
        arrow_memory.numbers_of(part.filter(pa.array([True] * len(part), pa.bool_()))), theirs
    )


def test_what_is_missing_in_an_arrow_array_is_no_number():
    with refuses(pa.ArrowInvalid, "1 of 3 values of int64 are missing"):
        arrow_memory.numbers_of(pa.array([1, None, 3]))
