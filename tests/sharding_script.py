"""What needs several devices or several processes. Run by test_sharding.py, each time in interpreters of its own."""

import itertools
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from millstream.sharding import (
    DataPartitionType,
    HybridMeshShape,
    MeshConfig,
    as_batch_sharding,
    batch_axes,
    check_batch_size,
    distribute_global_batch,
    global_to_host_array,
    host_to_global_device_array,
    make_ddp_mesh_config,
    make_fsdp_mesh_config,
    rows_by_process,
    shard_count,
    split_by_host,
    with_sharding_constraint,
)
from millstream.sharding.batch_sharding import rows_on_grid

TABLE = np.arange(24 * 3, dtype=np.float32).reshape(24, 3)


def check_meshes_on_eight_devices():
    devices = np.array(jax.devices())
    mesh = MeshConfig((-1, 2), ("data", "model")).create_device_mesh()
    assert (mesh.devices == devices.reshape(4, 2)).all()
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert MeshConfig((-1,), ("data",)).create_device_mesh(jax.devices()[2:5]).devices.tolist() == jax.devices()[2:5]
    assert dict(make_ddp_mesh_config().create_device_mesh().shape) == {"data": 8}
    assert dict(make_ddp_mesh_config(("data", "model")).create_device_mesh().shape) == {"data": 8, "model": 1}
    fsdp = make_fsdp_mesh_config()
    assert dict(fsdp.create_device_mesh().shape) == {"data": 1, "model": 8}
    assert as_batch_sharding(fsdp).spec == P(("data", "model"))
    assert as_batch_sharding(make_fsdp_mesh_config(batch_axis_names="data")).spec == P("data")
    assert dict(make_fsdp_mesh_config(("all",)).create_device_mesh().shape) == {"all": 8}
    ruled = MeshConfig((8, 1), ("data", "model"), mesh_rules=[("small", (2, 1)), ("wide|big", (-1, 4))])
    assert dict(ruled.create_device_mesh(selector="big").shape) == {"data": 2, "model": 4}
    assert dict(ruled.create_device_mesh(selector="bigger").shape) == {"data": 8, "model": 1}
    with pytest.raises(ValueError, match=r"shape \(3, -1\) needs a multiple of 3 devices\. There are 8"):
        MeshConfig((3, -1), ("data", "model")).create_device_mesh()
    with pytest.raises(ValueError, match=r"shape \(2, 2\) needs 4 devices\. There are 8"):
        MeshConfig((2, 2), ("data", "model")).create_device_mesh()


def check_groups_of_one_host_lie_along_the_slow_axes():
    devices = np.array(jax.devices())
    for ici, dcn in [((1, 4), (2, 1)), ((2, 2), (2, 1)), ((2, 1), (2, 2)), ((4, 1), (1, 2)), ((-1, 1), (1, 4))]:
        mesh = MeshConfig(HybridMeshShape(ici, dcn), ("data", "model")).create_device_mesh()
        inside = [8 // int(np.prod(dcn)) if size == -1 else size for size in ici]
        groups = iter(devices.reshape(-1, *inside))
        blocks = [[next(groups) for _ in range(dcn[1])] for _ in range(dcn[0])]
        assert (mesh.devices == np.block(blocks)).all(), (ici, dcn)
    with pytest.raises(ValueError, match=r"groups of one size. Got 8 devices for dcn_mesh_shape \(3, 1\)"):
        MeshConfig(HybridMeshShape((-1, 1), (3, 1)), ("data", "model")).create_device_mesh()


def check_rows_are_those_jax_gives_to_each_device():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2)[:, ::-1], ("a", "b", "c"))
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    for count in range(4):
        for axes in itertools.permutations("abc", count):
            sharding = NamedSharding(mesh, P(axes) if axes else P())
            assert shard_count(sharding) == 2**count
            assert [*rows_by_process(sharding, 24)] == [0]
            assert (rows_by_process(sharding, 24)[0] == np.arange(24)).all()
            found = rows_on_grid(ids, ["abc".index(axis) for axis in axes], 24)
            for device, index in sharding.devices_indices_map((24,)).items():
                assert (found[device.id] == np.arange(24)[index]).all(), (axes, device)


