"""Plan files: what a view found in the samples, kept on disk. Found again, never stale, never half written."""

import dataclasses
import functools
import io
import os
import pathlib
import re
import subprocess
import sys
import time
import types
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from format_pipelines import FORMATS
from hypothesis import given, settings

import millstream as ms
from millstream.files import plan_file
from millstream.files.lock import locked
from millstream.files.safe_path import NotPlainFile
from millstream.reading.memory import mapped_file
from millstream.views import _measure
from millstream.views._measure import lengths_of

N = 37


def arrays(n=N, change: Any = None) -> Any:
    data = {"x": np.arange(n, dtype=np.int32), "y": np.arange(n, dtype=np.int32) % 4}
    if change is not None:
        data["y"][change] += 1
    return ms.ArraySampleSource(data, "sequential")


def dataset(n=N, shift=0) -> Any:
    return ms.DatasetSource([{"x": np.int32(i + shift), "y": np.int32(i % 4)} for i in range(n)], "sequential")


def counting(log):
    def keep(sample):
        with open(log, "ab") as file:
            file.write(b".")
        return sample["x"] % 2 == 0

    return keep


def size(path):
    return path.stat().st_size if path.exists() else 0


def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def positions(view):
    return view.locate(np.arange(len(view))).tolist()


def test_a_predicate_is_called_once_and_its_plan_is_mapped_from_then_on(folder):
    plans, log = folder / "plans", folder / "log"
    views = [ms.views.select(dataset(), counting(str(log)), plans=plans) for _ in range(3)]
    assert size(log) == N
    assert [positions(view) for view in views] == [list(range(0, N, 2))] * 3
    [name] = names(plans)
    assert re.fullmatch(r"kept-keep-[0-9a-f]{16}\.plan", name)
    for view in views:
        table: Any = view.selection.tables[0]
        file = mapped_file(table)
        assert file is not None and pathlib.Path(str(file.filename)) == plans / name
        assert not table.flags.writeable and table.dtype == np.uint32


MAKERS = {
    "select": lambda source, plans, seed: [ms.views.select(source, lambda s: (s["x"] + seed) % 3 > 0, plans=plans)],
    "split": lambda source, plans, seed: ms.views.split(source, {"a": 0.6, "b": 0.4}, seed=seed, plans=plans),
    "split by counts": lambda source, plans, seed: ms.views.split(source, {"a": 20, "b": 17}, seed=seed, plans=plans),
    "groups": lambda source, plans, seed: ms.views.split(
        source, {"a": 0.5, "b": 0.5}, by=lambda s: int(s["x"]) % 11, seed=seed, plans=plans
    ),
    "classes": lambda source, plans, seed: ms.views.split(
        source, {"a": 0.5, "b": 0.5}, stratify="y", seed=seed, plans=plans
    ),
    "folds": lambda source, plans, seed: sum(ms.views.folds(source, 3, by="x", seed=seed, plans=plans), ()),
    "balanced": lambda source, plans, seed: [ms.views.balanced(source, "y", samples=20 + seed, plans=plans)],
}


@settings(max_examples=40)
@given(name=st.sampled_from(sorted(MAKERS)), seed=st.integers(0, 5), make=st.sampled_from([arrays, dataset]))
def test_views_from_plan_files_are_those_in_memory(memory, name, seed, make):
    expected = MAKERS[name](make(), None, seed)
    for _ in range(2):  # made, and found again
        found = MAKERS[name](make(), memory / "shared plans", seed)
        for one, other in zip(found, expected, strict=True):
            assert one.selection == other.selection  # with the hashes of the tables: states of one fit the other
            for table, its in zip(one.selection.tables, other.selection.tables, strict=True):
                assert mapped_file(table) is not None and table.tolist() == its.tolist()


def test_loaders_over_a_mapped_table_give_the_batches_of_one_in_memory(folder, key):
    for executor in (None, ms.Threads(2)):
        runs = []
        for plans in (None, folder / "plans"):
            view = ms.views.select(arrays(), lambda sample: sample["x"] > 5, plans=plans)
            loader = ms.DataLoader([view, ms.BatchTransform(8)], executor=executor)
            runs.append([jax.device_get(pair) for pair in loader.iterate(loader.init_state(key))])
        for one, other in zip(*runs, strict=True):
            jax.tree.map(np.testing.assert_array_equal, one, other)


