"""Rows of SQLite: the same samples on every executor, and every change or fault named with its sample."""

import os
import shutil
import sqlite3
import sys
import threading
from typing import Any

import cloudpickle
import jax
import numpy as np
import pytest
from conftest import assert_trees_equal
from pipelines import BATCH, SAMPLES, data
from test_bad_input import refuses

import millstream as ms
from millstream.errors import FileChanged
from millstream.integrations.sqlite import SqliteSource

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that workers do not import it, and JAX with it

IMAGE = {"image": ((2, 3, 1), np.uint8)}


def write(path, *statements, rows=()):
    db = sqlite3.connect(path)
    with db:
        for statement in statements:
            db.execute(statement)
        for statement, values in rows:
            db.executemany(statement, values)
    db.close()
    return path


@pytest.fixture
def digits(folder):
    """The images of `pipelines.data`, under keys with gaps, in a table that lists them backwards."""
    images = data()["image"]
    rows = [(10 * label + 3, images[label].tobytes(), label, label / 4, f"no {label}") for label in range(SAMPLES)]
    return write(
        folder / "digits.db",
        "CREATE TABLE digits (id INTEGER PRIMARY KEY, image BLOB, label INTEGER, ink REAL, name TEXT)",
        rows=[("INSERT INTO digits VALUES (?, ?, ?, ?, ?)", reversed(rows))],
    )


def pictures(path, **options):
    return SqliteSource(path, table="digits", columns=["image", "label"], arrays=IMAGE, **options)


def epochs(loader, key, steps=None):
    steps = 2 * loader.steps_per_epoch + 1 if steps is None else steps
    return [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=steps)]


@pytest.mark.parametrize("executor", [None, ms.Threads(3), ms.Processes(2)], ids=["loader", "threads", "processes"])
def test_every_executor_gives_the_batches_of_arrays_in_memory(digits, executor, key):
    expected = epochs(ms.DataLoader([ms.ArraySampleSource(data()), BATCH]), key)
    loader = ms.DataLoader([pictures(digits), BATCH], executor=executor)
    assert_trees_equal(epochs(loader, key), expected)


def test_a_stream_goes_on_from_any_step_and_on_another_executor(digits, key):
    loader = ms.DataLoader([pictures(digits), BATCH])
    expected = epochs(loader, key, 7)
    other = ms.DataLoader([pictures(digits), BATCH], executor=ms.Threads(2))
    for step in range(7):
        rest = other.iterate(loader.init_state(key, step), steps=7 - step)
        assert_trees_equal([jax.device_get(pair) for pair in rest], expected[step:])


def test_a_query_has_its_own_rows_in_the_order_of_its_key(digits):
    query = "SELECT id, label * :factor AS twice FROM digits WHERE ink >= :least -- the darker ones\n;  "
    source = SqliteSource(digits, query=query, parameters={"factor": 2, "least": 1.0}, key="id", columns=["twice"])
    assert source.read(np.arange(len(source)))["twice"].tolist() == [8, 10, 12, 14, 16, 18, 20]
    query = "SELECT -label AS back, ink FROM digits WHERE label > ? -- comment"
    source = SqliteSource(digits, query=query, parameters=[7], key="back")
    assert source.read(np.array([2, 0, 2]))["back"].tolist() == [-8, -10, -8]


def lettered(row):
    return {"letters": np.int32(len(row["name"])), "ink": np.float32(row["ink"])}


def test_text_can_be_a_key_and_become_numbers(digits):
    query = "SELECT name, ink FROM digits WHERE label IN (?, ?, ?)"
    plain = SqliteSource(digits, query=query, parameters=(2, 5, 10), key="name")
    assert plain[1] == {"name": "no 2", "ink": 0.5}
    source = SqliteSource(digits, query=query, parameters=(2, 5, 10), key="name", row_fn=lettered)
    samples = source.read(np.array([2, 0, 1, 0]))
    assert samples["letters"].tolist() == [4, 5, 4, 5]
    assert samples["ink"].tolist() == [1.25, 2.5, 0.5, 2.5]


def test_a_batch_larger_than_the_limit_of_placeholders_is_one_statement_too(folder):
    values = [(row, row * 7) for row in range(5000)]
    path = write(
        folder / "long.db", "CREATE TABLE t (a INTEGER, b INTEGER)", rows=[("INSERT INTO t VALUES (?, ?)", values)]
    )
    indices = np.random.default_rng(0).permutation(5000)
    np.testing.assert_array_equal(SqliteSource(path, table="t").read(indices)["b"], indices * 7)


