"""The table of a pipeline: its stages, its plan, its text; found without reading a sample."""

import dataclasses
import json
import subprocess
import sys

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import PIPELINES

import millstream as ms
from millstream.text.tables import name_table, size_text, text_table, time_text

DATA = {"image": np.zeros((300, 8, 8), np.uint8), "label": np.arange(300, dtype=np.int32)}


def double(sample):
    return {"image": sample["image"].astype(np.float32) * 2, "label": sample["label"]}


def noisy(value, mask, key):
    return {**value, "noise": jax.random.normal(key, (3,))}


def shake(sample, rng):
    return {**sample, "noise": rng.random(2, np.float32)}


def act(obs, weights, key):
    return jax.random.categorical(key, obs @ weights)


def test_a_row_says_where_a_stage_runs_and_what_leaves_it():
    stages = [
        ms.HostArraySource(DATA),
        ms.HostMapTransform(double),
        ms.BatchTransform(128),
        ms.RandomMapTransform(noisy),
    ]
    rows = ms.DataLoader(stages, executor=ms.Threads(3)).explain().rows
    assert [(row.stage, row.where) for row in rows] == [
        ("HostArraySource", "3 threads"),
        ("HostMapTransform(double)", "3 threads"),
        ("BatchTransform", "3 threads"),
        ("RandomMapTransform(noisy)", "device"),
    ]
    assert [row.shapes["image"] for row in rows] == [(8, 8), (8, 8), (128, 8, 8), (128, 8, 8)]
    assert [row.dtypes["image"] for row in rows] == ["uint8", "float32", "float32", "float32"]
    assert [row.bytes_per_batch for row in rows] == [128 * 68, 128 * 260, 128 * 260, 128 * 260 + 12]
    assert rows[0].memory_bytes == 300 * 68
    assert "random" in rows[3].note and "random" not in rows[1].note


@pytest.mark.parametrize("name", PIPELINES)
def test_the_last_row_is_what_the_loader_gives(name):
    loader = ms.DataLoader(PIPELINES[name]())
    explanation = loader.explain()
    leaves = jax.tree_util.tree_leaves_with_path(loader.element_spec())
    paths = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    last = explanation.rows[-1]
    assert last.shapes == {path: leaf.shape for path, leaf in paths.items()}
    assert last.dtypes == {path: str(leaf.dtype) for path, leaf in paths.items()}
    assert last.bytes_per_batch == sum(leaf.size * leaf.dtype.itemsize for leaf in paths.values())
    assert max(map(len, str(explanation).splitlines())) <= 120
    assert json.loads(json.dumps(explanation.as_dict()))["plan"] == explanation.plan


@pytest.mark.parametrize("executor", [None, ms.Threads(2), ms.Processes(2)], ids=["none", "threads", "processes"])
def test_the_memory_of_buffers_is_what_readers_take(executor):
    loader = ms.DataLoader([ms.DiskSampleSource(300, lambda index: np.zeros(50, np.float32)), ms.BatchTransform(64)])
    loader = loader.replace(executor=executor, prefetch=3)
    row = loader.explain().rows[-1]
    backend = loader.pipeline.host.backend(loader.pipeline.plan)
    try:
        assert row.memory_bytes == backend.nbytes  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        backend.close()


def test_nothing_is_read_compiled_or_started(count_compilations, assert_nothing_is_left):
    calls = []

    def read(index):
        calls.append(index)
        return {"x": np.float32(index)}

    stages = [ms.DiskSampleSource(10, read), ms.BatchTransform(4), ms.RandomMapTransform(noisy)]
    loader = ms.DataLoader(stages, executor=ms.Processes(2))
    before = len(calls)
    with count_compilations() as compiled:
        str(loader.explain())
    assert (len(calls), compiled) == (before, [0])
    assert_nothing_is_left()


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (ms.BatchTransform(128), "44 of 128 rows real, the others padding"),
        (ms.BatchTransform(128, drop_last=True), "full; 44 left over and dropped"),
        (ms.BatchTransform(128, pad_last_batch=False), "84 of 128 rows from the next epoch"),
        (ms.BatchTransform(100), "full"),
    ],
)
def test_the_plan_says_what_becomes_of_the_last_batch(stage, text):
    explanation = ms.DataLoader([ms.ArraySampleSource(DATA), stage]).explain()
    assert explanation.plan["last batch"] == text
    assert f"last batch: {text}" in explanation.rows[-1].note


