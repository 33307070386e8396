"""Checkpoint stores: what is saved is what is loaded, whatever happens in between."""

import asyncio
import collections
import contextlib
import errno
import gc
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import warnings

import checkpoint_store_script as script
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import CACHE, STRICT, folder_in_memory, free_address
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from soak import checkpoint_damage
from test_bad_input import refuses

import millstream as ms
from millstream.checkpoints import CheckpointStore, Retention
from millstream.checkpoints._document import decode, encode
from millstream.checkpoints.manifest import Manifest, damage, read_manifest
from millstream.errors import DamagedCheckpoint, NoCheckpoint, StorageFailed

SCRIPT = pathlib.Path(script.__file__)
PATIENCE = 300.0

negate = jax.jit(lambda x: -x, donate_argnums=0)


@pytest.fixture
def memory():
    """A folder that takes no time to write to."""
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture
def store(memory):
    with CheckpointStore(memory / "run") as store:
        yield store


def run_script(*arguments, devices=1, expect=0):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", SCRIPT, *map(str, arguments)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == expect, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()], run.stderr


def assert_same_leaves(left, right):
    """Same structure, and leaves of the same classes, dtypes and bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert isinstance(a, jax.Array) if isinstance(b, jax.Array) else type(a) is type(b)
        if not hasattr(b, "dtype"):
            assert a == b or a != a
        else:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_array_equal(script.raw(a), script.raw(b))


# What is saved is loaded

Timeline = collections.namedtuple("Timeline", "mean variance")


def many_kinds():
    return {
        "params": [jnp.arange(6.0).reshape(2, 3), jnp.ones((), jnp.bfloat16)],
        "moments": Timeline(np.arange(3), np.array(2.5, ml_dtypes.bfloat16)),
        "key": jax.random.key(5),
        "keys": jax.random.split(jax.random.key(6, impl="rbg"), 3),
        "numbers": (3, 2**70, -0.0, float("inf"), True, 1 - 2j, "text ü"),
        "scalar": np.float32(1.5),
        "empty": (np.zeros((0, 3), np.int8), jnp.zeros((2, 0)), None),
        "small": [jnp.arange(4).astype(dtype) for dtype in (jnp.int4, jnp.uint4, jnp.int2, jnp.uint2)],
        "float8": jnp.arange(4).astype(jnp.float8_e4m3fn),
        "bits": np.array([[True], [False]]),
        "complex": np.array([1 + 2j]),
        "long": np.array([2**62]),
        "swapped": np.arange(3, dtype=">i4"),
        "odd": {"a.b/c": jnp.uint8(3), "": jnp.ones(1)},
        "by number": {7: np.ones(1), 70: 1},
    }


def test_every_kind_of_leaf_comes_back_as_it_was(store):
    store.save(5, many_kinds())
    loaded = store.load(like=many_kinds()).tree
    assert_same_leaves(loaded, many_kinds())
    assert loaded["moments"].mean.flags.writeable


def test_a_masked_array_is_refused_when_it_is_saved_and_as_a_template(store):
    masked = np.ma.MaskedArray(np.arange(3), [True, False, True])
    with refuses(TypeError, "tree['w']: a masked array (shape (3,), int64) would lose its mask"):
        store.save(1, {"w": masked})
    with refuses(TypeError, "would lose its mask"):
        store.save(1, {}, {"w": masked})
    store.save(1, {"w": np.arange(3)})
    with refuses(TypeError, "tree['w']: a masked array"):
        store.load(like={"w": masked})


def test_a_single_array_is_a_tree_and_so_is_nothing_at_all(store):
    store.save(1, jnp.arange(3))
    store.save(2, {})
    np.testing.assert_array_equal(store.load(1, like=jnp.zeros(3, int)).tree, np.arange(3))
    assert store.load(2, like={}).tree == {}


def test_documents_and_files_come_back_as_they_were(store):
    document = {
        "position": (3, [4, None]),
        "best": float("nan"),
        "arrays": {"a": np.arange(3, dtype=np.int16), "b": jnp.ones(2, jnp.bfloat16)},
        5: b"raw",
        "$array": "a word",
    }
    store.save(1, {"w": jnp.ones(2)}, document, {"history.csv": b"a,b\n", "x-1_2": b""}, {"loss": jnp.float32(0.5)})
    loaded = store.load()
    assert loaded.document["best"] != loaded.document["best"]
    np.testing.assert_array_equal(loaded.document["arrays"]["a"], np.arange(3))
    assert loaded.document["arrays"]["b"].dtype == jnp.bfloat16
    assert {key: loaded.document[key] for key in ("position", 5, "$array")} == {
        "position": (3, [4, None]),
        5: b"raw",
        "$array": "a word",
    }
    assert (loaded.files, loaded.step, loaded.metrics) == ({"history.csv": b"a,b\n", "x-1_2": b""}, 1, {"loss": 0.5})


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=10,
)


@given(plain_values)
def test_plain_documents_survive_json(document):
    assert decode(encode("a test", document)) == document


def test_without_a_tree_what_was_saved_comes_by_its_paths(store):
    store.save(1, {"a": [jnp.ones(2), 3], "key": jax.random.key(9)})
    found = store.load().tree
    assert list(found) == ["['a'][0]", "['a'][1]", "['key']"]
    assert isinstance(found["['a'][0]"], np.ndarray) and found["['a'][1]"] == 3
    np.testing.assert_array_equal(script.raw(found["['key']"]), [0, 9])


def test_arrays_are_bound_to_devices_and_weak_only_if_they_were(store):
    device = jax.devices()[0]
    weak = jnp.full((2,), 1.0)
    tree = {"free": jnp.ones(2), "bound": jax.device_put(jnp.ones(2), device), "weak": weak, "count": jnp.asarray(3)}
    store.save(1, tree)
    for like in (tree, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)):
        loaded = store.load(like=like).tree
        assert_same_leaves(loaded, tree)
        real = like is tree
        assert {name: leaf.committed for name, leaf in loaded.items()} == dict.fromkeys(tree, False) | {"bound": real}
        assert (loaded["weak"].weak_type, loaded["count"].weak_type, loaded["free"].weak_type) == (real, real, False)


def test_what_eight_devices_save_one_loads_and_the_other_way_round(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(1, script.sharded_tree())
    (told,), errors = run_script("devices", tmp_path, devices=8)
    assert told["equal"] == dict.fromkeys(("w", "keys", "half"), True)
    assert told["placed"] == dict.fromkeys(("w", "keys", "half"), 8)
    assert all(told["committed"].values()) and errors == ""
    like = jax.tree.map(lambda leaf: leaf, script.sharded_tree())
    like["w"] = jax.device_put(like["w"], NamedSharding(Mesh(np.array(jax.devices()[:1]), "x"), P("x")))
    loaded = CheckpointStore(tmp_path, read_only=True).load(2, like=like)
    assert_same_leaves(loaded.tree, script.sharded_tree())
    assert loaded.document == {"devices": 8}
    assert isinstance(loaded.tree["w"].sharding, NamedSharding) and not loaded.tree["half"].committed


def test_what_jax_would_cut_to_32_bits_is_refused_by_name(store):
    saved = {"n": np.array(2**40 + 5), "w": np.array([0.1, 0.2]), "i": np.arange(3, dtype=np.int32)}
    store.save(1, saved)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved)
    with pytest.raises(ValueError) as refused:
        store.load(like=like)
    for words in (
        "CheckpointStore.load loads arrays as they were saved, and these have more bits than JAX keeps:",
        "\n  tree['n']: shape (), int64, which JAX would make int32\n",
        "\n  tree['w']: shape (2,), float64, which JAX would make float32\n",
        "Give NumPy arrays for them in the tree that says what the result is like, or set",
    ):
        assert words in str(refused.value)
    assert "tree['i']" not in str(refused.value)
    assert_same_leaves(store.load(like=saved).tree, saved)


def test_a_step_is_a_whole_number_of_any_kind(store):
    for step in (np.int64(3), jnp.int32(4), np.array(5), 6):
        store.save(step, {"w": jnp.ones(2)})
        assert store.load(step).step == int(step)
    for wrong in (3.0, "3", True, np.True_, np.float32(3), None, [3], -1):
        with pytest.raises(ValueError, match=r"CheckpointStore\.save needs step to be an int of at least 0\. Got"):
            store.save(wrong, {})
        if wrong is not None:
            with pytest.raises(ValueError, match=r"CheckpointStore\.load needs step to be an int of at least 0\. Got"):
                store.load(wrong)


def test_buffers_may_be_donated_and_changed_as_soon_as_save_returns(store):
    for step in range(5):
        given, own = jnp.full(1 << 19, float(step)), np.full(1 << 19, step)
        store.save(step, {"given": given, "own": own})
        negate(given)
        own[:] = -1
        found = store.load(step, like={"given": jnp.zeros(1 << 19), "own": own}).tree
        assert (np.asarray(found["given"]) == step).all() and (found["own"] == step).all()


def test_saving_and_loading_work_where_an_event_loop_runs(store):
    async def cell():
        store.save(1, {"w": jnp.ones(2)})
        return store.load(like={"w": jnp.zeros(2)}).tree["w"].tolist()

    assert asyncio.run(cell()) == [1.0, 1.0]


def test_a_relative_directory_stays_the_same_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with CheckpointStore("runs/a") as store:
        monkeypatch.chdir("/")
        store.save(1, {"w": jnp.ones(2)})
    assert CheckpointStore(tmp_path / "runs" / "a", read_only=True).steps() == [1]


def test_a_step_that_is_saved_again_is_replaced(store):
    for value in (1.0, 2.0):
        store.save(7, {"w": jnp.full(2, value)})
    assert store.load(like={"w": jnp.zeros(2)}).tree["w"].tolist() == [2.0, 2.0]
    assert sorted(os.listdir(store.directory)) == [".lock", "0000000007"]


def test_steps_after_one_can_be_discarded(store):
    for step in (1, 2, 3):
        store.save(step, {"w": jnp.ones(2)})
    store.discard_after(1)
    assert store.steps() == [1]


def test_checkpoints_of_an_earlier_run_can_be_set_apart(store):
    store.save(1, {"w": jnp.ones(2)})
    apart = store.set_apart()
    assert (store.steps(), CheckpointStore(apart, read_only=True).steps()) == ([], [1])


def test_the_tree_may_depend_on_the_document(store):
    store.save(1, {"w": jnp.ones(3)}, {"width": 3})
    assert store.load(like=lambda found: {"w": jnp.zeros(found.document["width"])}).tree["w"].tolist() == [
        1.0,
        1.0,
        1.0,
    ]


# What does not fit is refused


def test_another_tree_is_refused_with_all_that_differs_side_by_side(store):
    store.save(3, {"w": jnp.ones((2, 3)), "b": jnp.ones(3), "n": 3, "old": np.ones(2), "key": jax.random.key(0)})
    like = {"w": jnp.ones((2, 4)), "b": jnp.ones(3, jnp.bfloat16), "n": 3.0, "new": [np.ones(2)], "key": jnp.ones(2)}
    with pytest.raises(ValueError) as refused:
        store.load(like=like)
    words = str(refused.value)
    assert words.startswith(
        f"CheckpointStore.load needs a tree like the one checkpoint 3 in {store.directory} was saved"
    )
    for line in (
        "tree['w']: shape (2, 3), float32 saved, shape (2, 4), float32 now",
        "tree['b']: shape (3,), float32 saved, shape (3,), bfloat16 now",
        "tree['n']: int saved, float now",
        "tree['old']: shape (2,), float64 saved, none now",
        "tree['new'][0]: none saved, shape (2,), float64 now",
        "tree['key']: shape (), key<fry> saved, shape (2,), float32 now",
    ):
        assert f"\n  {line}\n" in words
    assert "load with like=None" in words


@pytest.mark.parametrize(
    "arguments, words",
    [
        (({"f": len},), r"keeps trees of arrays of numbers.*\n?.*Got tree\['f'\]: <built-in function len>"),
        (({"o": np.array([None])},), r"Got tree\['o'\]: shape \(1,\), object"),
        (({"d": np.longdouble(1)},), r"tree\['d'\]: JAX has no (longdouble|float128)"),
        (({"t": np.array(["a"])},), r"Got tree\['t'\]: shape \(1,\), <U1"),
        (({}, {"a": [len]}), r"keeps a document of plain values.*Got document\['a'\]\[0\]"),
        (({}, None, {"../x": b""}), r"names of letters, digits.*'\.\./x'"),
        (({}, None, {"x": "text"}), r"needs files as bytes"),
        (({}, None, None, {"loss": [1, 2]}), r"needs metrics that are numbers\. Got loss"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once_by_name(store, arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        store.save(1, *arguments)
    assert store.steps() == [] and os.listdir(store.directory) == [".lock"]


def test_a_store_for_reading_or_a_closed_one_does_not_save(tmp_path):
    reader = CheckpointStore(tmp_path / "none", read_only=True)
    assert reader.steps() == [] and reader.latest() is None and not (tmp_path / "none").exists()
    with pytest.raises(RuntimeError, match=r"needs a store that is open for writing\. This one is read_only"):
        reader.save(1, {})
    with CheckpointStore(tmp_path / "some") as store:
        pass
    with pytest.raises(RuntimeError, match="This one is closed"):
        store.save(1, {})
    store.close()
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        reader.load()
    with pytest.raises(ValueError, match="step to be an int of at least 0"):
        CheckpointStore(tmp_path / "third").save(-1, {})
    with pytest.raises(FileNotFoundError, match=r"has no checkpoint of step 4\. It has: \[\]"):
        store.load(4)


# What is kept


def losses(*values):
    return {step: {"loss": value} for step, value in enumerate(values)}


@pytest.mark.parametrize(
    "keep, values, kept",
    [
        (Retention(latest=2), (1.0, 2.0, 3.0, 4.0), [2, 3]),
        (Retention(latest=None), (1.0, 2.0), [0, 1]),
        (Retention(latest=1, best=2, monitor="loss"), (3.0, 1.0, 2.0, 5.0), [1, 2, 3]),
        (Retention(latest=1, best=1, monitor="loss", mode="max"), (3.0, 5.0, 2.0, 1.0), [1, 3]),
        (Retention(latest=1, best=1, monitor="loss"), (1.0, 1.0, 1.0), [0, 2]),
        (Retention(latest=1, best=1, monitor="loss"), (1.0, float("nan"), None, float("-inf")), [0, 3]),
        (Retention(latest=1, best=1, monitor="accuracy"), (1.0, 2.0), [1]),
        (Retention(latest=1, every=2), (1.0, 1.0, 1.0, 1.0, 1.0, 1.0), [0, 2, 4, 5]),
    ],
)
def test_retention_keeps_the_latest_the_best_and_every_so_many(keep, values, kept):
    assert [step for step in losses(*values) if step not in keep.to_delete(losses(*values))] == kept


@given(
    st.lists(st.floats() | st.none(), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from(["min", "max"]),
)
def test_the_newest_and_the_best_are_never_deleted(values, latest, best, mode):
    keep = Retention(latest=latest, best=best, monitor="loss", mode=mode)
    kept: dict = {}
    for step, metrics in losses(*values).items():
        kept[step] = metrics
        for to_delete in keep.to_delete(kept):
            del kept[to_delete]
        assert step in kept and len(kept) <= latest + best
    finite = [value for value in values if value is not None and np.isfinite(value)]
    if best and finite:
        assert {"loss": (min if mode == "min" else max)(finite)} in kept.values()


def test_a_store_deletes_what_is_not_kept_and_knows_the_best(memory):
    keep = Retention(latest=1, best=1, monitor="loss")
    with CheckpointStore(memory, keep=keep) as store:
        for step, loss in [(1, 0.5), (2, 0.2), (3, float("nan")), (4, 0.3), (5, 0.9)]:
            store.save(step, {"w": jnp.ones(2)}, metrics={"loss": loss})
        store.wait()
        assert (store.steps(), store.latest(), store.best()) == ([2, 5], 5, 2)
    again = CheckpointStore(memory, keep=keep, read_only=True)
    assert (again.steps(), again.best()) == ([2, 5], 2)
    assert sorted(os.listdir(memory)) == ["0000000002", "0000000005"]
    with pytest.raises(ValueError, match="best needs a metric"):
        CheckpointStore(memory, read_only=True).best()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"latest": 0}, "latest to be an int of at least 1"),
        ({"best": 2}, "needs the name of a metric to keep the best 2"),
        ({"mode": "most"}, "mode 'min' or 'max'"),
        ({"every": 0}, "every to be an int of at least 1"),
    ],
)
def test_a_retention_that_makes_no_sense_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Retention(**options)


# Damage


def damage_one(folder, rng):
    """Damage one file of a checkpoint in some way. Returns what was done, the name to be told, and how to fix it."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    path = rng.choice(files)
    content = path.read_bytes()
    kind = rng.choice(["flip"] * 5 + ["cut", "cut", "empty", "delete", "swap", "extra", "link"])
    name = path.relative_to(folder).as_posix()
    if kind == "flip" and content:
        place = rng.randrange(len(content) * 8)
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
    elif kind == "cut" and content:
        path.write_bytes(content[: rng.randrange(len(content))])
    elif kind == "empty" and content:
        path.write_bytes(b"")
    elif kind == "swap":
        other = rng.choice([other for other in files if other.read_bytes() != content])
        path.write_bytes(other.read_bytes())
    elif kind == "link":
        path.rename(folder.parent / "moved")
        path.symlink_to(folder.parent / "moved")
    elif kind == "extra" or not content:
        extra = path.with_name("extra")
        extra.write_bytes(b"")
        return f"extra beside {name}", extra.relative_to(folder).as_posix(), extra.unlink
    else:
        path.unlink()

    def fix():
        path.unlink(missing_ok=True)
        path.write_bytes(content)

    return f"{kind} {name}", name, fix


