"""Files from servers and stores: the same stream as from the disk, or an error that says what to do."""

import errno
import gzip
import io
import json
import os
import pathlib
import pickle
import resource
import shutil
import subprocess
import sys
import threading
import time
import zlib

import format_pipelines
import fsspec
import jax
import numpy as np
import pytest
from conftest import assert_trees_equal
from formats import idx_bytes
from loopback import Loopback, ranged, reset, send
from test_bad_input import refuses

import millstream as ms
from millstream.files import remote_options
from millstream.files.data_files import LocalFile, buffered, open_file
from millstream.files.file_cache import FileCache
from millstream.files.remote_file import BLOCK
from millstream.integrations import cloud
from millstream.integrations.arrow import ArrowSource
from millstream.integrations.parquet import ParquetSource
from millstream.integrations.safetensors import SafetensorsSource
from millstream.integrations.webdataset import WebDatasetSource

ROWS = np.random.default_rng(0).integers(0, 1 << 30, (5000, 60), dtype=np.int32)  # 1.2 MB, five blocks
ROWS[:, 0] = np.arange(5000)
SOME = np.array([4999, 0, 17, 2500, 17, 2501])


def npy_bytes(array=ROWS):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


BODY = npy_bytes()


@pytest.fixture(autouse=True)
def quick(folder, monkeypatch):
    """Options of this test alone: an empty cache, and little patience."""
    monkeypatch.setattr(remote_options, "_configured", {})
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    cloud.configure(cache_folder=folder / "cache", timeout=0.5, deadline=20, retries=4, backoff=0.01)


@pytest.fixture
def server():
    server = Loopback()
    yield server
    server.close()


@pytest.fixture(params=["cached", "uncached"])
def caching(request):
    if request.param == "uncached":
        cloud.configure(cache_limit=0)
    return request.param


def stream_of(source, key, executor=None, steps=6, state=None):
    with ms.DataLoader([source, ms.BatchTransform(64)], executor=executor) as loader:
        state = loader.init_state(key) if state is None else state
        batches = loader.iterate(state, steps=steps)
        return [jax.device_get(pair) for pair in batches], batches.state


def test_rows_of_an_array_are_read_by_ranges(server, caching):
    url = server.put("/x.npy", BODY)
    source = ms.NpySource({"x": url})
    assert (len(source), source.spec()["x"].shape) == (5000, (60,))
    np.testing.assert_array_equal(source.read(SOME)["x"], ROWS[SOME])
    assert all(found is not None for _, found in server.requests)
    sizes = [int(last) - int(first) + 1 for first, last in (found[6:].split("-") for _, found in server.requests)]
    if caching == "uncached":
        assert sizes[0] < BLOCK  # the header and the first rows
        assert sorted(sizes[1:]) == [240, 480]  # neighbours together
    else:
        assert sum(sizes) < len(BODY)
        asked = len(server.requests)
        np.testing.assert_array_equal(ms.NpySource({"x": url}).read(SOME)["x"], ROWS[SOME])
        assert len(server.requests) == asked + 1  # for the version, and nothing else


@pytest.mark.parametrize(
    "executor", [None, ms.Threads(3), ms.Processes(2)], ids=["in sequence", "threads", "processes"]
)
def test_the_stream_is_that_of_the_local_file_on_every_executor(server, folder, key, executor):
    np.save(folder / "x.npy", ROWS)
    url = server.put("/data/x.npy", BODY)
    expected, state = stream_of(ms.NpySource({"x": folder / "x.npy"}), key)
    found, after = stream_of(ms.NpySource({"x": url}), key, executor)
    assert_trees_equal(found, expected)
    assert_trees_equal(after, state)
    more, _ = stream_of(ms.NpySource({"x": folder / "x.npy"}), key, state=state, steps=2)
    again, _ = stream_of(ms.NpySource({"x": url}), key, executor, state=jax.device_get(after), steps=2)
    assert_trees_equal(again, more)


