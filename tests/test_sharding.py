"""Meshes and where rows go on them. What needs several devices is in sharding_script.py, run here."""

import pathlib
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import finish, free_address, start_script
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from millstream import sharding as room
from millstream.sharding import (
    DataPartitionType,
    HybridMeshShape,
    MeshConfig,
    as_batch_sharding,
    check_batch_size,
    distribute_global_batch,
    global_to_host_array,
    host_to_global_device_array,
    make_ddp_mesh_config,
    make_fsdp_mesh_config,
    shard_bounds,
    split_by_host,
    with_sharding_constraint,
)
from millstream.sharding._host_split import BatchedHostSplit
from millstream.sharding.batch_sharding import rows_on_grid
from millstream.sharding.mesh_config import across_slices, hybrid_grid

SCRIPT = pathlib.Path(__file__).parent / "sharding_script.py"


@pytest.fixture
def mesh():
    return jax.make_mesh((1, 1), ("data", "model"))


def test_meshes_placement_and_constraints_on_eight_devices():
    finish(start_script(SCRIPT, 8))


def test_two_processes_make_global_arrays_of_their_rows():
    address = free_address()
    finish(*(start_script(SCRIPT, 4, address, str(process)) for process in range(2)))


# Rows, hosts simulated


@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    hosts=st.integers(1, 1024),
    per_device=st.integers(0, 3),
    contiguous=st.booleans(),
    data=st.data(),
)
def test_rows_of_one_replica_partition_the_batch(sizes, hosts, per_device, contiguous, data):
    count = int(np.prod(sizes))
    seeded = np.random.default_rng(data.draw(st.integers(0, 1000)))
    owners = np.arange(count) * hosts // count if contiguous else seeded.integers(0, hosts, count)
    grid = owners.reshape(sizes)
    axes = data.draw(st.permutations(range(len(sizes))))[: data.draw(st.integers(0, len(sizes)))]
    shards = int(np.prod([sizes[axis] for axis in axes]))
    batch_size = shards * per_device
    rows = rows_on_grid(grid, axes, batch_size)

    expected = {process: set() for process in owners.tolist()}
    copies: dict[tuple[int, ...], list[int]] = {}  # along the axes that repeat rows, each position is a whole batch
    for position in np.ndindex(*sizes):
        shard = 0
        for axis in axes:
            shard = shard * sizes[axis] + position[axis]
        held = range(shard * per_device, (shard + 1) * per_device)
        expected[int(grid[position])].update(held)
        copies.setdefault(tuple(at for axis, at in enumerate(position) if axis not in axes), []).extend(held)
    assert {process: mine.tolist() for process, mine in rows.items()} == {
        process: sorted(held) for process, held in expected.items()
    }
    assert all(sorted(copy) == list(range(batch_size)) for copy in copies.values())


def test_hosts_without_replicas_share_out_the_batch_exactly():
    processes = np.repeat(np.arange(1024), 8).reshape(1024, 8)
    rows = rows_on_grid(processes, [0, 1], 8192 * 2)
    assert np.concatenate([rows[process] for process in range(1024)]).tolist() == list(range(8192 * 2))
    along_data = rows_on_grid(processes, [0], 1024)
    assert [along_data[process].tolist() for process in (0, 1, 1023)] == [[0], [1], [1023]]


# Meshes


def fake_devices(slices, hosts, each):
    per_slice = hosts // slices
    return [
        SimpleNamespace(
            slice_index=host // per_slice, process_index=host, id=host * each + i, device_kind="fake", platform="fake"
        )
        for host in range(hosts)
        for i in range(each)
    ]


def test_slices_lie_along_the_slow_axes():
    devices = fake_devices(slices=2, hosts=4, each=4)
    grid = hybrid_grid("MeshConfig", devices, HybridMeshShape((1, -1), (-1, 1)))
    assert [[device.slice_index for device in row] for row in grid] == [[0] * 8, [1] * 8]
    plain = hybrid_grid("MeshConfig", devices, across_slices("MeshConfig", (1, 4, 4), 2))
    assert plain.shape == (1, 4, 4)
    assert [{device.slice_index for device in row.ravel()} for row in plain[0]] == [{0}, {0}, {1}, {1}]