def damage_trials(directory, count, seed):
    """Damage the newest of two checkpoints that many times. Returns what went undetected, or was not named or fixed."""
    rng, failures = random.Random(seed), []
    tree = {"w": jnp.arange(3000.0), "b": np.arange(7), "n": 3}
    with CheckpointStore(directory) as store:
        for step in (1, 2):
            store.save(step, tree, {"step": step}, {"history.csv": b"loss\n0.5\n"}, {"loss": 0.5})
        store.wait()
        for number in range(count):
            done, name, fix = damage_one(directory / "0000000002", rng)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loaded = store.load(like=tree)
            told = [str(warning.message) for warning in caught]
            named = len(told) == 1 and f"\n  {name}: " in told[0] and "Checkpoint 1 is used instead." in told[0]
            try:
                store.load(2)
                refused = False
            except DamagedCheckpoint as error:
                refused = f"\n  {name}: " in str(error)
            fix()
            whole = not damage(directory / "0000000002", thorough=True)
            if not (loaded.document == {"step": 1} and named and refused and whole):
                failures.append((seed, number, done, told))
    return failures


def test_every_flipped_bit_and_cut_file_is_found_and_named(memory):
    assert damage_trials(memory / "run", 50, seed=0) == []


def test_a_sealed_checkpoint_whose_arrays_share_their_bytes_is_refused(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"a": np.arange(2.0), "b": np.arange(2.0) + 5})
    index = tmp_path / "0000000001" / "state" / "0.json"
    (first, second) = json.loads(index.read_text())
    for wrong in ([first, [second[0], first[1], *second[2:]]], [first]):
        index.write_text(json.dumps(wrong))
        checkpoint_damage.reseal(index.parent.parent)
        with CheckpointStore(tmp_path, read_only=True) as store, refuses(DamagedCheckpoint, "heckpoint 1"):
            store.load(like={"a": np.zeros(2), "b": np.zeros(2)})