def test_other_formats_over_http(server, caching):
    numbers = np.arange(40, dtype=np.float32).reshape(10, 4)
    archive, packed = io.BytesIO(), io.BytesIO()
    np.savez(archive, a=numbers, b=np.arange(10, dtype=">i4"), f=np.asfortranarray(numbers))
    np.savez_compressed(packed, a=numbers)
    pick = np.array([9, 3])
    found = ms.NpySource(server.put("/all.npz", archive.getvalue())).read(pick)
    np.testing.assert_array_equal(found["a"], numbers[pick])
    np.testing.assert_array_equal(found["f"], numbers[pick])
    assert found["b"].tolist() == [9, 3]
    np.testing.assert_array_equal(ms.NpySource(server.put("/p.npz", packed.getvalue())).read(pick)["a"], numbers[pick])
    images = np.arange(60, dtype=np.uint8).reshape(10, 6)
    idx = {"i": server.put("/i", idx_bytes(images)), "w": server.put("/w", idx_bytes(numbers))}
    idx["l"] = server.put("/l.gz", gzip.compress(idx_bytes(images[:, 0])))
    rows = ms.sources.IdxSource(idx).read(pick)
    np.testing.assert_array_equal(rows["i"], images[pick])
    np.testing.assert_array_equal(rows["w"], numbers[pick])
    np.testing.assert_array_equal(rows["l"], images[pick, 0])
    table = ms.CsvSource(server.put("/t.csv", b"a,b\n1,2\n3,4\n"), ordering="sequential")
    assert table.read(np.array([1]))["b"].tolist() == [4.0]


def test_an_s3_endpoint_and_odd_names(server):
    server.put("/bucket/a%20b/50%25.npy", BODY)
    cloud.configure("s3://bucket/", store={"endpoint": server.address, "region": "eu", "skip_signature": True})
    np.testing.assert_array_equal(ms.NpySource("s3://bucket/a b/50%.npy").read(SOME), ROWS[SOME])
    with refuses(FileNotFoundError, "s3://bucket/none.npy", "404"):
        ms.NpySource("s3://bucket/none.npy")
    server.put("/odd%20name.npy", BODY)
    url = f"{server.address.replace('://', '://user:word@')}/odd%20name.npy?token=secret"
    source = ms.NpySource(url)
    np.testing.assert_array_equal(source.read(SOME), ROWS[SOME])
    assert server.requests[-1][0] == "/odd%20name.npy?token=secret"
    server.fault = lambda handler: send(handler, 500)
    cloud.configure(retries=0)
    with pytest.raises(ConnectionError) as caught:
        ms.NpySource(url)
    assert "secret" not in str(caught.value) and "word" not in str(caught.value)


def test_a_bucket_of_google(server):
    server.put("/bucket/d%2Fx%2Enpy", BODY, ETag="one", Last_Modified="Sat, 01 Jan 2022 00:00:00 GMT")
    account = {"gcs_base_url": server.address, "disable_oauth": True, "client_email": "", "private_key": ""}
    key = json.dumps(account | {"private_key_id": ""})
    cloud.configure("gs://bucket/", allow_http=True, store={"service_account_key": key})
    np.testing.assert_array_equal(ms.NpySource("gs://bucket/d/x.npy").read(SOME), ROWS[SOME])


def test_fsspec_opens_what_obstore_does_not_know(caching):
    system = fsspec.filesystem("memory")
    system.pipe_file("/cloud/x.npy", BODY)
    source = ms.NpySource({"x": "memory://cloud/x.npy"})
    np.testing.assert_array_equal(source.read(SOME)["x"], ROWS[SOME])
    time.sleep(0.001)
    system.pipe_file("/cloud/x.npy", npy_bytes(ROWS + 1))
    with refuses(cloud.FileChanged, "memory://cloud/x.npy", "at sample 1234"):
        source.read(np.array([1234]))
    with refuses(FileNotFoundError, "NpySource", "memory://cloud/none.npy"):
        ms.NpySource("memory://cloud/none.npy")
    with refuses(ValueError, "NpySource cannot open nowhere:// addresses"):
        ms.NpySource("nowhere://x.npy")
    with refuses(ConnectionError, "NpySource cannot reach ftp://127.0.0.1:1/x.npy", "Connection refused"):
        ms.NpySource("ftp://127.0.0.1:1/x.npy")


def once(fault):
    """The fault at the second request, and no more."""
    count = iter(range(1000))
    return lambda handler: next(count) == 1 and fault(handler)