def test_groups_may_be_several_hosts():
    devices = fake_devices(slices=1, hosts=4, each=2)
    grid = hybrid_grid("MeshConfig", devices[::-1], HybridMeshShape((1, 4), (2, 1)))
    assert [[device.process_index for device in row] for row in grid] == [[0, 0, 1, 1], [2, 2, 3, 3]]


def test_slices_that_fit_no_axis_are_refused():
    with pytest.raises(ValueError, match=r"divides by the 2 slices .* Got mesh_shape \(3, 5\).*HybridMeshShape"):
        across_slices("MeshConfig", (3, 5), 2)


def test_mesh_configs_are_values():
    config = MeshConfig([-1, 1], ["data", "model"], ["data"], mesh_rules=[("a", [1, 1])])
    assert config == MeshConfig((-1, 1), ("data", "model"), "data", mesh_rules=(("a", (1, 1)),))
    assert len({config, pickle.loads(pickle.dumps(config))}) == 1
    assert (config.hosts, config.host_id) == (1, 0)


def test_the_first_rule_that_matches_the_whole_selector_wins():
    rules = [("v5e", (2,)), ("v5e-.*", (3,)), (".*256", (4,))]
    config = MeshConfig((-1,), ("data",), mesh_rules=rules)
    selectors = ["v5e", "v5e-256", "v6-256", "xv5e", None]
    assert [config.shape_for(selector) for selector in selectors] == [(2,), (3,), (4,), (-1,), (-1,)]
    assert make_ddp_mesh_config(mesh_rules=rules, mesh_selector="v5e-8").mesh_shape == (3,)
    fsdp = make_fsdp_mesh_config(mesh_rules=[("pod", (2, 4))], mesh_selector="pod")
    assert fsdp.mesh_shape == (2, 4) and fsdp.batch_axis_names == ("data", "model")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((0,), ("data",)), "mesh_shape to be one int per axis, each at least 1"),
        ((8, ("data",)), "mesh_shape to be one int per axis"),
        (((True,), ("data",)), "mesh_shape to be one int per axis"),
        (((), ()), "mesh_axis_names to be a tuple of different names"),
        (((-1, -1), ("data", "model")), r"infer one size of mesh_shape. Got \(-1, -1\)"),
        (((1, 1), ("data",)), r"one size for each of the axes 'data'. Got \(1, 1\)"),
        (((1, 1), ("data", "data")), "different names"),
        (((1,), "data"), "different names"),
        (((1,), ("rows",)), "knows no axis 'data' .* The mesh has: 'rows'"),
        (((1,), ("data",), ("data", "data")), "over an axis once"),
        (((1,), ("data",), "data", ["v5e"]), "a pair"),
        (((1,), ("data",), "data", [("(", (1,))]), r"cannot read '\(' in mesh_rules"),
        (((1,), ("data",), "data", [("a", (1, 1))]), r"one size for each .* Got \(1, 1\)"),
        (((1,), ("data",), "data", [("a", None)]), "the shape of the rule 'a' to be one int per axis"),
    ],
)
def test_mesh_configs_that_make_no_sense_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        MeshConfig(*arguments)


def test_axes_that_are_not_named_are_refused():
    with pytest.raises(TypeError, match=r"batch_axis_names to be the name of an axis, or several\. Got \[0\]"):
        MeshConfig((1,), ("data",), [0])  # pyright: ignore[reportArgumentType]


def test_hybrid_shapes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"ici_mesh_shape \(1, 2\) and dcn_mesh_shape \(1,\)"):
        HybridMeshShape((1, 2), (1,))
    with pytest.raises(ValueError, match="infer one size of dcn_mesh_shape"):
        HybridMeshShape((1, 2), (-1, -1))
    with pytest.raises(TypeError, match="batch_axis_names to be the name of an axis"):
        MeshConfig((1,), ("data",), 0)  # pyright: ignore[reportArgumentType]


# Batch shardings