def test_the_plan_says_who_sets_the_mask():
    @dataclasses.dataclass(frozen=True)
    class Keep(ms.Transform):
        def apply(self, value, mask, key):
            return value, mask & (jax.tree.leaves(value)[0].ravel()[0] > 0)

    plans = [
        ms.DataLoader([ms.ArraySampleSource(DATA), *stages]).explain().plan
        for stages in ([Keep(), ms.BatchTransform(128)], [ms.BatchTransform(128)])
    ]
    assert plans[0]["mask"] == "set by Keep: how many rows count is known when a batch is made"
    assert "mask" not in plans[1]


@pytest.mark.parametrize(
    ("ordering", "text"),
    [
        ("shuffle", "shuffle: a different order every epoch"),
        ("sequential", "sequential: in sequence, every epoch"),
        (ms.Shuffle("repeat"), "repeat: the same batches every epoch, in the same order"),
        (
            ms.Shuffle("batchwise", first_epoch=False),
            "batchwise: the same batches every epoch, in a different order; the first one in sequence",
        ),
    ],
)
def test_the_plan_says_what_the_order_is(ordering, text):
    plan = ms.DataLoader([ms.ArraySampleSource(DATA, ordering), ms.BatchTransform(128)]).explain().plan
    assert (plan["order"], plan["samples"], plan["epoch"]) == (text, "300", "3 batches of 128")


def test_the_plan_says_who_reads_and_what_errors_and_caches_do(tmp_path):
    source = ms.sources.FillSource([1, 2, 3], lambda item, arrays, rng: None, {"x": ((), np.int32)})
    options = {"executor": ms.Processes(2, ordered=False), "prefetch": 4, "on_error": "skip item"}
    loader = ms.DataLoader([source, ms.BatchTransform(2)], cache=ms.BatchCache(tmp_path / "batches"), **options)
    plan = loader.explain().plan
    assert plan["read"] == (
        "by 2 worker processes, each at a batch of its own, 5 ahead of the one in use, "
        "in the order in which they are read"
    )
    assert plan["errors"] == "the row of a sample that raises is masked"
    assert plan["cache"] == f"{tmp_path / 'batches'} (read-write)"
    assert plan["random stages"].startswith("FillSource")


def test_random_host_maps_are_among_the_random_stages():
    loader = ms.DataLoader([ms.HostArraySource(DATA), ms.RandomHostMapTransform(shake), ms.BatchTransform(10)])
    assert loader.explain().plan["random stages"] == "RandomHostMapTransform(shake)"


def test_files_are_told_from_memory(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((100, 25), np.float32))
    row = ms.DataLoader([ms.NpySource(tmp_path / "x.npy"), ms.BatchTransform(10)]).explain().rows[0]
    assert (row.memory_bytes, row.note) == (0, "10 kB in files, mapped")


def test_python_objects_have_no_shape():
    stages = [ms.DatasetSource(["a", "bb", "ccc"]), ms.BatchTransform(2, collate=lambda words: list(map(len, words)))]
    explanation = ms.DataLoader(stages).explain()
    source, batch = explanation.rows
    assert source.shapes == batch.shapes == {} and source.bytes_per_batch is batch.bytes_per_batch is None
    assert "'a' (str)" in source.note and explanation.plan["handed out"] == "as Python objects"


def test_a_collate_function_belongs_to_its_batch():
    def stack(samples):
        return {"total": np.stack([sample["image"].sum(dtype=np.int32) for sample in samples])}

    rows = ms.DataLoader([ms.HostArraySource(DATA), ms.BatchTransform(5, collate=stack)]).explain().rows
    assert [row.shapes for row in rows] == [{"image": (8, 8), "label": ()}, {"total": (5,)}]


def test_streams_say_what_they_remember():
    env, env_params = gymnax.make("CartPole-v1")
    source = ms.rl.GymnaxSource(env, env_params, policy_fn=act, policy_params=jnp.zeros((4, 2)), num_envs=3)
    buffer = ms.BufferTransform(100, 20, sample_size=10, mode="uniform", by_row=True)
    explanation = ms.DataLoader([source, buffer]).explain()
    first, second = explanation.rows
    assert (first.stage, second.stage) == ("GymnaxSource", "BufferTransform")
    assert first.shapes["state"] == (3, 4) and second.shapes["state"] == (10, 4)
    assert second.memory_bytes is not None and second.memory_bytes > 100 * 8 * 4
    assert "never ahead" in explanation.plan["made"]