def test_a_damaged_or_forged_checkpoint_is_named_and_the_one_before_is_used():
    counts, failures = checkpoint_damage.trials(40, seed=0)
    assert failures == [] and counts["fell back"] >= 30 and counts["named"] >= 30, counts


def test_a_reader_beside_a_run_that_keeps_one_checkpoint_gets_whole_ones(memory):
    writer, announced = subprocess.Popen([sys.executable, SCRIPT, "write_many", memory, "60"]), 0
    try:
        while not CheckpointStore(memory, read_only=True).steps():
            time.sleep(0.01)
        reader = CheckpointStore(memory, read_only=True)
        while writer.poll() is None:
            tree, document, _ = reader.load()
            assert document["step"] == tree["['step']"] >= announced
            np.testing.assert_array_equal(tree["['small']"], np.full(10, document["step"]))
            announced = document["step"]
            with pytest.raises(NoCheckpoint, match="has no checkpoint of step 0"):
                reader.load(0)
    finally:
        writer.kill()
        writer.wait()
    assert writer.returncode == 0 and reader.load().step == 60


def test_a_pipe_in_the_place_of_a_manifest_does_not_hang(store):
    store.save(1, {"w": jnp.ones(2)})
    store.wait()
    (store.directory / "0000000001" / "manifest.json").unlink()
    os.mkfifo(store.directory / "0000000001" / "manifest.json")
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: not a plain file"):
        store.load()
    assert store.steps() == []