def test_a_batch_sharding_comes_from_a_sharding_a_mesh_or_a_config(mesh):
    given = NamedSharding(mesh, P(("data", "model")))
    assert as_batch_sharding(given) is given
    assert as_batch_sharding(NamedSharding(mesh, P("model", None))) == NamedSharding(mesh, P("model"))
    assert as_batch_sharding(NamedSharding(mesh, P())).spec == P()
    assert as_batch_sharding(mesh) == NamedSharding(mesh, P("data"))
    assert as_batch_sharding(make_fsdp_mesh_config()).spec == P(("data", "model"))
    assert as_batch_sharding(MeshConfig((1,), ("data",), ())).spec == P()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (jax.make_mesh((1, 1), ("rows", "model")), "knows no axis 'data' .* The mesh has: 'rows', 'model'"),
        (NamedSharding(jax.make_mesh((1, 1), ("a", "b")), P("a", "b")), r"first axis alone.*Got .*P\('a', 'b'\)"),
        (NamedSharding(Mesh(jax.devices()[:1], ("a",)), P(P.UNCONSTRAINED)), "first axis alone"),
    ],
)
def test_batch_shardings_that_fit_no_batch_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        as_batch_sharding(wrong)


@pytest.mark.parametrize("wrong", [None, "data", jax.sharding.SingleDeviceSharding(jax.devices()[0])])
def test_what_is_no_sharding_is_refused(wrong):
    with pytest.raises(
        TypeError, match="needs sharding to be a NamedSharding over devices, a Mesh with an axis 'data', or a MeshConf"
    ):
        as_batch_sharding(wrong)


def test_a_mesh_without_devices_is_refused(mesh):
    with pytest.raises(TypeError, match="NamedSharding over devices"):
        as_batch_sharding(NamedSharding(mesh.abstract_mesh, P("data")))


def test_a_batch_size_is_an_int(mesh):
    with pytest.raises(ValueError, match="DataLoader needs batch_size to be an int of at least 1"):
        check_batch_size("DataLoader", 0, as_batch_sharding(mesh))


# Placement


def test_placement_needs_a_mesh_and_says_how_to_give_one():
    with pytest.raises(
        ValueError, match=re.escape("Give it one, mesh=..., or call it inside `with jax.set_mesh(mesh)")
    ):
        host_to_global_device_array(np.ones(3))
    with pytest.raises(TypeError, match=re.escape("create_device_mesh()")):
        host_to_global_device_array(np.ones(3), mesh=make_ddp_mesh_config())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({}, "a tree without any"),
        ({"x": np.float32(1)}, r"arrays with rows. Got:\n  batch\['x'\]: shape \(\), float32"),
        ({"x": 1.0}, r"arrays with rows. Got:\n  batch\['x'\]: 1.0 \(float\)"),
        (
            {"x": np.ones((3, 2), np.float32), "y": [np.ones(4, np.int32)]},
            r"same number of rows. Got:\n  batch\['x'\]: shape \(3, 2\), float32\n  batch\['y'\]\[0\]: shape \(4,\)",
        ),
    ],
)
def test_batches_without_common_rows_are_refused_both_ways(batch, words, mesh):
    with pytest.raises(ValueError, match=words):
        distribute_global_batch(batch, mesh)
    with pytest.raises(ValueError, match=words):
        host_to_global_device_array(batch, mesh=mesh)


def test_the_way_back_needs_jax_arrays_with_common_rows():
    with pytest.raises(ValueError, match=r"same number of rows. Got:\n  batch\['x'\].*\n  batch\['y'\]"):
        global_to_host_array({"x": jnp.ones(3), "y": jnp.ones(4)})
    with pytest.raises(TypeError, match=r"needs jax.Arrays. Got batch\['x'\]: 1 \(int\)"):
        global_to_host_array({"x": 1})


def test_partitions_are_of_their_type(mesh):
    with pytest.raises(TypeError, match=r"DataPartitionType.FULL or .* Got 'full'"):
        global_to_host_array(jnp.ones(3), partition="full")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Leave batch_axis_names out"):
        host_to_global_device_array(
            np.ones(3), partition=DataPartitionType.REPLICATED, mesh=mesh, batch_axis_names="data"
        )


def test_constraints_are_left_out_on_one_device(mesh):
    x = jnp.ones((4, 2))
    assert with_sharding_constraint(x, P("data")) is x
    with jax.set_mesh(mesh):
        assert with_sharding_constraint({"x": x}, P("no such axis"))["x"] is x
    assert with_sharding_constraint(x, NamedSharding(mesh, P("data"))) is x
    with pytest.raises(TypeError, match=r"needs a PartitionSpec or a Sharding for every array. Got 'data'"):
        with_sharding_constraint(x, "data")