def test_views_in_a_block_keep_their_plans_and_others_write_nothing(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with ms.views.plans("one"):
        ms.views.select(arrays(), lambda sample: sample["x"] > 3)
        with ms.views.plans("two"):
            ms.views.select(arrays(), lambda sample: sample["x"] > 4)
        ms.views.select(arrays(), lambda sample: sample["x"] > 5)
    ms.views.select(arrays(), lambda sample: sample["x"] > 6)
    ms.views.select(arrays(), np.arange(N) > 6, plans="three")  # nothing has to be looked at
    assert names(folder) == ["one", "two"]
    assert (len(names(folder / "one")), len(names(folder / "two"))) == (2, 1)


# What a plan is found again by


def function(body, **variables):
    """A function as it is written in a file that is edited between two runs."""
    module = types.ModuleType("edited")
    vars(module).update(variables)
    exec(body, vars(module))
    return vars(module)["keep"]


def helped(constant, module="edited"):
    helper = function(f"def keep(value): return value > {constant}")
    helper.__module__ = module
    return helper


def filters(constant):
    module: Any = types.ModuleType("filters")
    module.large = helped(constant, "filters")
    return module


@dataclasses.dataclass(frozen=True)
class Above:
    limit: int

    def __call__(self, sample):
        return bool(sample["x"] > self.limit)


def _closing_over(value):
    return lambda sample: bool(sample["x"] > value)


SAME = "def keep(sample): return bool(sample['x'] > 5)"
DIFFERENT = {
    "a constant": (function(SAME), function(SAME.replace("5", "6"))),
    "an operator": (function(SAME), function(SAME.replace(">", "<"))),
    "a name": tuple(function(f"def keep(s): return bool(s['{name}'] > 1)") for name in "xy"),
    "a default": (
        function("def keep(s, n=5): return bool(s['x'] > n)"),
        function("def keep(s, n=6): return bool(s['x'] > n)"),
    ),
    "a closure": (_closing_over(5), _closing_over(6)),
    "an array": (_closing_over(np.arange(3).sum() + 5), _closing_over(np.int64(2))),
    "a global": tuple(function("def keep(s): return bool(s['x'] > LIMIT)", LIMIT=limit) for limit in (5, 6)),
    "a set": tuple(function("def keep(s): return int(s['x']) in CHOSEN", CHOSEN=set(range(c))) for c in (5, 6)),
    "a helper": tuple(function("def keep(s): return bool(is_large(s['x']))", is_large=helped(n)) for n in (5, 6)),
    "a helper of a different module": tuple(
        function("def keep(s): return bool(is_large(s['x']))", is_large=helped(n, "elsewhere")) for n in (5, 6)
    ),
    "a function of a module": tuple(
        function("def keep(s): return bool(filters.large(s['x']))", filters=module)
        for module in (filters(5), filters(6))
    ),
    "code inside": (
        function("def keep(s): return any(v > 5 for v in [s['x']])"),
        function("def keep(s): return any(v > 6 for v in [s['x']])"),
    ),
    "an exception handler": (
        function("def keep(s):\n try: return bool(s['x'] > 5)\n except KeyError: return True"),
        function("def keep(s):\n try: return bool(s['x'] > 5)\n except IndexError: return True"),
    ),
    "a partial": (functools.partial(function("def keep(n, s): return bool(s['x'] > n)"), n) for n in (5, 6)),
    "a dataclass": (Above(5), Above(6)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_changed_function_is_a_different_plan(folder, name):
    for number, keep in enumerate(DIFFERENT[name], start=1):
        for _ in range(2):
            view = ms.views.select(arrays(), keep, plans=folder)
            assert positions(view) == [i for i in range(N) if keep({"x": i, "y": i % 4})]
        assert len(names(folder)) == number


UNCHANGED = {
    "lines and comments": function("\n\n\ndef keep(sample):\n    # the same\n    return bool(sample['x'] > 5)"),
    "a different file": function(SAME),
    "a global that it does not name": function(SAME, LIMIT=object()),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_does_not_change_a_function_does_not_change_its_plan(folder, name):
    for keep in (function(SAME), UNCHANGED[name]):
        ms.views.select(arrays(), keep, plans=folder)
    assert len(names(folder)) == 1


def test_a_function_that_calls_itself_is_seen(folder):
    body = "def keep(s, n=3): return bool(s['x'] > 5) if n == 0 else keep(s, n - 1)"
    for number, text in enumerate((body, body.replace("5", "6")), start=1):
        ms.views.select(arrays(), function(text), plans=folder)
        assert len(names(folder)) == number


class Model:
    """What cannot be seen: an object with a state of its own."""

    def __repr__(self):
        return "a model"


def test_what_cannot_be_seen_needs_a_version(folder):
    keep = function("def keep(s): return MODEL is not None and bool(s['x'] > 5)", MODEL=Model())
    with pytest.raises(TypeError) as caught:
        ms.views.select(arrays(), keep, plans=folder)
    assert str(caught.value) == (
        "select(keep) cannot tell whether keep is the function of a plan file: its variable 'MODEL' is a model "
        "(Model), whose contents it cannot see. Give what stands for it, and change that when it changes: "
        f"plans=ms.views.plans({str(folder)!r}, version='1')."
    )
    assert names(folder) == []
    for number, version in enumerate(("1", "1", "2", "1")):
        ms.views.select(arrays(), keep, plans=ms.views.plans(folder, version=version))
        assert len(names(folder)) == (1 if number < 2 else 2)
    changed = function("def keep(s): return MODEL is not None and bool(s['x'] > 6)", MODEL=Model())
    view = ms.views.select(arrays(), changed, plans=ms.views.plans(folder, version="1"))
    assert positions(view)[0] == 7  # what can be seen counts with a version, too


SOURCES = {
    "a value anywhere": (arrays(), arrays(change=23)),
    "the number of samples": (dataset(), dataset(N + 1)),
    "samples": (dataset(), dataset(shift=1)),
    "a view": (arrays()[::2], arrays()[1::2]),
    "indices": (arrays()[[1, 2, 3]], arrays()[[1, 2, 4]]),
    "the kind of source": (arrays(), dataset()),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_changed_source_is_a_different_plan(folder, name):
    for number, source in enumerate(SOURCES[name], start=1):
        made, view = (
            ms.views.select(source, lambda sample: (sample["x"] + sample["y"]) % 3 > 0, plans=folder) for _ in range(2)
        )
        assert positions(made) == positions(view)
        sums = [int(source[i]["x"] + source[i]["y"]) for i in range(len(source))]
        assert [int(view[i]["x"] + view[i]["y"]) for i in range(len(view))] == [one for one in sums if one % 3]
        assert len(names(folder)) == number


def test_files_that_were_written_to_are_a_different_source(folder):
    plans, data = folder / "plans", np.arange(5000, dtype=np.int32)
    for number in (1, 2):
        data[1234] += 1  # which is none of the samples that are read to recognise a source
        np.save(folder / "x.npy", data)
        os.utime(folder / "x.npy", (number, number))
        for kind in (_npy, _mapped, _npy, _mapped):
            view = ms.views.select(kind(folder), lambda sample: sample["x"] % 2 == 0, plans=plans / kind.__name__)
            assert (1234 in positions(view)) == (data[1234] % 2 == 0)
            assert len(names(plans / kind.__name__)) == number


def _npy(folder):
    return ms.sources.NpySource({"x": folder / "x.npy"})


def _mapped(folder):
    return ms.HostArraySource({"x": np.load(folder / "x.npy", mmap_mode="r")})


IN_FILES = {
    f"host, {name}"
    for name in ("Arrow file", "SQLite", "ArrayRecord", "zarr", "tar", "safetensors", "JSON lines", "MDS", "HDF5")
}
IN_FILES |= {
    "host, Lance",
    "host, Parquet",
    "host, Parquet, little kept",
    "host, token file",
    "host, TFRecord",
    "host, prepared",
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_recognised_and_those_in_files_by_their_stamps(folder, name):
    sources: Any = [FORMATS[name]()[0] for _ in range(2)]
    keep = function("def keep(s): return bool(s['label'] > 0)")
    for source in sources:
        view = ms.views.select(source, keep, plans=folder)
        assert 0 < len(view) < len(source)
    assert len(names(folder)) == 1
    source = sources[-1]
    assert bool(source.stamps) == (name in IN_FILES)
    if source.stamps:
        assert all(isinstance(file, str) and size > 0 and time for file, size, time in source.stamps[:1])
        source.stamps = [(file, size, 1) for file, size, _ in source.stamps]  # as if they had been written to
        ms.views.select(source, keep, plans=folder)
        assert len(names(folder)) == 2


class Restless:
    """Samples that are different whenever they are read."""

    read = 0

    def __len__(self):
        return 20

    def __getitem__(self, index):
        self.read += 1
        return {"x": np.int32(self.read), "y": np.int32(index)}


def test_a_source_that_cannot_be_recognised_needs_a_version(folder):
    source = ms.DatasetSource(Restless())
    with pytest.raises(TypeError, match=r"samples of DatasetSource are those of a plan file: .* version='1'\)"):
        ms.views.select(source, lambda sample: sample["y"] > 3, plans=folder)
    for _ in range(2):
        view = ms.views.select(source, lambda sample: sample["y"] > 3, plans=ms.views.plans(folder, version="1"))
        assert positions(view) == list(range(4, 20))
    assert len(names(folder)) == 1


def test_groups_that_are_looked_at_once_serve_every_division(folder):
    plans, log = folder / "plans", str(folder / "log")
    group = function("def keep(s):\n with open(LOG, 'ab') as f: f.write(b'.')\n return int(s['x']) % 12", LOG=log)
    for seed in range(3):
        ms.views.split(dataset(), {"a": 0.5, "b": 0.5}, by=group, seed=seed + 2, plans=plans)
    ms.views.folds(dataset(), 2, by=group, plans=plans)
    ms.views.balanced(dataset(), group, plans=plans)
    assert size(folder / "log") == N


# Processes


@pytest.mark.parametrize("command", ["eight", "kill"])
def test_processes_at_once_make_one_plan_and_a_killed_one_is_continued(tmp_path, command):
    script = pathlib.Path(__file__).with_name("plan_script.py")
    environment = {**os.environ, "LOG": str(tmp_path / "log"), "JAX_PLATFORMS": "cpu"}
    call = [sys.executable, "-W", "ignore:os.fork", str(script), command, str(tmp_path / "plans")]
    done = subprocess.run(call, capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_worker_processes_measure_without_jax(folder):
    keep = function("def keep(s):\n time.sleep(0.06)\n return 'jax' not in sys.modules", time=time, sys=sys)
    kept = positions(ms.views.select(dataset(12), keep, executor=ms.Processes(1), plans=folder))
    assert 0 < kept[0] < 6 and kept == list(
        range(kept[0], 12)
    )  # the first ones are tried here, to see how long it takes


def test_an_error_leaves_nothing_and_an_interrupt_what_can_be_continued(folder, monkeypatch):
    monkeypatch.setattr(plan_file, "_INTERVAL", 0.0)
    monkeypatch.setattr(_measure, "_TRIAL", 60.0)  # an interrupt comes to the main thread
    plans, log, stop = folder / "plans", folder / "log", folder / "stop"
    body = """
def keep(s):
    with open(LOG, "ab") as file:
        file.write(b".")
    if s["x"] == 20 and os.path.exists(STOP):
        raise {error}
    return True
"""
    stop.touch()
    for error, left in (("OSError('no such disk')", 0), ("KeyboardInterrupt", 1)):
        keep = function(body.format(error=error), os=os, LOG=str(log), STOP=str(stop))
        with pytest.raises((OSError, KeyboardInterrupt)):
            ms.views.select(arrays(), keep, plans=plans)
        assert len(names(plans)) == left
    before = size(log)
    stop.unlink()
    assert len(ms.views.select(arrays(), keep, plans=plans)) == N
    assert 0 < size(log) - before < N
    assert [pathlib.Path(name).suffix for name in names(plans)] == [".plan"]


def test_a_full_disk_is_named_and_leaves_nothing(folder):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"kept-keep-\w+\.plan\.values\.part") as caught:
            ms.views.select(arrays(5000), function(SAME), plans=folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.__notes__ == [
        "This came from the plan file of select(keep). Give plans= a folder that can be written to."
    ]
    assert names(folder) == []


def test_a_process_that_gets_no_further_is_waited_for_no_longer_than_the_timeout(folder):
    keep = function(SAME)
    ms.views.select(arrays(), keep, plans=folder)
    [name] = names(folder)
    (folder / name).unlink()
    with locked(folder / f".{name}.lock", 0.0):
        with pytest.raises(TimeoutError, match=r"has held .* for 0\.1 seconds") as caught:
            ms.views.select(arrays(), keep, plans=ms.views.plans(folder, timeout=0.1))
    assert "It makes the plan file of select(keep), and has written nothing in that time." in caught.value.__notes__
    assert names(folder) == []


def test_what_was_left_long_ago_is_removed(folder):
    old, fresh = folder / ".kept-x-0123456789abcdef.plan.values.part", folder / ".kept-y-0123456789abcdef.plan.part"
    for path, days in ((old, 8), (fresh, 6)):
        path.touch()
        os.utime(path, (0, time.time() - days * 86_400))
    ms.views.select(arrays(), function(SAME), plans=folder)
    assert not old.exists() and fresh.exists()


# Damage


def regions():
    record, data = plan_file._RECORD.size, 4 * len(range(6, N))
    places = [
        *range(0, record, 5),
        record,
        record + 7,
        2047,
        2048,
        2100,
        4095,
        4096,
        4097,
        4096 + data // 2,
        4095 + data,
    ]
    flips = {f"flip {place}": lambda old, place=place: _flipped(old, place) for place in places}
    cuts = {f"cut {n}": lambda old, n=n: old[:n] for n in (0, 1, record - 1, record, 4095, 4096, 4097, 4095 + data)}
    return {
        **flips,
        **cuts,
        "longer": lambda old: old + b"\0",
        "foreign": lambda old: b"PK\x03\x04" + os.urandom(5000),
        "zeros": lambda old: bytes(len(old)),
        "noise": lambda old: np.random.default_rng(0).bytes(len(old)),
    }


def _flipped(old, place):
    return old[:place] + bytes([old[place] ^ (1 << place % 8)]) + old[place + 1 :]


@pytest.mark.parametrize("always", [True, False], ids=["small", "large"])
def test_every_damage_is_found_and_the_plan_made_again(folder, monkeypatch, always):
    if not always:  # large files are read only if they were written to
        monkeypatch.setattr(plan_file, "_SMALL", 0)
    keep, expected = function(SAME), list(range(6, N))
    ms.views.select(arrays(), keep, plans=folder)
    [name] = names(folder)
    path = folder / name
    for damage in regions().values():
        old, stamp = path.read_bytes(), path.stat().st_mtime_ns
        new = damage(old)
        path.write_bytes(new)
        if always:
            os.utime(path, ns=(stamp, stamp))
        with pytest.warns(RuntimeWarning, match=rf"{name} is .*It is made again\.$") as warned:
            view = ms.views.select(arrays(), keep, plans=folder)
        assert len(warned) == 1 and "test_plan_files" in warned[0].filename
        assert positions(view) == expected and names(folder) == [name]
        assert path.read_bytes()[4096:] == old[4096:]


def test_a_plan_under_the_name_of_a_different_one_is_not_used(folder):
    for limit in (5, 6):
        ms.views.select(arrays(), function(SAME.replace("5", str(limit))), plans=folder)
    one, two = (folder / name for name in names(folder))
    two.write_bytes(one.read_bytes())
    with pytest.warns(RuntimeWarning, match="is a plan file of something else. It is made again"):
        found = [positions(ms.views.select(arrays(), function(SAME.replace("5", n)), plans=folder))[0] for n in "56"]
    assert found == [6, 7]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_not_a_plain_file_is_refused(folder, kind):
    ms.views.select(arrays(), function(SAME), plans=folder)
    [name] = names(folder)
    path = folder / name
    path.unlink()
    {"link": lambda: path.symlink_to("/etc/passwd"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    with pytest.raises(NotPlainFile, match=name) as caught:
        ms.views.select(arrays(), function(SAME), plans=folder)
    assert "This came from the plan file of select(keep)" in caught.value.__notes__[0]


@given(cuts=st.lists(st.integers(1, 999), max_size=6), torn=st.integers(0, 5000), seed=st.integers(0, 9))
def test_whatever_is_left_of_a_file_that_was_being_written_is_continued_or_begun_again(memory, cuts, torn, seed):
    values = np.random.default_rng(seed).integers(0, 2**32, 1000, np.uint32)
    path, of = memory / "writing.part", bytes(range(32))
    path.unlink(missing_ok=True)
    for stop in sorted(cuts):
        writer = plan_file.PlanWriter(path, of, values.dtype, len(values))
        writer.write(values[writer.done : stop])
        writer._save()
        writer._file.close()
        if torn < size(path):  # a bit of it is lost, anywhere
            path.write_bytes(_flipped(path.read_bytes(), torn))
    with plan_file.PlanWriter(path, of, values.dtype, len(values)) as writer:
        assert writer.done in {0, *cuts}
        writer.write(values[writer.done :])
        writer.finish()
    found, digest = plan_file.open_plan(path, of)
    assert found.tolist() == values.tolist() and digest == plan_file.hashlib.sha256(values.tobytes()).hexdigest()


# What is shown


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_how_far_it_is_and_that_it_continues(folder, monkeypatch):
    monkeypatch.setattr(_measure, "_PATIENCE", 0.0)
    monkeypatch.setattr(plan_file, "_INTERVAL", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    stop = folder / "stop"
    body = """
def keep(s):
    time.sleep(0.002)
    if s["x"] == 20 and os.path.exists(STOP):
        raise KeyboardInterrupt
    return True
"""
    keep = function(body, time=time, os=os, STOP=str(stop))
    stop.touch()
    monkeypatch.setattr(_measure, "_TRIAL", 60.0)
    with pytest.raises(KeyboardInterrupt):
        ms.views.select(arrays(120), keep, executor=ms.Threads(2), plans=folder / "plans")
    monkeypatch.setattr(_measure, "_TRIAL", 0.0)
    monkeypatch.setattr(_measure, "_SHORT", -1.0)
    stop.unlink()
    ms.views.select(arrays(120), keep, executor=ms.Threads(2), plans=folder / "plans")
    shown = terminal.getvalue()
    assert re.search(r"select\(keep\): continues at sample \d+ of 120", shown)
    assert re.search(r"select\(keep\): \d+ of 120 samples, \d+ per second", shown)
    assert re.search(r"per second, continued at \d+", shown)


def test_explain_shows_the_plan_file(folder):
    view = ms.views.select(arrays(), function(SAME), plans=folder)
    [name] = names(folder)
    loader = ms.DataLoader([view[::2], ms.BatchTransform(4)])
    plan = loader.explain().plan
    assert re.fullmatch(rf"{folder / name} \(4\.22 kB, made \d+ seconds? ago, mapped\)", plan["plan file"])
    in_memory = ms.DataLoader([ms.views.select(arrays(), function(SAME)), ms.BatchTransform(4)])
    assert in_memory.explain().plan["plan file"] == "none: 124 B in memory"
    assert "plan file" not in ms.DataLoader([arrays()[::2], ms.BatchTransform(4)]).explain().plan


# Lengths


RAGGED = [{"ids": np.arange(i % 7), "text": "x" * (i % 5), "n": i % 3} for i in range(20)]


class WithLengths(ms.sources.HostSource):
    ordering = "sequential"
    sample_spec = ms.sources.spec_of("WithLengths", {"x": np.float32(0)})
    lengths = np.arange(20) % 7

    def __len__(self):
        return 20


def test_lengths_are_those_of_a_field_of_a_function_of_an_array_or_known(folder):
    ragged = ms.DatasetSource(RAGGED, "sequential")
    for plans in (None, folder, folder):
        for by, expected in {
            "ids": [i % 7 for i in range(20)],
            "text": [i % 5 for i in range(20)],
        }.items():
            for source, indices in ((ragged, range(20)), (ragged[::-3], range(20)[::-3])):
                found = lengths_of("buckets", "by", source, by, None, plans)
                assert found.dtype == np.int64 and found.tolist() == [expected[i] for i in indices]
        found = lengths_of("buckets", "by", ragged, lambda sample: sample["n"] + 1, None, plans)
        assert found.tolist() == [i % 3 + 1 for i in range(20)]
    given = lengths_of("buckets", "by", ragged, np.arange(20, dtype=np.uint8), None)
    assert given.dtype == np.int64 and given.tolist() == list(range(20))
    known: Any = WithLengths()
    assert lengths_of("buckets", "by", known[::2], "x", None).tolist() == [i % 7 for i in range(0, 20, 2)]


@pytest.mark.parametrize(
    ("by", "error", "text"),
    [
        (
            lambda s: s["n"] - 1,
            ValueError,
            r"buckets\(by=<lambda>\) needs whole numbers, 0 or more. Got -1",
        ),
        (lambda s: 1.0, ValueError, "whole numbers, 0 or more. Got 1.0"),
        (lambda s: True, ValueError, "whole numbers, 0 or more. Got True"),
        ("n", TypeError, r"buckets\(by='n'\) needs a field with a length. Got 0 \(int\)"),
        ("nothing", KeyError, "nothing"),
        (
            np.full(20, -1),
            ValueError,
            r"buckets\(by\) needs whole numbers, 0 or more. Got np.int64\(-1\)",
        ),
        (np.zeros(20), TypeError, "needs by to be whole numbers"),
        (np.zeros(3, int), ValueError, r"each of the 20 samples. Got shape \(3,\)"),
    ],
)
def test_wrong_lengths_are_refused_by_name(by, error, text):
    with pytest.raises(error, match=text):
        lengths_of("buckets", "by", ms.DatasetSource(RAGGED), by, None)


# What is refused


_ANY: Any = 5


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ms.views.plans(_ANY), TypeError, "plans needs directory to be the path of a folder. Got 5"),
        (lambda: ms.views.plans(""), ValueError, "Got an empty one"),
        (lambda: ms.views.plans(__file__), NotADirectoryError, "needs directory to be a folder. .* is a file"),
        (lambda: ms.views.plans("x", version=_ANY), TypeError, r"version to be a text such as '2'. Got 5 \(int\)"),
        (lambda: ms.views.plans("x", timeout=0), ValueError, "timeout to be a number of seconds above 0"),
        (lambda: ms.views.select(arrays(), [1, 2], plans=_ANY), TypeError, "select needs plans to be a folder"),
        (
            lambda: ms.views.split(arrays(), {"a": 0.5, "b": 0.5}, plans=_ANY),
            TypeError,
            r"split needs plans to be a folder, such as ms.views.plans\('data/plans'\). Got 5",
        ),
    ],
)
def test_wrong_plans_are_refused_by_name(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_samples_of_any_shape_have_plan_files(tmp_path):
    def ragged(changed):
        texts = ["oats " * (1 + i % 5) for i in range(40)]
        texts[-1] += changed
        source = ms.DatasetSource([{"text": text} for text in texts])
        return source.map(lambda sample: {"ids": np.frombuffer(sample["text"].encode(), np.uint8)})

    for changed, files in (("", 1), ("", 1), ("!", 2)):
        view = ms.views.select(ragged(changed), lambda sample: len(sample["ids"]) > 12, plans=tmp_path)
        assert len(view) == 24 and len(list(tmp_path.glob("*.plan"))) == files


@pytest.mark.parametrize("given", ["", "\0"])
def test_a_view_names_itself_when_its_folder_is_refused(given):
    source = ms.ArraySampleSource({"x": np.arange(4)})
    with pytest.raises(ValueError, match=r"split needs plans to be the path of a folder\. Got"):
        ms.views.split(source, {"train": 0.5, "held": 0.5}, plans=given)