def test_where_nothing_is_whole_all_is_listed(store):
    for step in (1, 2):
        store.save(step, {"w": jnp.ones(2)})
    store.wait()
    (store.directory / "0000000001" / "run.json").write_bytes(b"{}")
    (store.directory / "0000000002" / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint) as refused:
        store.load()
    for words in (
        "Checkpoint 1 in ",
        "\n  run.json: 2 bytes, the manifest says 5",
        "Checkpoint 2 in",
        "manifest.json: missing",
    ):
        assert words in str(refused.value)
    assert store.steps() == []
    assert store.latest() is None


def test_names_in_a_manifest_lead_nowhere(store, tmp_path):
    store.save(1, {"w": jnp.ones(2)})
    store.wait()
    folder = store.directory / "0000000001"
    found = read_manifest(folder)
    (tmp_path / "secret").write_bytes(b"secret")
    for name in ("../../secret", "/etc/passwd", "state/../run.json", str(tmp_path / "secret")):
        forged = Manifest(1, {}, {**found.files, name: (6, "0" * 64)})
        (folder / "manifest.json").write_bytes(forged.encode())
        with pytest.raises(DamagedCheckpoint, match=f"\n  {name}: missing"):
            store.load(1)
    (folder / "manifest.json").write_bytes(found.encode())
    (folder / "files").symlink_to(tmp_path)
    with pytest.raises(DamagedCheckpoint, match="files: extra"):
        store.load(1)
    (folder / "files").unlink()
    elsewhere = folder.rename(store.directory.parent / "elsewhere")
    folder.symlink_to(elsewhere)
    with pytest.raises(DamagedCheckpoint, match="0000000001: a symbolic link"):
        store.load(1)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(store):
    store.save(1, {"w": jnp.ones(2)})
    store.wait()
    shutil.copytree(store.directory / "0000000001", store.directory / "0000000009")
    with pytest.warns(RuntimeWarning, match=r"manifest\.json: of step 1, in a folder named 0000000009") as caught:
        assert store.load().step == 1
    assert caught[0].filename == __file__