def slow(handler):
    time.sleep(0.8)
    return reset(handler)


@pytest.mark.parametrize(
    "fault",
    [
        reset,
        slow,
        lambda handler: ranged(handler, BODY, {"ETag": '"x"'}, cut=100),
        lambda handler: send(handler, 500),
        lambda handler: send(handler, 503),
        lambda handler: send(handler, 429),
        lambda handler: send(handler, 206, b"short", Content_Range=f"bytes 0-9/{len(BODY)}", ETag='"x"'),
        lambda handler: send(handler, 206, BODY[:10], Content_Range="nonsense"),
    ],
    ids=["dropped", "delayed", "truncated", "500", "503", "429", "short", "no range"],
)
def test_a_passing_fault_is_not_noticed(server, fault):
    source = ms.NpySource(server.put("/x.npy", BODY, ETag='"x"'))
    server.fault = once(fault)
    np.testing.assert_array_equal(source.read(SOME), ROWS[SOME])
    np.testing.assert_array_equal(source.read(SOME[::-1]), ROWS[SOME[::-1]])


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (reset, ConnectionError, ["tries for bytes", "Is the server up?"]),
        (slow, TimeoutError, ["silent for 0.2 seconds"]),
        (lambda handler: send(handler, 500), ConnectionError, ["500 Internal Server Error"]),
        (lambda handler: send(handler, 403), PermissionError, ["403", "skip_signature"]),
        (lambda handler: send(handler, 404), cloud.FileChanged, ["has changed since it was opened", "404"]),
        (lambda handler: send(handler, 416), cloud.FileChanged, ["has changed since it was opened", "416"]),
        (lambda handler: send(handler, 400), OSError, ["400", "Check the address"]),
    ],
    ids=["dropped", "delayed", "500", "403", "404", "416", "400"],
)
def test_a_lasting_fault_is_named_with_address_and_sample(server, fault, kind, words):
    cloud.configure(retries=1, timeout=0.2)
    source = ms.NpySource({"x": server.put("/x.npy", BODY)})
    server.fault = fault
    with refuses(kind, "NpySource", f"{server.address}/x.npy", "at sample", *words):
        source.read(np.array([4000, 4001]))


@pytest.mark.parametrize("executor", [ms.Threads(2), ms.Processes(1)], ids=["threads", "processes"])
def test_faults_reach_the_loop_with_the_sample(server, key, executor):
    cloud.configure(retries=1)
    source = ms.NpySource({"x": server.put("/x.npy", BODY)}, "sequential")
    server.fault = lambda handler: send(handler, 404)
    with refuses(cloud.FileChanged, "NpySource", f"{server.address}/x.npy", "404", "at sample "):
        stream_of(source, key, executor, steps=60)


def test_a_file_that_changes_under_way_is_an_error_with_the_sample(server, key, caching):
    url = server.put("/x.npy", BODY, ETag='"one"')
    source = ms.NpySource({"x": url}, "sequential")
    copy = pickle.loads(pickle.dumps(source))
    source.read(np.array([0, 1]))
    server.put("/x.npy", npy_bytes(ROWS + 1), ETag='"two"')
    for reader in (source, copy):
        with refuses(cloud.FileChanged, url, '"one"', '"two"', "at sample 4321", "build the source again"):
            reader.read(np.array([4321]))
    np.testing.assert_array_equal(ms.NpySource({"x": url}).read(SOME)["x"], ROWS[SOME] + 1)
    server.put("/x.npy", npy_bytes(ROWS[:100]), Last_Modified="Sat, 01 Jan 2022 00:00:00 GMT")
    shorter = ms.NpySource({"x": url})
    server.put("/x.npy", npy_bytes(ROWS[:100] + 1), Last_Modified="Sat, 01 Jan 2022 00:00:01 GMT")
    if caching == "uncached":  # a cached one has all of the old file
        with refuses(cloud.FileChanged, "at sample 99"):
            shorter.read(np.array([99]))


def test_files_without_any_version_are_not_kept(server, folder):
    url = server.put("/x.npy", BODY, X_Nothing="x")
    ms.NpySource(url).read(SOME)
    assert not (folder / "cache").exists()
    server.put("/x.npy", npy_bytes(ROWS + 1), X_Nothing="x")
    np.testing.assert_array_equal(ms.NpySource(url).read(SOME), ROWS[SOME] + 1)