def test_single_device_shardings_are_passed_on():
    x = jnp.ones(4)
    out = with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert (out == x).all()


# Splits


@given(
    size=st.one_of(st.integers(0, 50), st.integers(0, 10**12)),
    shards=st.integers(1, 1024),
    drop=st.booleans(),
)
def test_shards_lie_one_behind_the_other_and_leave_nothing_out(size, shards, drop):
    if drop and size < shards:
        return
    bounds = [shard_bounds(shards, shard, size, drop) for shard in range(shards)]
    ends = [0, *(end for _, end in bounds)]
    assert [start for start, _ in bounds] == ends[:-1]
    lengths = [end - start for start, end in bounds]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1 - drop
    assert ends[-1] == (size - size % shards if drop else size)


@given(
    size=st.integers(1, 40),
    shards=st.integers(1, 9),
    drop=st.booleans(),
    how=st.sampled_from(["contiguous", "strided"]),
)
def test_splits_partition_a_dataset(size, shards, drop, how):
    if drop and size < shards:
        return
    parts = [
        split_by_host(range(size), how, drop_remainder=drop, num_shards=shards, shard_id=shard)
        for shard in range(shards)
    ]
    items = sorted(item for part in parts for item in part)
    assert items == list(range(size - size % shards if drop else size))
    for part in parts:
        listed = list(part)
        assert len(part) == len(listed)
        assert [part[i] for i in range(-len(part), len(part))] == listed * 2
        assert listed == sorted(listed)
    if how == "strided":
        assert list(parts[-1]) == list(range(shards - 1, size, shards))


def test_a_split_is_by_default_that_of_this_process():
    assert list(split_by_host("abc")) == ["a", "b", "c"]


class Batched:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        raise AssertionError("read one by one")

    def __getitems__(self, indices):
        return [index * 10 for index in indices]


def test_many_items_are_read_at_once_where_the_dataset_can():
    split = split_by_host(Batched(), "strided", num_shards=3, shard_id=1)
    assert isinstance(split, BatchedHostSplit) and split.__getitems__([0, 2]) == [10, 70]
    assert not hasattr(split_by_host([1, 2]), "__getitems__")


def test_splits_can_be_split_again():
    halves = split_by_host(range(8), num_shards=2, shard_id=1)
    assert list(split_by_host(halves, "strided", num_shards=2, shard_id=1)) == [5, 7]


def test_splits_of_anything_else_are_refused():
    split = split_by_host("abcd", num_shards=2, shard_id=0)
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"HostSplit has 2 items. Got index {index}"):
            split[index]
    with pytest.raises(TypeError, match="slice"):
        split[0:1]  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="needs an object with a length and"):
        split_by_host(iter("abc"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"how 'contiguous' or 'strided'. Got 'random'"):
        split_by_host("abc", "random")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"split_by_host needs shard_id below num_shards, 2. Got 2"):
        split_by_host("abc", num_shards=2, shard_id=2)
    with pytest.raises(ValueError, match=r"shard_bounds needs shard_id to be an int of at least 0. Got -1"):
        shard_bounds(2, -1, 5)
    with pytest.raises(ValueError, match="num_shards to be an int of at least 1"):
        shard_bounds(0, 0, 5)
    with pytest.raises(ValueError, match=r"at least one item per shard .* Got 3 items for 4 shards"):
        split_by_host("abc", drop_remainder=True, num_shards=4, shard_id=0)


def test_splits_travel_to_processes_without_jax():
    packed = pickle.dumps(split_by_host(range(10), "strided", num_shards=3, shard_id=2))
    command = (
        f"import pickle, sys; split = pickle.loads({packed!r}); "
        "assert list(split) == [2, 5, 8] and 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", command], check=True)


def test_the_room_lists_what_it_has_and_says_what_each_is():
    assert dir(room) == sorted(room.__all__)
    for name in room.__all__:
        assert ">>>" in getattr(room, name).__doc__, f"{name} has no example"
    with pytest.raises(AttributeError, match=r"has no 'MeshConfg'. Did you mean .*MeshConfig"):
        _ = room.MeshConfg  # pyright: ignore[reportAttributeAccessIssue]


def test_meshes_need_not_use_all_devices_of_the_process(mesh):
    assert isinstance(MeshConfig((1, 1), ("a", "b"), "a").create_device_mesh([jax.devices()[0]]), Mesh)