# One run per directory


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "run").mkdir()
    for make in (os.symlink, os.link):
        make(precious, tmp_path / "run" / ".lock")
        if make is os.symlink:
            with pytest.raises(StorageFailed, match=r"cannot use .*run: Not a plain file, but a link.*Delete it"):
                CheckpointStore(tmp_path / "run")
            os.unlink(tmp_path / "run" / ".lock")
        else:
            CheckpointStore(tmp_path / "run").close()
        assert precious.read_text() == "mine"


def test_a_second_run_in_a_directory_is_refused_by_name_until_the_first_is_killed(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, SCRIPT, "hold", tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and json.loads(holder.stdout.readline()) == {"held": True}
        words = rf"is held by process {holder.pid} on {socket.gethostname()}, since 20\d\d-.*read_only=True"
        with pytest.raises(RuntimeError, match=words):
            CheckpointStore(tmp_path)
        assert CheckpointStore(tmp_path, read_only=True).steps() == []
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    for leftover in (".tmp-3", ".trash-2"):
        (tmp_path / leftover / "state").mkdir(parents=True)
    with CheckpointStore(tmp_path):
        assert os.listdir(tmp_path) == [".lock"]
    assert os.listdir(tmp_path) == []


def test_a_store_that_is_forgotten_gives_its_directory_back(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(RuntimeError, match=f"held by process {os.getpid()} "):
        CheckpointStore(tmp_path)
    del store
    CheckpointStore(tmp_path).close()


def test_what_was_about_to_be_replaced_is_put_back(store):
    store.save(1, {"w": jnp.ones(2)})
    store.close()
    os.rename(store.directory / "0000000001", store.directory / ".old-1")
    with CheckpointStore(store.directory) as again:
        assert again.steps() == [1]


# Faults


def test_a_killed_run_leaves_its_last_whole_checkpoint(memory):
    told, _ = run_script("killed", memory / "run", 8, 0)
    assert [facts for facts in told if not facts["ok"]] == []
    assert len(told) == 8


def test_where_there_is_no_room_older_checkpoints_stay_and_nothing_is_left_over(memory):
    told, _ = run_script("no_room", memory, 20, 0)
    assert [facts for facts in told if not facts["ok"]] == []
    assert len(told) == 20 and sum(facts["failed"] for facts in told) >= 12


def test_an_error_in_the_background_is_raised_once_at_the_next_call(store):
    for call in (store.check, store.wait, lambda: store.save(3, {"w": jnp.ones(2)}), lambda: store.load()):
        (store.directory / ".tmp-2").write_bytes(b"in the way")
        store.save(2, {"w": jnp.ones(2)})
        while any(thread.name == "checkpoint 2" for thread in threading.enumerate()):
            time.sleep(0.001)
        with pytest.raises(OSError) as raised:
            call()
        assert isinstance(raised.value, StorageFailed) and raised.value.errno == errno.EEXIST
        told = f"failed while the checkpoint of step 2 was saved in {store.directory}: File exists"
        assert told in str(raised.value) and "there before are untouched. Check the disk" in str(raised.value)
        store.check()
        store.wait()
        assert os.listdir(store.directory) == [".lock"]


def test_ctrl_c_while_a_save_is_waited_for_does_not_cut_it_short(store, monkeypatch):
    sync, reached, free = os.fsync, threading.Event(), threading.Event()

    def slow(handle):
        reached.set()
        assert free.wait(60)
        sync(handle)

    monkeypatch.setattr(os, "fsync", slow)
    store.save(1, {"w": jnp.ones(2)})
    main, deadline = threading.get_ident(), time.monotonic() + 60

    def interrupt():
        assert reached.wait(60)
        names = set()
        while "finish" not in names and time.monotonic() < deadline:
            names = {frame.name for frame in traceback.extract_stack(sys._current_frames()[main])}
        time.sleep(0.05)  # it waits now
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            store.wait()
        # Python takes a thread for ended whose join is interrupted, and would not wait for it at exit.
        assert "checkpoint 1" in {thread.name for thread in threading.enumerate()}
        assert store.steps() == []
    finally:
        free.set()
        interrupting.join()
    store.wait()
    assert store.steps() == [1]


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def few_descriptors(count):
    """Let this process open no more than `count` files."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + count, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
@pytest.mark.parametrize("what", ["open", "save", "load", "restore"])
def test_without_descriptors_it_is_said_by_name_and_nothing_leaks(memory, what, capfd):
    tree = {"w": jnp.arange(50.0), "more": [np.full(3, number) for number in range(5)], "key": jax.random.key(1)}
    callback = ms.checkpoint(memory / "run")
    callback(ms.loops.Elapsed(steps=1), tree)
    callback.close()
    store = CheckpointStore(memory / "run", read_only=what != "save")
    attempts = {
        "open": lambda: CheckpointStore(memory / "run").close(),
        "save": lambda: (store.save(2, tree), store.wait()),
        "load": lambda: store.load(like=None),
        "restore": lambda: ms.restore(memory / "run", tree),
    }
    threads, descriptors, failed, done = threading.active_count(), open_descriptors(), 0, False
    while not done:
        try:
            with few_descriptors(failed), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="CheckpointStore could not delete")
                attempts[what]()
            done = True
        except StorageFailed as error:
            assert error.errno == errno.EMFILE and failed < 20
            words = "CheckpointStore.*" + ("while the checkpoint of step 2 was saved in " if what == "save" else "")
            assert re.search(f"{words}.*{re.escape(str(memory / 'run'))}.*: Too many open files", str(error))
            assert "Close files, or raise the limit (ulimit -n)." in str(error)
            failed += 1
        gc.collect()
        assert (threading.active_count(), open_descriptors()) == (threads, descriptors)
        assert_same_leaves(ms.restore(memory / "run", tree, step=1).state, tree)
    assert failed >= 1 and capfd.readouterr() == ("", "")
    if what == "save":
        assert store.steps() == [1, 2]
        store.close()
        assert sorted(os.listdir(memory / "run")) == ["0000000001", "0000000002"]


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
def test_what_is_not_kept_is_deleted_with_as_few_descriptors_as_a_save_needs(memory):
    with CheckpointStore(memory / "run", keep=Retention(latest=1)) as store:
        store.save(1, {"w": jnp.ones(3)}, files={"more": b"1"})
        store.wait()
        with few_descriptors(1), warnings.catch_warnings():
            warnings.simplefilter("error")
            store.save(2, {"w": jnp.ones(3)}, files={"more": b"1"})
            store.wait()
            assert sorted(set(os.listdir(memory / "run")) - {".lock"}) == ["0000000002"]


def in_a_namespace(script, *arguments):
    """Run a script that may mount, if this system lets it."""
    command = ["unshare", "-rm", sys.executable, "-W", "error", "-c", textwrap.dedent(script), *map(str, arguments)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)


can_mount = shutil.which("unshare") is not None and (
    subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0
)
mounts = pytest.mark.skipif(not can_mount, reason="nothing can be mounted here")

FULL_DISK = """
import os, subprocess, sys
import numpy as np
import millstream as ms
from millstream.errors import StorageFailed
from millstream.checkpoints import CheckpointStore

folder = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], check=True)
small, large = {"w": np.arange(1000)}, {"w": np.random.default_rng(0).random(1 << 20)}
with CheckpointStore(folder + "/run") as store:
    store.save(1, small)
    for attempt in range(2):
        store.save(2, large)
        try:
            store.wait()
        except StorageFailed as error:
            print(error.errno, error)
        print(store.steps(), sorted(os.listdir(folder + "/run")))
    store.save(3, small)
    store.wait()
    assert (store.load(like=small).tree["w"] == small["w"]).all()
    subprocess.run(["umount", "-l", folder], check=True)
    store.save(4, small)
    try:
        store.wait()
    except StorageFailed as error:
        print(error.errno, error)
    print(store.steps(), os.listdir(folder))
subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", folder], check=True)
try:
    CheckpointStore(folder + "/other")
except StorageFailed as error:
    print(error.errno, error)
"""


@mounts
def test_a_full_disk_one_that_is_gone_and_one_that_is_read_only_are_named(tmp_path):
    ran = in_a_namespace(FULL_DISK, tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    save = f"CheckpointStore.save failed while the checkpoint of step {{}} was saved in {tmp_path}/run: {{}}"
    full, kept, again, still, gone, left, other = ran.stdout.splitlines()
    assert full.startswith("28 [Errno 28] " + save.format(2, "No space left on device")) and full == again
    assert kept == still == "[1] ['.lock', '0000000001']" and left == "[] []"
    assert gone.startswith("2 [Errno 2] " + save.format(4, "No such file or directory"))
    assert other.startswith(f"30 [Errno 30] CheckpointStore cannot use {tmp_path}/other: Read-only file system")


MOUNTED = """
import os, subprocess, sys, time, warnings
import jax.numpy as jnp
import millstream as ms

folder = sys.argv[1]
warnings.simplefilter("always")

def run(stop):
    tasks = {ms.every(1): lambda state: state + 1, ms.every(2): ms.checkpoint(folder, keep=1)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state, _, elapsed = ms.loop(jnp.int32(0), range(100), {**tasks, ms.every(3): hold}, stop=stop, resume=folder)
    told = [str(warning.message) for warning in caught if "could not delete" in str(warning.message)]
    print(int(state), elapsed.steps, len(told), *told[:1])

def hold(state):
    # A file system is mounted in the checkpoint: not even root can delete that.
    if int(state) == 3:
        while not os.path.exists(f"{folder}/0000000002"):
            time.sleep(0.01)
        os.mkdir(f"{folder}/0000000002/held")
        subprocess.run(["mount", "-t", "tmpfs", "none", f"{folder}/0000000002/held"], check=True)

run(9)
run(15)
left = [name for name in os.listdir(folder) if name.startswith(".")]
print(left)
subprocess.run(["umount", f"{folder}/{left[0]}/held"], check=True)
run(20)
print(sorted(os.listdir(folder)))
"""


@mounts
def test_a_checkpoint_that_cannot_be_deleted_is_warned_about_once_and_deleted_later(tmp_path):
    ran = in_a_namespace(MOUNTED, tmp_path)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    first, second, left, third, names = ran.stdout.splitlines()
    assert first.startswith(f"9 9 1 CheckpointStore could not delete what is not needed anymore in {tmp_path}/.trash-2")
    assert "Device or resource busy. It takes up room and does no harm. Deleting it is tried again" in first
    assert (second, left) == ("15 15 0", "['.trash-2']")
    assert (third, names) == ("20 20 0", "['0000000020']")


def test_a_run_that_closes_its_store_ends_without_a_word(memory):
    assert run_script("leave", memory, "closed") == ([], "")
    assert CheckpointStore(memory, read_only=True).steps() == [1, 2]


def test_a_run_that_does_not_close_its_store_ends_with_its_last_save_done_or_said_to_be_lost(memory):
    _, errors = run_script("leave", memory, "left")
    steps = CheckpointStore(memory, read_only=True).steps()
    assert steps == [1, 2] or (steps == [1] and "checkpoint of step 2 was saved in" in errors)
    with CheckpointStore(memory):
        assert sorted(os.listdir(memory)) == [".lock", *(f"{step:010d}" for step in steps)]


# Several processes


@pytest.fixture(scope="module")
def together(tmp_path_factory, once_per_run):
    """What two processes with four devices each have told, and the directory they shared."""
    return once_per_run(lambda: run_together(tmp_path_factory.mktemp("together")))


def run_together(folder):
    address = free_address()
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment = os.environ | CACHE | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, *STRICT, SCRIPT, "together", folder / "run", address, "2", str(number)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=PATIENCE) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert [process.returncode for process in started] == [0, 0], "\n".join(err for _, err in outputs)
    return [[json.loads(line) for line in out.splitlines() if line[0] == "{"] for out, _ in outputs], folder / "run"


def test_processes_save_and_load_together(together):
    (first, second), _ = together
    assert first[0] == second[0] == {"steps": [1, 2], "latest": 2}
    for told in (first, second):
        whole, damaged = told[1:3]
        assert (whole["step"], damaged["step"]) == (2, 1)
        for facts in (whole, damaged):
            assert all(facts["equal"].values()) and facts["document"] == {"step": facts["step"]}
            assert facts["files"] == {"of-0": [0], "of-1": [1]} and "data" in facts["spec"]
    assert (first[2]["warned"], second[2]["warned"]) == (1, 0)


def test_when_one_process_cannot_write_all_say_so(together):
    (first, second), _ = together
    for told in (first, second):
        (facts,) = (facts for facts in told if "failed" in facts)
        assert "checkpoint of step 3" in facts["failed"] and facts["steps"] == [1] and facts["seconds"] < 30
        missing, other = (facts for facts in told if "refused" in facts)
        assert "has no checkpoint of step 7" in missing["words"]
        assert "tree['other']: none saved, int now" in other["words"]
        assert told[-1] == {"finished": [1, 9], "names": ["0000000001", "0000000002", "0000000009"]}
    (words,) = (facts["failed"] for facts in first if "failed" in facts)
    assert "Process 1 could not write its part" in words


def test_what_two_processes_saved_one_loads(together):
    _, folder = together
    tree = CheckpointStore(folder, read_only=True).load(9).tree
    np.testing.assert_array_equal(tree["['rows']"], np.arange(64).reshape(8, 8) + 9)
    np.testing.assert_array_equal(script.raw(tree["['keys']"]), np.arange(16).reshape(8, 2) + 9)
    assert tree["['own']"].tolist() == [9, 9, 9] and tree["['numpy']"].tolist() == [9, 9]


def test_a_directory_may_be_called_what_it_likes(tmp_path):
    with CheckpointStore(tmp_path / "run [lr=*]?") as store:
        store.save(1, {"w": jnp.arange(3)})
        tree, _, _ = store.load(like={"w": jnp.zeros(3, jnp.int32)})
    assert tree["w"].tolist() == [0, 1, 2]
