"""Many shards on another machine: how many requests and bytes they cost, and that streams are those of the disk."""

import collections
import concurrent.futures
import dataclasses
import functools
import io
import json
import pathlib
import tarfile
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import assert_trees_equal, finish, free_address, start_script
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import Loopback, ranged, reset, send
from test_bad_input import refuses

import millstream as ms
from millstream.files import remote_options
from millstream.files.data_files import open_file, open_files
from millstream.files.fetch_pool import FetchPool, fetch_pool
from millstream.files.file_cache import FileCache, file_cache
from millstream.files.remote_file import BLOCK, ListedAddress
from millstream.integrations import cloud
from millstream.integrations.arrow import ArrowSource
from millstream.integrations.parquet import ParquetSource
from millstream.integrations.webdataset import WebDatasetSource
from millstream.reading.chunk_cache import ChunkCache

ROWS, GROUP, WIDTH = 24, 8, 1024  # per shard, per group, and the numbers of a row, which take 4 kB
ROW_BYTES = 4 * WIDTH


@pytest.fixture(autouse=True)
def options(folder, monkeypatch):
    monkeypatch.setattr(remote_options, "_configured", {})
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    cloud.configure(cache_folder=folder / "cache", cache_limit=0, timeout=10, backoff=0.01)


@pytest.fixture
def server():
    server = Loopback()
    yield server
    server.close()


def rows(shard):
    x = np.random.default_rng(shard).integers(0, 1 << 30, (ROWS, WIDTH), dtype=np.int32)
    x[:, 0] = shard * ROWS + np.arange(ROWS)
    return x


def body(kind, shard):
    """A shard in a format."""
    x, stream = rows(shard), io.BytesIO()
    if kind == "npy":
        np.save(stream, x)
    elif kind == "tar":
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for number in range(ROWS):
                info = tarfile.TarInfo(f"{shard:03}{number:03}.x")
                info.size = ROW_BYTES
                archive.addfile(info, io.BytesIO(x[number].tobytes()))
    else:
        table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), WIDTH)})
        if kind == "parquet":
            pq.write_table(table, stream, row_group_size=GROUP, compression="none", use_dictionary=False)
        else:
            with pa.ipc.new_file(stream, table.schema) as file:
                file.write_table(table, max_chunksize=GROUP)
    return stream.getvalue()


def source_of(kind, paths, ordering: Any = "shuffle", **options: Any):
    if kind == "tar":
        return WebDatasetSource(
            paths, decode={"x": functools.partial(np.frombuffer, dtype=np.int32)}, ordering=ordering, **options
        )
    return {"parquet": ParquetSource, "arrow": ArrowSource}[kind](paths, ordering=ordering, **options)


KINDS = ["parquet", "arrow", "tar"]


def put(server, kind, shards):
    return [server.put(f"/{shard:03}.{kind}", body(kind, shard)) for shard in range(shards)]


def put_near(folder, kind, shards):
    paths = [folder / f"{shard:03}.{kind}" for shard in range(shards)]
    for shard, path in enumerate(paths):
        path.write_bytes(body(kind, shard))
    return paths


def stream_of(source, key, executor=None, steps=6, batch=16):
    with ms.DataLoader([source, ms.BatchTransform(batch)], executor=executor) as loader:
        return [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key), steps=steps)]


def at_once(parties):
    """A fault that answers only when that many requests are on their way together, and an error if they never are."""
    barrier = threading.Barrier(parties)

    def fault(handler):
        try:
            barrier.wait(timeout=5)
        except threading.BrokenBarrierError:
            return send(handler, 400)
        return False

    return fault


# What is kept on disk.


def test_blocks_are_not_kept_if_the_files_do_not_fit_together(server, folder):
    """Each of the shards fits into the cache, all of them do not: a row costs a row, not a block."""
    cloud.configure(cache_limit=1 << 20)
    source = source_of("tar", put(server, "tar", 8))
    server.start_counting()
    chosen = np.random.default_rng(0).permutation(len(source))[:50]
    for index in chosen:
        assert source.read(np.array([index]))["x"][0, 0] == index
    assert len(server.requests) == 50
    assert server.nbytes == 50 * ROW_BYTES
    del source
    whole = source_of("tar", put(server, "tar", 4))  # these fit: 4 of 110 kB are less than half of a megabyte
    server.start_counting()
    for index in np.random.default_rng(1).permutation(len(whole)):
        assert whole.read(np.array([index]))["x"][0, 0] == index
    assert len(server.requests) <= 4  # a block is a whole shard here