def test_several_loaders_are_one_table():
    small = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(4.0)}), ms.BatchTransform(2)])
    large = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(8.0)}), ms.BatchTransform(2)])
    mixed = ms.loader.MixedLoader({"small": small, "large": large})
    explanation = ms.loader.TrainStream(large, validation=mixed, every=("epoch", 2)).explain()
    assert [row.stage for row in explanation.rows[::2]] == [
        "train: ArraySampleSource",
        "validation: small: ArraySampleSource",
        "validation: large: ArraySampleSource",
    ]
    assert explanation.plan["validation"] == "6 batches after every 8 of training"
    assert explanation.plan["validation: mix"] == "1 of 'small', 2 of 'large'"
    assert ms.loader.TrainStream(large).explain().plan["validation"] == "none"


def test_a_loader_inside_of_a_program_can_be_explained():
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(4.0)}), ms.BatchTransform(2)])
    seen = []
    jax.eval_shape(lambda loader: seen.append(loader.explain()), loader)
    assert [row.memory_bytes for row in seen[0].rows] == [row.memory_bytes for row in loader.explain().rows]


def test_large_trees_are_cut_short_in_the_text_alone():
    data = {f"leaf with a very long name, number {number}": np.zeros((10, 2)) for number in range(30)}
    explanation = ms.DataLoader([ms.ArraySampleSource(data), ms.BatchTransform(5)]).explain()
    text = str(explanation)
    assert text.count("and 23 more") == 2 and max(map(len, text.splitlines())) <= 120
    assert len(explanation.rows[-1].shapes) == 30


def test_a_notebook_shows_it_as_tables():
    loader = ms.DataLoader([ms.ArraySampleSource({"<x>": np.arange(4.0)}), ms.BatchTransform(2)])
    html = loader.explain()._repr_html_()
    assert html.count("<table>") == 2 and "&lt;x&gt; (2,) float32" in html


def test_batches_over_devices_say_how_they_are_split():
    script = """
import jax, numpy as np, millstream as ms
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
stages = [ms.ArraySampleSource({"x": np.zeros((10, 3), np.float32)}), ms.BatchTransform(8)]
explanation = ms.DataLoader(stages, sharding=mesh).explain()
print(explanation.rows[1].where, explanation.rows[0].memory_bytes, explanation.plan["shards"])
"""
    environment = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[0] == (
        "device, over mesh (data: 4, model: 2) 960 8 rows over mesh (data: 4, model: 2), 2 per device"
    ), done.stderr


def test_tables_wrap_sentences_before_words():
    rows = [["DiskSampleSource(read)", "1", "a note that is longer than the table is wide"], ["short", "20", ""]]
    table = text_table(["stage", "count", "note"], rows, numbers=["count"], prose=["note"], width=60)
    assert table.splitlines() == [
        "stage                   count  note",
        "────────────────────────────────────────────────────────────",
        "DiskSampleSource(read)      1  a note that is longer than",
        "                                 the table is wide",
        "short                      20",
    ]
    table = text_table(["stage", "count", "note"], rows, numbers=["count"], prose=["note"], width=40)
    assert table.splitlines() == [
        "stage                   count",
        "────────────────────────────────────────",
        "DiskSampleSource(read)      1",
        "  a note that is longer than the table",
        "    is wide",
        "short                      20",
    ]
    assert name_table([("a", "one two three four five"), ("long", "")], width=22).splitlines() == [
        "a     one two three",
        "        four five",
        "long",
    ]


def test_sizes_and_times_have_three_digits():
    assert [size_text(n) for n in (0, 999, 1000, 999_499, 999_500, 10**16)] == [
        "0 B",
        "999 B",
        "1 kB",
        "999 kB",
        "1 MB",
        "10,000 TB",
    ]
    assert [time_text(s) for s in (0.0, 4.1e-5, 9.999e-4, 0.0123, 12.34)] == [
        "0 us",
        "41 us",
        "1 ms",
        "12.3 ms",
        "12.3 s",
    ]
