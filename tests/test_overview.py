"""The table of a model's arrays: its rows, its totals and its text."""

import subprocess
import sys

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from millstream.loops import overview

PARAMS = {
    "conv": {"kernel": np.ones((3, 3, 1, 8), np.float32), "bias": np.zeros(8, np.float32)},
    "head": [{"w": np.full((1000, 1000), 2.0, np.float32)}, {"w": np.zeros((), np.int8)}],
}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(2, 3, rngs=rngs)
        self.rest = nnx.List([nnx.Linear(3, 3, rngs=rngs)])


def test_the_table_is_aligned_and_ends_with_its_totals():
    assert str(overview(PARAMS)).splitlines() == [
        "path         shape         dtype        count  bytes",
        "────────────────────────────────────────────────────",
        "conv.bias    (8,)          float32          8   32 B",
        "conv.kernel  (3, 3, 1, 8)  float32         72  288 B",
        "head.0.w     (1000, 1000)  float32  1,000,000   4 MB",
        "head.1.w     ()            int8             1    1 B",
        "────────────────────────────────────────────────────",
        "total        4 arrays               1,000,081   4 MB",
    ]


def test_rows_and_totals_can_be_used():
    table = overview(PARAMS)
    assert (table.arrays, table.count, table.nbytes) == (4, 1_000_081, 4_000_321)
    row = table.rows[1]
    assert (row.path, row.shape, row.dtype, row.count, row.nbytes) == ("conv.kernel", (3, 3, 1, 8), "float32", 72, 288)
    assert row.mean is None and row.sharding == ""


def test_depth_puts_together_what_begins_alike():
    table = overview(PARAMS, depth=1)
    assert [(row.path, row.arrays, row.count, row.dtype) for row in table.rows] == [
        ("conv", 2, 80, "float32"),
        ("head", 2, 1_000_001, "float32, int8"),
    ]
    assert table.nbytes == overview(PARAMS).nbytes and "2 arrays" in str(table)
    assert str(overview(PARAMS, depth=9)) == str(overview(PARAMS))
    with pytest.raises(ValueError, match="overview needs depth to be an int of at least 1"):
        overview(PARAMS, depth=0)


def test_means_and_deviations_are_those_of_all_numbers():
    rng = np.random.default_rng(0)
    parts = [rng.normal(1e4, 1e-2, 50), rng.normal(0, 3, (4, 5)), np.array([], np.float64)]
    (row,) = overview({"x": parts}, depth=1, stats=True).rows
    values = np.concatenate([part.reshape(-1) for part in parts])
    assert row.mean == pytest.approx(values.mean()) and row.std == pytest.approx(values.std())
    (alone,) = overview(jnp.full((3,), 1.5, jnp.bfloat16), stats=True).rows
    assert (alone.mean, alone.std, alone.path) == (1.5, 0.0, "(the tree itself)")


def test_what_has_no_mean_has_none():
    tree = {"a": jax.ShapeDtypeStruct((2,), jnp.float32), "b": jax.random.key(0), "c": np.zeros(0), "d": np.array(True)}
    assert [row.mean for row in overview(tree, stats=True).rows] == [None] * 4


def test_nothing_is_read_unless_statistics_are_asked_for():
    gone = jnp.ones(3)
    gone.delete()
    assert overview({"gone": gone}).count == 3


def test_models_of_other_libraries_have_readable_paths():
    model = equinox.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
    assert [row.path for row in overview(model).rows] == [
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "layers.1.bias",
    ]
    state = nnx.state(Net(nnx.Rngs(0)))
    expected = ["first.bias", "first.kernel", "rest.0.bias", "rest.0.kernel"]
    assert [row.path for row in overview(state).rows] == expected
    shapes = jax.eval_shape(lambda: state)
    assert str(overview(shapes)) == str(overview(state))


def test_an_empty_tree_has_an_empty_table():
    assert str(overview({"f": print, "none": None})).splitlines()[-1].split() == ["total", "0", "arrays", "0", "0", "B"]


def test_a_model_with_ten_thousand_arrays_has_as_many_lines():
    text = str(overview({f"layer{i}": np.zeros((2, 2), np.float32) for i in range(10_000)}))
    lines = text.splitlines()
    assert len(lines) == 10_004 and len({len(line) for line in lines if line.startswith("layer")}) == 1


def test_arrays_on_several_devices_say_how_they_are_split():
    script = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from millstream.loops import overview
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
tree = {"a": put(jnp.ones((4, 6)), "data", "model"), "b": put(jnp.ones(3)), "c": jnp.ones(2)}
print([row.sharding for row in overview(tree).rows], overview({"m": tree}, depth=1).rows[0].sharding)
print(overview(tree, stats=True).rows[0].mean, overview(tree).nbytes)
"""
    command = [sys.executable, "-c", script]
    environment = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [
        "[\"P('data', 'model') over 8\", 'replicated over 8', ''] mixed",
        "1.0 116",
    ], done.stderr