def test_a_block_is_asked_for_once_by_all_threads_that_want_it(server):
    cloud.configure(cache_limit=64 << 20)
    data = np.random.default_rng(0).bytes(3 * BLOCK)
    file, arrived = open_file("Test", server.put("/x", data)), threading.Semaphore(0)
    server.start_counting()
    threads, found = [], collections.deque()
    begin = threading.Barrier(17)

    def read(number):
        begin.wait()
        arrived.release()
        found.append((number, file.read_at(BLOCK + 10 * number, 10)))

    def fault(handler):
        for _ in range(16):
            arrived.acquire(timeout=5)
        threading.Event().wait(0.2)  # so that the others have come to ask, too
        return False

    server.fault = fault
    threads = [threading.Thread(target=read, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    begin.wait()
    for thread in threads:
        thread.join()
    assert {number: part for number, part in found} == {
        number: data[BLOCK + 10 * number :][:10] for number in range(16)
    }
    assert [asked for _, asked in server.requests] == [f"bytes={BLOCK}-{2 * BLOCK - 1}"]


@pytest.mark.parametrize("kind", KINDS)
def test_processes_of_a_machine_share_what_is_staged(server, folder, key, kind):
    """The shards do not fit into the cache together, and each of them is still asked for once by two workers."""
    cloud.configure(cache_limit=2 << 20, stage=True)
    expected = stream_of(source_of(kind, put_near(folder, kind, 12), "sequential"), key, steps=18)
    source = source_of(kind, put(server, kind, 12), "sequential")
    server.start_counting()
    assert_trees_equal(stream_of(source, key, ms.Processes(2), steps=18), expected)
    assert len(server.requests) == len(set(server.requests)) <= 12
    assert sum(path.stat().st_size for path in (folder / "cache").glob("??/*")) <= 2 << 20
    assert not list((folder / "cache").glob(".asking*"))


def test_a_reader_that_ends_early_leaves_nobody_waiting(server):
    data = np.random.default_rng(0).bytes(1 << 20)
    file = open_file("Test", server.put("/x", data))
    ranges = [(start, 100) for start in range(100_000, 1_000_000, 150_000)]
    answers: Any = file.read_ranges(ranges)
    assert next(answers) == data[100_000:][:100]
    answers.close()
    assert list(file.read_ranges(ranges)) == [data[start:][:size] for start, size in ranges]


def test_an_error_reaches_every_thread_that_waits_with_notes_of_its_own(server):
    cloud.configure(retries=0)
    file = open_file("Test", server.put("/x", bytes(1 << 20)))
    begin, errors = threading.Barrier(4), []

    def fault(handler):
        threading.Event().wait(0.2)
        return send(handler, 500)

    def read():
        begin.wait()
        try:
            file.read_at(500_000, 10)
        except ConnectionError as error:
            error.add_note("mine")
            errors.append(error)

    server.fault = fault
    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [error.__notes__ for error in errors] == [["mine"]] * 4


# Opening.


@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_opened_many_at_a_time_by_few_requests(server, kind):
    urls = put(server, kind, 20)
    opening = at_once(20)
    server.fault = lambda handler: len(server.requests) <= 20 and opening(handler)
    source = source_of(kind, urls)
    assert len(source) == 20 * ROWS
    # One for each file, with the footer in it; Arrow's batches have heads of their own, and tar files their headers.
    each = {"parquet": 1, "arrow": 2, "tar": 2}[kind]
    assert len(server.requests) == 20 * each + 1  # and the first sample


@pytest.mark.parametrize("keeping", ["in the cache", "in a folder"])
def test_headers_of_tar_files_are_read_once_for_all(server, folder, keeping):
    urls = put(server, "tar", 6)
    sizes = sum(len(body) for body, _ in server.files.values())
    if keeping == "in the cache":
        cloud.configure(cache_limit=1 << 20)  # in which the shards themselves do not fit
    plans = folder / "plans" if keeping == "in a folder" else None
    first = source_of("tar", urls, plans=plans)
    assert server.nbytes > sizes
    server.start_counting()
    again = source_of("tar", urls, plans=plans)
    assert len(server.requests) == 7 and server.nbytes == 6 * (16 << 10) + ROW_BYTES
    assert list(again.keys) == list(first.keys)
    chosen = np.arange(0, len(first), 7)
    assert_trees_equal(again.read(chosen), first.read(chosen))


def test_a_shard_that_changes_is_indexed_again(server):
    cloud.configure(cache_limit=1 << 20)
    urls = put(server, "tar", 6)
    source_of("tar", urls)
    server.put("/002.tar", body("tar", 50))
    changed = source_of("tar", urls)
    assert changed.read(np.array([2 * ROWS]))["x"][0, 0] == 50 * ROWS
    assert changed.keys[2 * ROWS] == "050000"


def test_an_error_while_many_files_are_opened_names_the_file(server):
    urls = put(server, "parquet", 12)
    cloud.configure(retries=0)
    server.fault = lambda handler: handler.path == "/007.parquet" and send(handler, 403)
    with refuses(PermissionError, "ParquetSource", "007.parquet", "403"):
        source_of("parquet", urls)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_remote_footer_that_is_damaged_is_named(server, kind):
    whole = body(kind, 0)
    damaged = {
        "cut": whole[:-3],
        "long": whole[:-10] + b"\xff\xff\xff\x7f" + whole[-6:],
        "empty": b"",
        "zeros": whole[: -len(whole) // 3] + bytes(len(whole) // 3 - 10) + whole[-10:],
    }
    for name, data in damaged.items():
        with pytest.raises((ValueError, OSError)) as caught:
            source_of(kind, [server.put(f"/{name}", data)])
        assert f"/{name}" in str(caught.value)


def test_an_arrow_file_with_dictionaries_and_chosen_columns_over_http(server):
    words = pa.array(["a", "b", "a", "c"] * 50).dictionary_encode()
    table = pa.table({"w": words, "x": np.arange(200, dtype=np.int32), "y": np.arange(200) * 0.5})
    for compression in (None, "zstd"):
        stream = io.BytesIO()
        with pa.ipc.new_file(stream, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as file:
            file.write_table(table, max_chunksize=64)
        url = server.put(f"/{compression}", stream.getvalue())
        chosen = ArrowSource(url, ["x"])
        assert chosen.read(np.array([199, 3, 64]))["x"].tolist() == [199, 3, 64]
        found = ArrowSource(url, row_fn=lambda row: {"n": np.int32(ord(row["w"]) + row["x"])})
        assert found.read(np.array([0, 199]))["n"].tolist() == [ord("a"), ord("c") + 199]


# Requests on their way.


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_the_groups_of_a_batch_are_asked_for_at_once_over_files(server, kind):
    source = source_of(kind, put(server, kind, 16), cache_bytes=0)
    server.start_counting()
    server.fault = at_once(16)
    indices = np.arange(16) * ROWS + np.arange(16)[::-1] % GROUP
    assert source.read(indices)["x"][:, 0].tolist() == indices.tolist()
    assert len(server.requests) == 16


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_process_asks_for_all_of_a_batch_at_once(server, kind, key):
    source = source_of(kind, put(server, kind, 8), "sequential", **({} if kind == "tar" else {"cache_bytes": 0}))
    view = ms.views.select(source, np.arange(len(source)) % ROWS == 0)  # one of each shard
    server.start_counting()
    server.fault = at_once(8)
    [(batch, _)] = stream_of(view, key, ms.Processes(1), steps=1, batch=8)
    assert batch["x"][:, 0].tolist() == list(range(0, 8 * ROWS, ROWS))
    assert len(server.requests) == 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("executor", [None, ms.Threads(4)], ids=["in sequence", "threads"])
def test_shards_in_order_are_read_ahead_by_one_request_each(server, folder, key, kind, executor):
    """A stream in order asks for neighbours together, before they are needed, and for nothing twice."""
    expected = stream_of(source_of(kind, put_near(folder, kind, 10), "sequential"), key, steps=15)
    source = source_of(kind, put(server, kind, 10), "sequential")
    server.start_counting()
    assert_trees_equal(stream_of(source, key, executor, steps=15), expected)
    used = 10 * ROWS * ROW_BYTES
    assert len(server.requests) <= 10 + 1
    assert used * 0.9 <= server.nbytes <= used * 1.3
    assert fetch_pool(cloud.options_for("http://x").read_ahead).nbytes == 0


def test_what_workers_will_read_is_fetched_to_their_disk_ahead_of_need(server, folder, key):
    """By the main process, which knows the plan: workers find it there, and ask for nothing."""
    cloud.configure(cache_limit=64 << 20)
    expected = stream_of(source_of("parquet", put_near(folder, "parquet", 12), "sequential"), key, steps=18)
    source = source_of("parquet", put(server, "parquet", 12), "sequential")  # which has read the first shard
    before = cloud.traffic()
    server.start_counting()
    assert_trees_equal(stream_of(source, key, ms.Processes(2), steps=18), expected)
    assert len(server.requests) == len(set(server.requests)) == 11
    assert cloud.traffic().requests > before.requests  # of this process; workers may be first with some


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [0, 7], ids=["from the beginning", "from the middle"])
def test_blocks_of_a_shuffle_are_one_request_each_ahead_of_need(server, folder, key, kind, first):
    """Eight of thirty blocks are in flight at a time; each is fetched as a whole, once, but for those of two lanes."""
    shards, batch = 10, 16
    ordering, steps = ms.Shuffle("blocks", block_size=GROUP, lanes=4, window=2 * GROUP), shards * ROWS // batch - first

    def streamed(paths):
        source = source_of(kind, paths, ordering)
        server.start_counting()
        with ms.DataLoader([source, ms.BatchTransform(batch)], executor=ms.Threads(4)) as loader:
            state = loader.init_state(key, step=first)
            return [jax.device_get(pair) for pair in loader.iterate(state, steps=steps)]

    expected = streamed(put_near(folder, kind, shards))
    assert_trees_equal(streamed(put(server, kind, shards)), expected)
    blocks = shards * ROWS // GROUP
    assert len(server.requests) <= blocks + 4
    assert server.nbytes <= 1.2 * blocks * GROUP * ROW_BYTES
    assert fetch_pool(cloud.options_for("http://x").read_ahead).nbytes == 0


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_the_blocks_in_flight_fit_into_the_cache_of_the_source(server, key, kind):
    """By default: an eighth of the data is kept, and every group is fetched about once in an epoch."""
    source = source_of(kind, put(server, kind, 16), ms.Shuffle("blocks"), cache_bytes=2 * ROWS * ROW_BYTES)
    server.start_counting()
    stream_of(source, key, ms.Threads(4), steps=24)
    assert server.nbytes <= 1.2 * 16 * ROWS * ROW_BYTES  # threads that read ahead of others may have one given up
    assert len(server.requests) <= 1.2 * 16 * ROWS // GROUP


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_explain_says_when_the_blocks_in_flight_do_not_fit_into_the_cache(server, key, kind):
    """Sixteen groups are in flight: with room for eight, 1.6 times the bytes were fetched."""
    paths, group = put(server, kind, 32), GROUP * ROW_BYTES

    def fetched(groups, **shuffle):
        source = source_of(kind, paths, ms.Shuffle("blocks", **shuffle), cache_bytes=groups * group)
        words = " ".join(ms.inspect.explain(ms.DataLoader([source, ms.BatchTransform(16)])).table().split())
        server.start_counting()
        stream_of(source, key, ms.Threads(4), steps=48)
        return server.nbytes / (32 * ROWS * ROW_BYTES), words

    much, words = fetched(8, lanes=4, window=4 * GROUP)
    assert much > 1.3
    assert (
        "fetched again about 16 blocks in flight take 524 kB, and the source keeps 262 kB (cache_bytes), so blocks "
        "are fetched several times; use window=16 or less, or cache_bytes=524,288 or more"
    ) in words
    # Parts of groups need all of them: 4 lanes x 32 rows are 32 parts of 4 rows.
    assert "about 32 blocks in flight take 1.05 MB" in fetched(16, lanes=4, window=4 * GROUP, block_size=4)[1]
    for fits in (fetched(16, lanes=4, window=2 * GROUP), fetched(16)):
        assert fits[0] < 1.2 and "fetched again" not in fits[1]


def test_explain_says_that_workers_fetch_blocks_each_for_itself(server):
    source = source_of("tar", put(server, "tar", 4), ms.Shuffle("blocks"))

    def words(executor):
        loader = ms.DataLoader([source, ms.BatchTransform(8)], executor=executor)
        return " ".join(str(ms.inspect.explain(loader)).split())

    assert "fetched each worker fetches the blocks of its own batches" in words(ms.Processes(2))
    assert "cloud.configure(stage=True)" in words(ms.Processes(2))
    assert "each worker fetches" not in words(ms.Threads(2)) + words(ms.Processes(1))
    cloud.configure(stage=True)
    assert "each worker fetches" not in words(ms.Processes(2))


def test_a_full_shuffle_of_tar_files_reads_samples_and_no_more(server, key):
    source = source_of("tar", put(server, "tar", 30))
    server.start_counting()
    stream_of(source, key, ms.Threads(4), steps=4)
    assert server.nbytes <= 4 * 16 * (ROW_BYTES + 512) * 2


def test_blocks_that_would_not_fit_into_memory_are_read_by_the_sample(server, folder, key):
    cloud.configure(read_ahead=4 * GROUP * ROW_BYTES)
    ordering = ms.Shuffle("blocks", block_size=GROUP, lanes=4, window=4 * GROUP)  # which are sixteen
    expected = stream_of(source_of("tar", put_near(folder, "tar", 10), ordering), key, ms.Threads(4), steps=15)
    source = source_of("tar", put(server, "tar", 10), ordering)
    server.start_counting()
    assert_trees_equal(stream_of(source, key, ms.Threads(4), steps=15), expected)
    assert server.nbytes <= 2.1 * 10 * ROWS * ROW_BYTES


def test_of_a_block_only_the_files_that_are_read_are_fetched(server, key):
    """Large files beside the small ones that are wanted stay where they are."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for number in range(64):
            for name, size in (("cls", 1), ("big", 20_000)):
                info = tarfile.TarInfo(f"{number:03}.{name}")
                info.size = size
                archive.addfile(info, io.BytesIO(b"1" * size))
    ordering = ms.Shuffle("blocks", block_size=8, lanes=4, window=16)
    source = WebDatasetSource(server.put("/x.tar", stream.getvalue()), ["cls"], ordering=ordering)
    server.start_counting()
    stream_of(source, key, ms.Threads(2), steps=4)
    assert server.nbytes <= 64 * 4096


def test_blocks_of_views_joins_and_functions_are_fetched_as_a_whole_too(server, folder, key):
    ordering = ms.Shuffle("blocks", block_size=GROUP, lanes=4, window=2 * GROUP)

    def made(paths):
        parts = [source_of("tar", paths[:5], ordering), source_of("tar", paths[5:], ordering)]
        joined = ms.views.concat(*parts, ordering=ordering)
        return [joined.map(lambda sample: {"x": sample["x"] + 1}), joined[ROWS:-ROWS]]

    for near, far in zip(made(put_near(folder, "tar", 10)), made(put(server, "tar", 10)), strict=True):
        server.start_counting()
        assert_trees_equal(stream_of(far, key, ms.Threads(4), 12), stream_of(near, key, ms.Threads(4), 12))
        assert len(server.requests) <= 10 * ROWS // GROUP + 4
        assert server.nbytes <= 1.2 * 10 * ROWS * ROW_BYTES


def test_blocks_of_the_sources_of_a_mixture_are_fetched_as_a_whole_too(server, folder, key):
    """Two sources in blocks of their own, one of them drawn seldom, and one that is read in sequence."""
    ordering = ms.Shuffle("blocks", block_size=GROUP, lanes=4, window=2 * GROUP)

    def made(paths):
        parts = {
            "much": source_of("tar", paths[:28], ordering),
            "some": source_of("tar", paths[28:38], ordering),
            "plain": source_of("tar", paths[38:], "sequential"),
        }
        return ms.views.mix(parts, {"much": 28, "some": 10, "plain": 2})

    near, far = made(put_near(folder, "tar", 40)), made(put(server, "tar", 40))
    server.start_counting()
    steps = 40 * ROWS // 4
    assert_trees_equal(stream_of(far, key, ms.Threads(4), steps, 4), stream_of(near, key, ms.Threads(4), steps, 4))
    assert len(server.requests) <= 1.15 * 40 * ROWS // GROUP
    assert server.nbytes <= 1.2 * 40 * ROWS * ROW_BYTES


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_fetched_ahead_is_bounded(server, folder, key, kind):
    cloud.configure(read_ahead=300_000, connections=4)
    pool = fetch_pool(300_000)
    pool.most_bytes = 0
    source = source_of(kind, put(server, kind, 12), **({} if kind == "tar" else {"cache_bytes": 200_000}))
    near = source_of(kind, put_near(folder, kind, 12))
    expected = stream_of(near, key, steps=12)
    assert_trees_equal(stream_of(source, key, ms.Threads(3), steps=12), expected)
    # What a reader needs at once may be above it: at most a piece for each of three threads.
    assert 0 < pool.most_bytes <= 300_000 + 3 * len(body(kind, 0))
    assert pool.nbytes == 0


def test_a_shuffled_stream_over_a_cache_that_is_large_enough_reads_everything_once(server, folder, key):
    for kind in KINDS:
        urls = put(server, kind, 10)
        cloud.configure(cache_limit=64 << 20)
        source = source_of(kind, urls)
        sizes = sum(len(server.files[f"/{shard:03}.{kind}"][0]) for shard in range(10))
        server.start_counting()
        expected = stream_of(source_of(kind, put_near(folder, kind, 10)), key, steps=30)  # two epochs
        assert_trees_equal(stream_of(source, key, ms.Threads(8), steps=30), expected)
        assert server.nbytes <= sizes
        assert len(server.requests) <= 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("executor", [ms.Threads(6), ms.Processes(2)], ids=["threads", "processes"])
def test_a_stream_of_shards_through_faults_is_that_of_the_disk(server, folder, key, kind, executor):
    cloud.configure(retries=40, backoff=0.0005)
    expected = stream_of(source_of(kind, put_near(folder, kind, 8)), key, steps=14)
    source = source_of(kind, put(server, kind, 8), **({} if kind == "tar" else {"cache_bytes": 200_000}))
    server.fault = faults(server, 0)
    assert_trees_equal(stream_of(source, key, executor, steps=14), expected)


def faults(server, seed):
    """Faults at random, at every third answer."""
    random, lock = np.random.default_rng(seed), threading.Lock()

    def fault(handler):
        with lock:
            kind = int(random.integers(0, 12))
        kinds = {
            0: lambda: reset(handler),
            1: lambda: send(handler, 503),
            2: lambda: send(handler, 429),
            3: lambda: ranged(handler, *server.files[handler.path], cut=1000),
        }
        return kind in kinds and kinds[kind]()

    return fault


def test_two_hosts_read_the_stream_of_the_disk_through_faults(server, folder):
    expected = stream_of(source_of("parquet", put_near(folder, "parquet", 8)), jax.random.key(7), steps=6)
    server.fault = faults(server, 1)
    address, urls = free_address(), put(server, "parquet", 8)
    script = pathlib.Path(__file__).parent / "remote_script.py"
    hosts = [start_script(script, 1, address, "2", str(number), "6", *urls) for number in range(2)]
    told = [[json.loads(line) for line in told.splitlines() if line.startswith("{")] for told in finish(*hosts)]
    for (batch, _), *parts in zip(expected, *told, strict=True):
        found = [row for part in sorted(parts, key=lambda part: part["start"]) for row in part["rows"]]
        assert found == batch["x"][:, :2].tolist()


def test_a_fault_of_what_was_fetched_ahead_names_the_sample(server, key):
    source = source_of("tar", put(server, "tar", 8), "sequential")
    server.put("/003.tar", body("tar", 77))
    with refuses(cloud.FileChanged, "003.tar", "at sample 7", "in "):
        stream_of(source, key, ms.Threads(4), steps=12)


def test_windows_joins_and_functions_look_ahead_too(server, folder, key):
    near, far = put_near(folder, "npy", 2), put(server, "npy", 2)
    cloud.configure(cache_limit=0)

    def made(paths):
        parts = [ms.NpySource({"x": path}, "sequential") for path in paths]
        joined = ms.views.concat(*parts)
        windows = ms.views.windows(parts[0], 4, stride=4)
        zipped = ms.views.zip(joined, ms.views.select(joined, np.arange(2 * ROWS) % 2 == 0), shortest=True)
        return [joined, windows, zipped]

    for expected, found in zip(made(near), made(far), strict=True):
        server.start_counting()
        local = stream_of(expected, key, steps=1, batch=4)
        assert_trees_equal(stream_of(found, key, ms.Threads(2), steps=1, batch=4), local)


@pytest.mark.parametrize("rule", ["concat", "first-fit"])
@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_packed_rows_are_fetched_ahead(server, folder, key, kind, rule):
    """In order, they are as many requests as the documents alone, and nothing stays in memory."""

    def made(paths):
        documents = source_of(kind, paths, "sequential")
        lengths = np.full(len(documents), WIDTH)
        return ms.views.pack(documents, 1500, rule, leaves="x", lengths=lengths, seed=None)

    expected = stream_of(made(put_near(folder, kind, 6)), key, steps=6, batch=8)
    source = made(put(server, kind, 6))
    server.start_counting()
    assert_trees_equal(stream_of(source, key, ms.Threads(4), steps=6, batch=8), expected)
    assert len(server.requests) <= 6 + 6  # a document that two batches share may be asked for again
    assert fetch_pool(cloud.options_for("http://x").read_ahead).nbytes == 0


def test_steps_that_are_asked_for_out_of_order_are_not_read_far_ahead(server, key):
    """`next_batch` at any step costs its batch and the few that are read ahead, not all that might come."""
    source = source_of("tar", put(server, "tar", 30), "sequential")
    server.start_counting()
    with ms.DataLoader([source, ms.BatchTransform(8)], executor=ms.Threads(2), prefetch=1) as loader:
        state = loader.init_state(key)
        for step in (50, 10, 70, 30):
            batch, _, _ = loader.next_batch(dataclasses.replace(state, step=jnp.uint32(step)))
            assert batch["x"][0, 0] == 8 * step
        # The batch after a step may be asked for again by a thread that is at it when it is forgotten.
        assert server.nbytes <= 4 * 3 * 8 * (ROW_BYTES + 512)
        for step in range(40, 60):
            batch, _, _ = loader.next_batch(dataclasses.replace(state, step=jnp.uint32(step)))
            assert batch["x"][0, 0] == 8 * step


# What comes next.


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 7), max_size=60), st.integers(1, 5))
def test_chunks_are_given_up_by_their_next_use(uses, limit):
    cache, misses, kept, optimal = ChunkCache(limit), 0, set(), 0
    cache.expect(uses)
    for number, name in enumerate(uses):
        if name not in kept:  # the oracle: what is needed furthest in the future goes, be it the new one
            optimal += 1
            kept.add(name)
            if len(kept) > limit:
                later = uses[number + 1 :]
                kept.remove(max(kept, key=lambda one: later.index(one) if one in later else len(uses)))
        cache.advance(1)
        if cache.get(name) is None:
            misses += 1
            cache.put(name, name, 1)
        assert cache.nbytes <= limit
    assert misses == optimal


def expect(pool, wanted, connections):
    """Have a pool expect (file, span, what is fetched around it), in this order."""
    files = list(dict.fromkeys(file for file, _, _ in wanted))
    numbers = np.array([files.index(file) for file, _, _ in wanted], np.int64)
    spans, around = (np.array([one[part] for one in wanted], np.int64).reshape(-1, 2) for part in (1, 2))
    pool.expect(files, numbers, spans, around, connections)


class Recorded:
    """A file whose fetches are recorded."""

    def __init__(self, data):
        self.data, self.fetched, self.expected = data, [], {}

    def fetch(self, span):
        self.fetched.append(span)
        return self.data[span[0] : sum(span)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 90_000), st.integers(1, 9_000)), min_size=1, max_size=40),
    st.integers(1, 60_000),
    st.data(),
)
def test_expected_spans_are_fetched_in_bounded_memory_and_taken_once(wanted, limit, data):
    files = [Recorded(np.random.default_rng(number).bytes(100_000)) for number in range(3)]
    spans = [(files[number], (start, size)) for number, start, size in wanted]
    pool = FetchPool(limit)
    first = data.draw(st.integers(0, len(spans)))
    wide = data.draw(st.integers(0, 5_000))  # what is fetched around each
    around = [(file, (start, size), (max(start - wide, 0), min(start, wide) + size)) for file, (start, size) in spans]
    expect(pool, around[:first], 3)
    expect(pool, around[first:], 3)
    for file, (start, size) in spans:
        assert pool.take(file, (start, size)) == file.data[start : start + size]
        assert pool.take(file, (start, size + 1)) is None
    assert pool.nbytes == 0
    largest = max((size for file in files for _, size in file.fetched), default=0)
    assert pool.most_bytes <= max(limit, largest) + largest
    assert not any(file.expected for file in files)


def test_threads_that_ask_at_the_same_time_get_one_cache_and_one_pool(folder):
    """Each of several caches would count a part of the files, and find room for it."""
    for attempt in range(50):
        together = threading.Barrier(8)

        def ask(_, attempt=attempt, together=together):
            together.wait()
            return id(file_cache(folder / str(attempt), 1)), id(fetch_pool(attempt + 1))

        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            assert len(set(threads.map(ask, range(8)))) == 1


def test_pieces_that_threads_keep_at_the_same_time_are_all_kept_and_counted(folder):
    cache, names = FileCache(folder / "c", 1 << 20), [f"{number:040x}-0" for number in range(200)]
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda name: cache.write({name: name.encode() * 10}), names))
    again = FileCache(folder / "c", 1 << 20)
    assert [again.read(name) for name in names] == [name.encode() * 10 for name in names]
    assert again.read(names[0], 40, 3) == names[0][40:].encode() + b"0"
    cache.write({names[0]: bytes(2 << 20)})  # more than there is room for at all
    assert cache.read(names[0]) == names[0].encode() * 10
    kept = sum(path.stat().st_size for path in (folder / "c").glob("??/*"))
    assert kept == sum(12 + 10 * len(name) for name in names) <= int((folder / "c" / ".used").read_text())


def test_what_lies_in_a_piece_that_is_fetched_anyway_is_not_fetched_again():
    data = np.random.default_rng(0).bytes(100_000)
    file, pool = Recorded(data), FetchPool(1 << 20)
    at = lambda *starts: [(file, (start, 100), (start, 100)) for start in starts]  # noqa: E731
    expect(pool, at(0, 2000), 1)  # a gap that is asked for with them
    expect(pool, at(1000, 3000), 1)
    for start in (0, 2000, 1000, 3000):
        assert pool.take(file, (start, 100)) == data[start : start + 100]
    assert sorted(file.fetched) == [(0, 2100), (3000, 100)]
    assert pool.nbytes == 0 and not file.expected
    expect(pool, at(1000), 1)  # the piece it was in is gone
    assert pool.take(file, (1000, 100)) == data[1000:1100]
    assert file.fetched[-1] == (1000, 100)


def test_what_is_expected_and_never_read_makes_room_in_time():
    file, pool = Recorded(bytes(1 << 20)), FetchPool(1 << 16)
    never, span = [(file, (start, 4096), (start, 4096)) for start in range(0, 1 << 16, 8192)], (500_000, 4096)
    expect(pool, never, 2)
    for _ in range(1 << 15):
        expect(pool, [(file, span, span)], 2)
        assert pool.take(file, span) == bytes(4096)
    while pool.nbytes > 8 * 4096:  # a thread may be at one
        pass
    later = range(600_000, 600_000 + 16 * 8192, 8192)
    expect(pool, [(file, (start, 4096), (start, 4096)) for start in later], 2)
    deadline = time.monotonic() + 20
    while sum(start >= 600_000 for start, _ in file.fetched) < 16:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for start in later:
        assert pool.take(file, (start, 4096)) == bytes(4096)
    assert pool.take(file, (0, 4096)) == bytes(4096)  # which is fetched again


def test_what_is_forgotten_is_not_held():
    file, pool = Recorded(bytes(100_000)), FetchPool(1 << 20)
    expect(pool, [(file, (start, 100), (start, 100)) for start in range(0, 100_000, 10_000)], 2)
    pool.forget([file])
    assert pool.take(file, (0, 100)) is None
    while pool.nbytes:  # a thread may have been at a piece
        pass
    assert not file.expected


def test_a_late_answer_is_asked_for_a_second_time(server):
    data, second = np.random.default_rng(0).bytes(100_000), threading.Event()
    address = ListedAddress(server.put("/x", data))
    _, size, version = open_file("Test", str(address)).stamp
    address.known = (size, str(version))
    cloud.configure(hedge=0.05)
    file = open_file("Test", address)  # which asks nothing: on a busy machine that might be asked twice, too
    server.start_counting()
    before = cloud.traffic()

    def fault(handler):
        if len(server.requests) == 1:
            second.wait(timeout=5)  # the first answer waits for the second question
        second.set()
        return False

    server.fault = fault
    assert file.read_at(50_000, 1000) == data[50_000:51_000]
    after = cloud.traffic()
    assert (after.hedges - before.hedges, after.requests - before.requests) == (1, 2)
    assert after.retries == before.retries
    server.fault = lambda handler: send(handler, 404)
    with refuses(cloud.FileChanged, "404"):
        file.read_at(70_000, 1000)


def test_requests_bytes_and_retries_are_counted(server):
    file = open_file("Test", server.put("/x", bytes(100_000)))
    before, faults = cloud.traffic(), iter([True, True])
    server.fault = lambda handler: next(faults, False) and send(handler, 503)
    file.read_at(50_000, 1000)
    after = cloud.traffic()
    assert after.requests - before.requests == 3
    assert after.retries - before.retries == 2
    assert after.nbytes - before.nbytes == 1000


def test_options_of_reading_ahead_are_checked():
    with refuses(ValueError, "hedge", "0 (int)"):
        cloud.configure(hedge=0)
    with refuses(ValueError, "read_ahead", "-1"):
        cloud.configure(read_ahead=-1)
    with refuses(TypeError, "stage", "1 (int)"):
        cloud.configure(stage=1)


# Folders and patterns.


@pytest.fixture
def bucket(server):
    cloud.configure("s3://b/", store={"endpoint": server.address, "region": "eu", "skip_signature": True})
    for shard in range(5):
        for kind in KINDS:
            server.put(f"/b/train/{kind}-{shard:03}.{kind}", body(kind, shard))
    server.put("/b/train/_hidden/x.parquet", b"")
    server.put("/b/train/deep/down/parquet-9.parquet", body("parquet", 9))
    return server


@pytest.mark.parametrize("kind", KINDS)
def test_a_pattern_or_a_folder_of_a_store_is_listed(bucket, kind):
    source = source_of(kind, f"s3://b/train/{kind}-*.{kind}", "sequential")
    assert source.read(np.arange(0, 5 * ROWS, ROWS))["x"][:, 0].tolist() == list(range(0, 5 * ROWS, ROWS))
    assert len(source) == 5 * ROWS
    assert len(source_of(kind, "s3://b/train/")) == (6 if kind == "parquet" else 5) * ROWS
    assert len(source_of(kind, [f"s3://b/train/*-00{number}.{kind}" for number in (1, 3)])) == 2 * ROWS


def test_a_list_says_sizes_and_versions_so_that_kept_files_are_opened_by_one_request(bucket):
    cloud.configure(cache_limit=1 << 20)
    deep = source_of("parquet", "s3://b/train/**/*.parquet".replace("**/", "deep/**/"))
    assert len(deep) == ROWS
    for kind in KINDS:
        source_of(kind, f"s3://b/train/{kind}-*.{kind}")
        bucket.start_counting()
        again = source_of(kind, f"s3://b/train/{kind}-*.{kind}")
        asked = [path for path, asked in bucket.requests if asked is not None]
        assert len(asked) <= 1  # the first sample; all else are pages of the list
        assert again.read(np.array([4 * ROWS]))["x"][0, 0] == 4 * ROWS
    bucket.put("/b/train/arrow-002.arrow", body("arrow", 60))
    changed = source_of("arrow", "s3://b/train/arrow-*.arrow")
    assert changed.read(np.array([2 * ROWS]))["x"][0, 0] == 60 * ROWS


def test_a_file_that_changes_after_it_was_listed_is_refused(bucket):
    source = source_of("parquet", "s3://b/train/parquet-*.parquet")
    bucket.put("/b/train/parquet-004.parquet", body("parquet", 70))
    with refuses(cloud.FileChanged, "parquet-004.parquet", "has changed since it was opened"):
        source.read(np.array([4 * ROWS]))


def test_lists_that_are_empty_or_not_to_be_had_are_named(bucket):
    with refuses(FileNotFoundError, "ParquetSource needs files that fit s3://b/train/none-*.parquet", "none"):
        source_of("parquet", "s3://b/train/none-*.parquet")
    with refuses(FileNotFoundError, "ArrowSource needs files named .arrow", "s3://b/other/"):
        source_of("arrow", "s3://b/other/")
    with refuses(ValueError, "ParquetSource cannot list http://127.0.0.1", "Give a list of addresses"):
        source_of("parquet", f"{bucket.address}/b/*.parquet")
    cloud.configure(retries=0)
    bucket.fault = lambda handler: send(handler, 403)
    with refuses(PermissionError, "cannot list s3://b/train/", "403"):
        source_of("parquet", "s3://b/train/")
    bucket.fault = lambda handler: send(handler, 503)
    with refuses(OSError, "cannot list s3://b/train/", "503"):
        source_of("parquet", "s3://b/train/")


def test_files_of_fsspec_are_listed(folder):
    import fsspec

    system = fsspec.filesystem("memory")
    for shard in range(3):
        system.pipe_file(f"/listed/s-{shard}.parquet", body("parquet", shard))
    source = source_of("parquet", "memory://listed/s-*.parquet")
    assert source.read(np.array([2 * ROWS]))["x"][0, 0] == 2 * ROWS
    assert [file.name for file in open_files("Test", ["memory://listed/s-0.parquet"])] == [
        "memory://listed/s-0.parquet"
    ]