def check_placement_and_the_way_back():
    batch = {"x": TABLE, "deep": [np.arange(24)]}
    auto = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    for mesh in (auto, jax.make_mesh((4, 2), ("data", "model"))):
        with jax.set_mesh(mesh):
            check_one_placement(host_to_global_device_array(batch), P(("data", "model")), 3)
            check_one_placement(host_to_global_device_array(batch, batch_axis_names="data"), P("data"), 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # later versions of JAX have one
        with auto:
            check_one_placement(host_to_global_device_array(batch), P(("data", "model")), 3)
    swapped = host_to_global_device_array(batch, mesh=auto, batch_axis_names=("model", "data"))
    check_one_placement(swapped, P(("model", "data")), 3)
    check_one_placement(distribute_global_batch(batch, auto), P("data"), 6)
    check_one_placement(distribute_global_batch(batch, make_fsdp_mesh_config()), P(("data", "model")), 3)

    mixed = {"x": TABLE, "scale": 2.0}
    copies = host_to_global_device_array(mixed, partition=DataPartitionType.REPLICATED, mesh=auto)
    assert copies["x"].is_fully_replicated and len(copies["x"].addressable_shards) == 8
    back = global_to_host_array(copies, partition=DataPartitionType.REPLICATED)
    assert (back["x"] == TABLE).all() and back["scale"] == 2.0
    assert (global_to_host_array(copies["x"]) == TABLE).all()
    columns = jax.device_put(np.ones((8, 6)) * np.arange(6.0), NamedSharding(auto, P("data", "model")))
    assert (global_to_host_array(columns) == np.ones((8, 6)) * np.arange(6.0)).all()


def check_one_placement(placed, spec, rows):
    assert placed["x"].sharding.spec == spec
    for leaf, whole in ((placed["x"], TABLE), (placed["deep"][0], np.arange(24))):
        for shard in leaf.addressable_shards:
            assert shard.data.shape[0] == rows
            assert (np.asarray(shard.data) == whole[shard.index]).all()
    back = global_to_host_array(placed)
    assert isinstance(back["x"], np.ndarray)
    assert (back["x"] == TABLE).all() and (back["deep"][0] == np.arange(24)).all()


def check_constraints_in_every_kind_of_mesh():
    auto = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    tree = {"x": jnp.ones((8, 4)), "y": (jnp.ones(8), jnp.ones(8))}
    specs = {"x": P("data", "model"), "y": P("data")}

    def constrained(tree):
        return with_sharding_constraint(jax.tree.map(lambda leaf: leaf * 2, tree), specs)

    assert jax.tree.leaves(constrained(tree))[0].sharding == tree["x"].sharding  # no mesh, no change
    assert jax.jit(constrained)(tree)["x"].sharding == tree["x"].sharding
    explicit = jax.make_mesh((4, 2), ("data", "model"))
    for enter in (lambda: jax.set_mesh(auto), lambda: jax.set_mesh(explicit), lambda: auto):
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning), enter():
            for fn in (constrained, jax.jit(lambda tree: constrained(tree))):
                out = fn(tree)
                assert out["x"].sharding.spec == P("data", "model"), (enter, fn)
                assert out["y"][1].sharding.spec == P("data")
                assert (out["x"] == 2).all()
    named = NamedSharding(auto, P("model"))
    assert with_sharding_constraint(jnp.ones(8), named).sharding == named
    assert jax.jit(lambda x: with_sharding_constraint(x, named))(jnp.ones(8)).sharding == named


def check_refusals():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    both = NamedSharding(mesh, P(("data", "model")))
    check_batch_size("DataLoader", 24, both)
    with pytest.raises(ValueError, match=r"DataLoader .* divides by 8.*'data' of size 4 x 'model' of size 2") as error:
        check_batch_size("DataLoader", 12, both)
    assert str(error.value).endswith("Got 12. Take 8 or 16.")
    with pytest.raises(ValueError, match=r"Got 3\. Take 8\."):
        rows_by_process(both, 3)
    with pytest.raises(ValueError, match=r"divides by 4, .* \(of 4 in all\). Got 6 rows. Take 4 or 8."):
        distribute_global_batch(np.ones(6), mesh)
    with pytest.raises(ValueError, match=r"knows no axis 'rows' .* The mesh has: 'data', 'model'"):
        host_to_global_device_array(np.ones(8), mesh=mesh, batch_axis_names="rows")
    with pytest.raises(ValueError, match=r"every device has whole.*\n  batch: shape \(8,\), float32"):
        placed = host_to_global_device_array(np.ones(8, np.float32), mesh=mesh)
        global_to_host_array(placed, partition=DataPartitionType.REPLICATED)