def test_a_view_and_a_table_without_rowid_need_a_key(digits):
    write(digits, "CREATE VIEW dark AS SELECT id, ink FROM digits WHERE ink > 1")
    write(
        digits, "CREATE TABLE pairs (a TEXT PRIMARY KEY, b INTEGER) WITHOUT ROWID", "INSERT INTO pairs VALUES ('x', 1)"
    )
    for table in ("dark", "pairs"):
        with refuses(ValueError, "SqliteSource needs key=", "tells rows apart"):
            SqliteSource(digits, table=table)
    with refuses(ValueError, "SqliteSource needs key="):
        SqliteSource(digits, query="SELECT ink FROM digits")
    assert len(SqliteSource(digits, table="dark", key="id")) == 6
    assert SqliteSource(digits, table="pairs", key="a", columns=["b"]).read(np.array([0]))["b"].tolist() == [1]


def test_parameters_may_have_any_name(digits):
    query = "SELECT id, ink FROM digits WHERE id > :wanted_keys"
    source = SqliteSource(digits, query=query, parameters={"wanted_keys": 20}, key="id", columns=["id"])
    assert (source.read(np.arange(len(source)))["id"] > 20).all()


def test_names_are_looked_up_and_never_run(folder):
    odd = 'x"; DROP TABLE t; --'
    quoted = '"' + odd.replace('"', '""') + '"'
    path = write(folder / "odd.db", f"CREATE TABLE t ({quoted} INTEGER, rowid TEXT)", "INSERT INTO t VALUES (5, 'a')")
    assert SqliteSource(path, table="t", columns=[odd]).read(np.array([0])) == {odd: np.array([5])}
    for name in (odd, "T"):
        with refuses(ValueError, "needs the name of a table or view", "there are ['t']"):
            SqliteSource(path, table=name)
    options: Any
    for options in (
        {"columns": ["1"]},
        {"columns": [odd, odd]},
        {"key": "1"},
        {"columns": []},
    ):
        with refuses(ValueError, "that are there, each once", "there are ["):
            SqliteSource(path, table="t", **options)
    for options in ({"columns": odd}, {"columns": 3}):
        with refuses(TypeError, "SqliteSource needs columns to be a list of names"):
            SqliteSource(path, table="t", **options)


def test_arguments_that_make_no_sense_are_refused(digits, folder):
    with refuses(ValueError, "needs table= or query=, one of them"):
        SqliteSource(digits)
    with refuses(ValueError, "A table has none"):
        SqliteSource(digits, table="digits", parameters=[1])
    wrong: Any
    for wrong in (3, "5"):
        with refuses(TypeError, "parameters to be a sequence, for ?, or a mapping, for :name. Got"):
            SqliteSource(digits, query="SELECT id FROM digits WHERE id > ?", parameters=wrong, key="id")
    for wrong in ("5", -1, float("nan")):
        with refuses(ValueError, "SqliteSource needs timeout to be seconds, from 0 on. Got"):
            SqliteSource(digits, table="digits", timeout=wrong)
    with refuses(ValueError, "arrays= or row_fn="):
        SqliteSource(digits, table="digits", arrays=IMAGE, row_fn=lettered)
    with refuses(ValueError, "(shape, dtype) pair", "'nothing'"):
        SqliteSource(digits, table="digits", arrays={"nothing": ((), np.int32)})
    with refuses(ValueError, "digits.db", "syntax error"):
        SqliteSource(digits, query="SELEC 1", key="x")
    with refuses(ValueError, "digits.db", "bindings"):
        SqliteSource(digits, query="SELECT id FROM digits WHERE id > ?", key="id")
    with refuses(ValueError, "at least one row"):
        SqliteSource(digits, query="SELECT id FROM digits WHERE id > 1000", key="id")
    with refuses(FileNotFoundError, "none.db does not exist"):
        SqliteSource(folder / "none.db", table="t")
    assert not (folder / "none.db").exists()
    (folder / "text.db").write_text("no database " * 100)
    with refuses(ValueError, "text.db", "not a database"):
        SqliteSource(folder / "text.db", table="t")


def test_keys_must_tell_rows_apart(digits):
    with refuses(ValueError, "tells rows apart", "2 values in 11 rows"):
        SqliteSource(digits, query="SELECT label % 2 AS odd FROM digits", key="odd")
    with refuses(ValueError, "whole numbers or text as keys", "types ['float', 'int']"):
        SqliteSource(digits, query="SELECT CASE label WHEN 1 THEN ink ELSE label END AS k FROM digits", key="k")