def test_a_server_that_gives_no_parts_is_asked_for_the_whole(server):
    url = server.put("/x.npy", BODY)
    server.fault = lambda handler: send(handler, 200, *server.files["/x.npy"][:1], **server.files["/x.npy"][1])
    np.testing.assert_array_equal(ms.NpySource(url).read(SOME), ROWS[SOME])
    assert [found is None for _, found in server.requests] == [False, True]  # the part, the whole, and then the cache
    cloud.configure(cache_limit=1 << 20)
    with refuses(OSError, "sends files as a whole", "cache_limit", str(len(BODY))):
        ms.NpySource(url)


def test_plain_http_needs_consent_beyond_this_machine(server):
    with refuses(ValueError, "NpySource", "plain http", "configure('http://example.com/', allow_http=True)"):
        ms.NpySource("http://user:word@example.com/x.npy")
    url = server.put("/go", BODY)
    server.fault = lambda handler: handler.path == "/go" and send(handler, 302, Location="http://127.0.0.1:1/x")
    cloud.configure(retries=0)
    with refuses(ConnectionError, url):
        ms.NpySource(url)


def test_options_are_checked_and_the_longest_beginning_wins():
    cloud.configure("s3://a/", timeout=3.0, store={"region": "x"})
    cloud.configure("s3://a/b", timeout=4)
    assert [cloud.options_for(url).timeout for url in ("s3://a/b/c", "s3://a/c", "s3://c")] == [4, 3.0, 0.5]
    assert cloud.options_for("s3://a/b/c").store == {"region": "x"}
    with refuses(TypeError, "no option 'time'", "timeout, deadline"):
        cloud.configure(time=3)
    with refuses(ValueError, "timeout", "-1 (int)"):
        cloud.configure(timeout=-1)
    with refuses(ValueError, "'s3://bucket/'", "'bucket'"):
        cloud.configure("bucket")
    with refuses(ValueError, "backend 'obstore' or 'fsspec'"):
        cloud.configure(backend="boto")
    assert "secret" not in repr(cloud.CloudOptions(store={"key": "secret"}))