def check_two_processes(process):
    devices = jax.devices()
    hosts = np.vectorize(lambda device: device.process_index)
    assert make_ddp_mesh_config().hosts == 2 and make_ddp_mesh_config().host_id == process
    fsdp = make_fsdp_mesh_config()
    assert hosts(fsdp.create_device_mesh().devices).tolist() == [[0] * 4, [1] * 4]
    crossed = MeshConfig(HybridMeshShape((4, 1), (1, 2)), ("data", "model"))
    assert hosts(crossed.create_device_mesh().devices).tolist() == [[0, 1]] * 4
    uneven = MeshConfig((3, 2), ("data", "model")).create_device_mesh([*devices[:3], *devices[4:7]])
    shardings = [
        make_ddp_mesh_config(),  # rows one half each
        fsdp,
        make_fsdp_mesh_config(batch_axis_names="data"),  # repeated within a host
        crossed,  # repeated across hosts: both have all rows
        MeshConfig(crossed.mesh_shape, ("data", "model"), ("data", "model")),  # rows in turn
        uneven,  # hosts share the middle
    ]
    expected = [12, 12, 12, 24, 12, 16]
    for given, count in zip(shardings, expected, strict=True):
        sharding = as_batch_sharding(given)
        rows = rows_by_process(sharding, 24)
        for device, index in sharding.devices_indices_map((24,)).items():
            assert set(np.arange(24)[index]) <= set(rows[device.process_index].tolist())
        mine = rows[process]
        assert len(mine) == count
        check_local_rows(distribute_global_batch({"x": TABLE[mine]}, given)["x"], sharding, mine)
        if isinstance(given, MeshConfig):
            with jax.set_mesh(given.create_device_mesh()):
                placed = host_to_global_device_array({"x": TABLE[mine]}, batch_axis_names=batch_axes(sharding))["x"]
            check_local_rows(placed, sharding, mine)
    check_two_process_refusals(process)
    mesh = fsdp.create_device_mesh()
    copies = host_to_global_device_array({"x": TABLE, "n": 3}, partition=DataPartitionType.REPLICATED, mesh=mesh)
    assert (global_to_host_array(copies, partition=DataPartitionType.REPLICATED)["x"] == TABLE).all()
    assert list(split_by_host(range(5))) == [[0, 1, 2], [3, 4]][process]


def check_local_rows(placed, sharding, mine):
    assert placed.shape == TABLE.shape and placed.sharding == sharding
    for shard in placed.addressable_shards:
        assert (np.asarray(shard.data) == TABLE[shard.index]).all()
    assert (global_to_host_array(placed) == TABLE[mine]).all()
    assert float(jax.jit(jnp.sum)(placed)) == TABLE.sum()


def check_two_process_refusals(process):
    first_host = Mesh(np.array(jax.devices()[:4]), ("data",))
    if process == 1:
        with pytest.raises(ValueError, match="needs this process, number 1, to have devices in the mesh"):
            distribute_global_batch(TABLE, first_host)
    columns = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P(None, "data"))
    apart = jax.make_array_from_callback((4, 8), columns, lambda index: np.ones((4, 8))[index])
    with pytest.raises(ValueError, match="rows that are whole on this host"):
        global_to_host_array(apart)


if __name__ == "__main__":
    if sys.argv[1:]:
        number = int(sys.argv[2])
        jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=number)
        check_two_processes(number)
        jax.distributed.shutdown()
    else:
        check_meshes_on_eight_devices()
        check_groups_of_one_host_lie_along_the_slow_axes()
        check_rows_are_those_jax_gives_to_each_device()
        check_placement_and_the_way_back()
        check_constraints_in_every_kind_of_mesh()
        check_refusals()