def test_a_key_without_an_index_is_warned_of_in_a_large_table(folder):
    values = [(row,) for row in range(10_000)]
    path = write(folder / "large.db", "CREATE TABLE t (a INTEGER)", rows=[("INSERT INTO t VALUES (?)", values)])
    with pytest.warns(UserWarning, match='goes through all of them for every batch.*Make an index on "a"'):
        SqliteSource(path, table="t", key="a")
    write(path, "CREATE INDEX by_a ON t (a)")
    SqliteSource(path, table="t", key="a")


def test_the_database_is_only_read(digits):
    source: Any = pictures(digits)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        source._table.keyed_rows._database.fetch("DELETE FROM digits")
    with refuses(ValueError, "digits.db"):
        SqliteSource(digits, query="DELETE FROM digits RETURNING id", key="id")
    assert len(pictures(digits)) == SAMPLES


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("label", None, "Column 'label' has none at sample 4"),
        ("image", None, "Column 'image' has none at sample 4"),
        ("label", 2.5, "column 'label' needs whole numbers. Sample 4 has 2.5 (float)"),
        ("label", "four", "column 'label' needs whole numbers. Sample 4 has 'four' (str)"),
        ("image", b"abc", "column 'image' needs 6 bytes, of shape (2, 3, 1) in uint8. Sample 4 has 3 bytes"),
        ("image", 7, "Sample 4 has 7 (int)"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_its_sample(digits, column, value, words):
    write(digits, rows=[(f"UPDATE digits SET {column} = ? WHERE label = 4", [(value,)])])
    source = pictures(digits)
    assert source.read(np.array([3, 5]))["label"].tolist() == [3, 5]
    with refuses(ValueError, words):
        source.read(np.array([3, 4, 5]))


def test_a_dtype_can_be_given(folder):
    path = write(folder / "prices.db", "CREATE TABLE t (price DECIMAL(10, 2), n INTEGER, flag BOOLEAN)")
    write(path, rows=[("INSERT INTO t VALUES (?, ?, ?)", [(12, 3, 1), (12.5, 300, 0)])])
    arrays = {"price": ((), np.float32), "n": ((), np.uint8), "flag": ((), bool)}
    with refuses(ValueError, "column 'price' needs whole numbers", "12.5"):
        SqliteSource(path, table="t", columns=["price"]).read(np.array([1]))
    source = SqliteSource(path, table="t", columns=["price", "flag"], arrays={k: arrays[k] for k in ("price", "flag")})
    assert_trees_equal(
        source.read(np.array([1, 0])), {"price": np.array([12.5, 12], np.float32), "flag": np.array([False, True])}
    )
    with refuses(ValueError, "values that fit uint8. Sample 1 has 300"):
        SqliteSource(path, table="t", arrays=arrays).read(np.array([0, 1]))


def test_nulls_reach_a_row_fn_as_none(digits):
    write(digits, "UPDATE digits SET ink = NULL WHERE label = 4")
    source = SqliteSource(
        digits, table="digits", row_fn=lambda row: {"ink": np.float32(-1 if row["ink"] is None else row["ink"])}
    )
    assert source.read(np.array([4, 8]))["ink"].tolist() == [-1, 2]
    failing = SqliteSource(digits, table="digits", row_fn=lambda row: {"ink": np.float32(row["ink"] + 0)})
    with refuses(TypeError, "row_fn of SqliteSource, at sample 4"):
        failing.read(np.array([3, 4]))


@pytest.mark.parametrize("executor", [None, ms.Threads(2), ms.Processes(1)], ids=["loader", "threads", "processes"])
def test_a_row_that_cannot_be_read_is_skipped_alone(digits, executor, key):
    write(digits, "UPDATE digits SET label = NULL WHERE label = 4")
    source = pictures(digits, ordering="sequential")
    loader = ms.DataLoader([source, BATCH], executor=executor, on_error="skip item")
    masks = [mask.tolist() for _, mask in loader.iterate(loader.init_state(key))]
    assert masks == [[True] * 4, [False, True, True, True], [True, True, True, False]]


def test_rows_may_become_python_objects(digits, key):
    source = SqliteSource(digits, table="digits", row_fn=lambda row: row["name"], ordering="sequential")
    loader = ms.DataLoader([source, BATCH])
    assert next(loader.iterate(loader.init_state(key)))[0] == ["no 0", "no 1", "no 2", "no 3"]


def test_a_change_is_found_by_readers_old_and_new(digits, key):
    old, new = pictures(digits), cloudpickle.dumps(pictures(digits))
    old.read(np.array([0]))
    write(digits, "UPDATE digits SET label = 99 WHERE label = 5")
    for source in (old, cloudpickle.loads(new)):
        with refuses(FileChanged, "digits.db, and the database has changed", "at sample 7, the row with rowid 73"):
            source.read(np.array([7]))
    for executor in (ms.Threads(2), ms.Processes(1)):
        loader = ms.DataLoader([old, BATCH], executor=executor)
        with refuses(FileChanged, "the database has changed", "at sample"):
            next(loader.iterate(loader.init_state(key)))


def test_a_change_in_the_same_tick_of_the_clock_is_found(digits):
    source = pictures(digits)
    before = os.stat(digits)
    source.read(np.array([0]))
    write(digits, "UPDATE digits SET label = 99 WHERE label = 5")
    os.utime(digits, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(digits).st_size == before.st_size
    with refuses(FileChanged, "the database has changed", "at sample 5"):
        source.read(np.array([5]))


def test_a_change_in_a_write_ahead_log_is_found(digits):
    write(digits, "PRAGMA journal_mode = WAL")
    writer = sqlite3.connect(digits)
    writer.execute("UPDATE digits SET ink = 1 WHERE label = 1")
    writer.commit()
    source, copy = pictures(digits), cloudpickle.dumps(pictures(digits))
    source.read(np.array([0]))
    cloudpickle.loads(copy).read(np.array([0]))
    writer.execute("UPDATE digits SET ink = 2 WHERE label = 1")
    writer.commit()
    for changed in (source, cloudpickle.loads(copy)):
        with refuses(FileChanged, "the database has changed", "at sample 3"):
            changed.read(np.array([3]))
    writer.close()


def test_a_file_that_is_replaced_or_gone_is_named(digits, folder):
    source = pictures(digits)
    shutil.copy2(digits, folder / "copy.db")
    os.replace(folder / "copy.db", digits)
    with refuses(FileChanged, "digits.db, and the database has changed", "at sample 2"):
        source.read(np.array([2]))
    source = pictures(digits)
    digits.unlink()
    with refuses(FileChanged, "the database has changed", "at sample 2"):
        source.read(np.array([2]))


def test_a_damaged_page_is_named_with_the_sample_that_is_on_it(folder, key):
    values = [(row, bytes([row]) * 10_000) for row in range(60)]
    path = write(
        folder / "damaged.db",
        "CREATE TABLE t (id INTEGER PRIMARY KEY, x BLOB)",
        rows=[("INSERT INTO t VALUES (?, ?)", values)],
    )
    contents = bytearray(path.read_bytes())
    place = contents.index(bytes([40]) * 4092) // 4096 * 4096  # where a page says which is next
    contents[place : place + 4] = b"\xff" * 4
    path.write_bytes(contents)
    source = SqliteSource(path, table="t", arrays={"x": ((10_000,), np.uint8)})
    assert source.read(np.array([39, 0, 59]))["x"][:, 0].tolist() == [39, 0, 59]
    with refuses(FileChanged, "cannot read", "damaged.db", "malformed", "at sample 40, the row with rowid 40"):
        source.read(np.array([3, 40, 41, 5]))
    loader = ms.DataLoader([source, ms.BatchTransform(20)], executor=ms.Processes(1))
    with refuses(FileChanged, "malformed", "at sample 4"):
        list(loader.iterate(loader.init_state(key)))


def test_a_locked_database_is_named_after_the_timeout(digits):
    source = pictures(digits, timeout=0.05)
    writer = sqlite3.connect(digits, isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")
    try:
        with refuses(FileChanged, "cannot read", "digits.db", "locked", "at sample 6"):
            source.read(np.array([6, 2]))
    finally:
        writer.execute("ROLLBACK")
        writer.close()
    assert source.read(np.array([6]))["label"].tolist() == [6]  # nothing has changed


def test_every_thread_has_a_connection_that_ends_with_it(digits):
    source: Any = pictures(digits)
    opened = []

    def read():
        source.read(np.array([1]))
        opened.append(source._table.keyed_rows._database._local.connection.database)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    assert len(set(map(id, opened))) == 3
    for database in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            database.execute("SELECT 1")


def test_a_worker_reads_without_jax(digits, key):
    def without_jax(sample):
        return {**sample, "jax": np.bool_("jax" in sys.modules)}

    pipeline = [pictures(digits), ms.HostMapTransform(without_jax), BATCH]
    # The function is tried once in this process, which has JAX.
    loader = ms.DataLoader(pipeline, executor=ms.Processes(1))
    assert not any(batch["jax"].any() for batch, _ in loader.iterate(loader.init_state(key)))