def test_missing_packages_are_named(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with refuses(ImportError, "NpySource with s3:// needs obstore. Run: pip install 'fsspec>=2025.3' 'obstore>=0.11'"):
        ms.NpySource("s3://bucket/x.npy")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with refuses(
        ImportError, "NpySource with memory:// needs fsspec. Run: pip install 'fsspec>=2025.3' 'obstore>=0.11'"
    ):
        ms.NpySource("memory://x.npy")


def chaos(server, seed, whole):
    """Faults at random, about every third answer."""
    random, lock = np.random.default_rng(seed), threading.Lock()

    def fault(handler):
        with lock:
            kind, cut = random.integers(0, [18, 2000]).tolist()
        body, headers = server.files[handler.path]
        asked = "Range" in handler.headers
        kinds = {
            0: lambda: reset(handler),
            1: lambda: send(handler, 503),
            2: lambda: send(handler, 500, b"x" * cut),
            3: lambda: ranged(handler, body, headers, cut=cut),
            4: lambda: asked and send(handler, 206, b"", Content_Range=f"bytes 0-9/{len(body)}", **headers),
            5: lambda: whole and send(handler, 200, body, **headers),
        }
        return kind in kinds and kinds[kind]()

    return fault


@pytest.mark.parametrize("seed", range(2))
def test_a_stream_through_chaos_is_equal_or_a_named_error(server, folder, key, caching, seed):
    np.save(folder / "x.npy", ROWS)
    cloud.configure(retries=30, backoff=0.0001, deadline=60)
    source = ms.NpySource({"x": server.put("/x.npy", BODY)})
    server.fault = chaos(server, seed, whole=caching == "cached")
    expected, _ = stream_of(ms.NpySource({"x": folder / "x.npy"}), key, steps=10)
    found, _ = stream_of(source, key, ms.Threads(4), steps=10)
    assert_trees_equal(found, expected)
    server.put("/x.npy", npy_bytes(ROWS ^ 1))
    cold = ms.NpySource({"x": f"{server.address}/x.npy"})
    server.put("/x.npy", npy_bytes(ROWS ^ 2))
    try:
        changed, _ = stream_of(cold, key, steps=10)
    except cloud.FileChanged:
        return
    assert_trees_equal(changed, [({"x": pair[0]["x"] ^ 1}, pair[1]) for pair in expected])


def used(folder):
    return sum(path.stat().st_size for path in folder.glob("??/*"))


def test_the_cache_is_bounded_and_drops_what_was_not_used(folder):
    cache = FileCache(folder / "c", 100_000)
    names = [f"{number:02x}" + "0" * 38 + f"-{number}" for number in range(40)]
    for number, name in enumerate(names):
        cache.write({name: bytes([number]) * 5000})
        os.utime(folder / "c" / name[:2] / name, (number, number))  # so that the order is that of writing
        assert used(folder / "c") <= 100_000
        assert FileCache(folder / "c", 100_000).read(names[0], 10, 3) == b"\0\0\0"  # which touches it
    assert cache.read(names[1], 0, 5) is None
    assert cache.read(names[39], 4990, 10) == bytes([39]) * 10
    cache.write({names[5]: bytes(200_000)})
    assert cache.read(names[5], 0, 1) is None


def test_damaged_pieces_are_noticed_and_fetched_again(server, folder):
    url = server.put("/x.npy", BODY)
    np.testing.assert_array_equal(ms.NpySource(url).read(SOME), ROWS[SOME])
    pieces = [path for path in (folder / "cache").glob("??/*") if path.is_file()]
    assert pieces
    for number, path in enumerate(pieces):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data) if number % 2 else bytes(data[: len(data) // 3]))
    program = (
        "import sys, pickle, numpy as np; source = pickle.load(open(sys.argv[1], 'rb')); "
        "assert 'jax' not in sys.modules; print(source.read(np.array([4999, 0, 17, 2500])).sum())"
    )
    (folder / "source").write_bytes(pickle.dumps(ms.NpySource(url)))
    asked = len(server.requests)
    done = subprocess.run([sys.executable, "-c", program, str(folder / "source")], capture_output=True, text=True)
    assert done.stdout.strip() == str(ROWS[[4999, 0, 17, 2500]].sum()), done.stderr
    assert len(server.requests) > asked


def test_processes_share_a_cache_and_may_be_killed(folder):
    """Writers that are killed at any time leave whole pieces, within the limit."""
    program = (
        "import sys, zlib, pathlib; from millstream.files.file_cache import FileCache\n"
        "cache = FileCache(pathlib.Path(sys.argv[1]), 400_000)\n"
        "print('on', flush=True)\n"
        "for number in range(10**9):\n"
        "    name = f'{number % 97:02x}' + '0' * 38 + f'-{number % 97}'\n"
        "    found = cache.read(name, 0, 9000)\n"
        "    assert found in (None, bytes([number % 97]) * 9000)\n"
        "    cache.write({name: bytes([number % 97]) * 9000})\n"
    )
    command = [sys.executable, "-c", program, str(folder / "c")]
    for _ in range(3):
        writers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == b"on\n"
        time.sleep(0.15)
        for writer in writers:
            writer.kill()
            assert writer.communicate()[1] == b""
    pieces = [path for path in (folder / "c").glob("??/*") if not path.name.startswith(".")]
    assert pieces and sum(path.stat().st_size for path in pieces) <= 400_000
    for path in pieces:
        data = path.read_bytes()
        assert data[8:12] == zlib.crc32(data[12:]).to_bytes(4, "little")


def test_a_cache_that_cannot_be_written_is_warned_about_and_done_without(server, folder):
    url = server.put("/x.npy", BODY)
    (folder / "cache").mkdir()
    (folder / "cache" / ".used").mkdir()
    with pytest.warns(UserWarning, match="cannot write to .*Files are read without it"):
        np.testing.assert_array_equal(ms.NpySource(url).read(SOME), ROWS[SOME])


def test_local_files_that_change_are_noticed(folder, key):
    path = folder / "x.npy"
    np.save(path, ROWS)
    source = ms.NpySource({"x": path})
    np.testing.assert_array_equal(source.read(SOME)["x"], ROWS[SOME])
    packed = pickle.dumps(source)
    path.write_bytes(BODY[:1000])
    with refuses(cloud.FileChanged, str(path), "has changed since it was opened", "at sample 4999"):
        source.read(SOME)
    with refuses(cloud.FileChanged, str(path)):
        pickle.loads(packed)
    path.unlink()
    with refuses(cloud.FileChanged, str(path), "NpySource"):
        source.read(SOME)


@pytest.mark.parametrize("kind", ["npy", "idx", "csv", "safetensors", "tar"])
def test_a_file_replaced_by_one_of_the_same_size_and_time_has_changed(folder, kind):
    path = folder / f"x.{kind}"
    written = {"npy": BODY, "idx": idx_bytes(ROWS.astype(np.uint8)), "csv": b"x\n1\n2\n"}
    files = {"safetensors": format_pipelines.safetensors_file, "tar": format_pipelines.tar_file}
    path.write_bytes(written[kind] if kind in written else pathlib.Path(files[kind]()).read_bytes())
    makers = {"npy": ms.NpySource, "csv": ms.CsvSource, "safetensors": SafetensorsSource, "tar": WebDatasetSource}
    source = ms.sources.IdxSource({"x": path}) if kind == "idx" else makers[kind](path)
    packed = pickle.dumps(source)
    source.read(np.array([0]))
    shutil.copy2(path, folder / "new")
    os.replace(folder / "new", path)
    with refuses(cloud.FileChanged, str(path), "has changed since it was opened", "build the source again"):
        pickle.loads(packed).read(np.array([1]))
    if kind != "csv":  # which is read once
        with refuses(cloud.FileChanged, str(path), "has changed since it was opened", "at sample 1"):
            source.read(np.array([1]))


@pytest.mark.parametrize("kind", ["tar", "npy", "parquet", "arrow"])
def test_a_file_that_is_gone_when_a_worker_starts_has_changed(folder, kind):
    files = {"tar": format_pipelines.tar_file, "parquet": format_pipelines.parquet_file}
    path = folder / f"gone.{kind}"
    if kind == "npy":
        np.save(path, ROWS)
    else:
        shutil.copy({**files, "arrow": format_pipelines.arrow_file}[kind](), path)
    makers = {"tar": WebDatasetSource, "npy": ms.NpySource, "parquet": ParquetSource, "arrow": ArrowSource}
    packed = pickle.dumps(makers[kind](path))
    path.unlink()
    with refuses(cloud.FileChanged, str(path), "build the source again"):
        pickle.loads(packed).read(np.array([0]))


def test_too_many_open_files_are_not_taken_for_a_file_that_has_changed(folder):
    np.save(folder / "x.npy", ROWS)
    shutil.copy(format_pipelines.parquet_file(), folder / "x.parquet")
    file, table = open_file("Test", folder / "x.npy"), ParquetSource(folder / "x.parquet")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        for read in (lambda: file.read_at(0, 8), lambda: table.read(np.array([0]))):
            with pytest.raises(OSError, match="Too many open files") as caught:
                read()
            assert caught.value.errno == errno.EMFILE
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_file_as_a_stream(server, folder):
    (folder / "f").write_bytes(BODY)
    for file in (open_file("Test", folder / "f"), open_file("Test", server.put("/f", BODY))):
        with buffered(file, 1000) as stream:
            assert stream.read(10) == BODY[:10]
            assert stream.seek(-5, os.SEEK_END) == len(BODY) - 5
            assert stream.read() == BODY[-5:]
            stream.seek(300_000)
            assert stream.read() == BODY[300_000:]
        assert list(file.read_ranges([(5, 0), (7, 3), (len(BODY) - 1, 1), (0, len(BODY))])) == [
            b"",
            BODY[7:10],
            BODY[-1:],
            BODY,
        ]
        for start, size in ((len(BODY), 1), (0, len(BODY) + 1)):
            with refuses(cloud.FileChanged, file.name):
                file.read_at(start, size)
    local = open_file("Test", f"file://{folder}/f")
    assert isinstance(local, LocalFile) and local.path == pathlib.Path(folder / "f")
