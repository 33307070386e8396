"""loadax over several devices and several processes, which are real ones. Run as a script, this is one of them."""

import itertools
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import finish, free_address, start_script
from jax.sharding import Mesh

from millstream.dialects.loadax import DataLoader, InMemoryDataset, ListBatcher, ShuffledDataset, StackBatcher

SCRIPT = pathlib.Path(__file__)
SEED = SCRIPT.parent / "seeds" / "003_loadax.md"
ITEMS, BATCH = 71, 16  # four global batches, and seven items


def test_eight_devices_of_one_process():
    finish(start_script(SCRIPT, 8))


def test_two_processes_of_four_devices_make_the_batches_of_one():
    address = free_address()
    finish(*(start_script(SCRIPT, 4, address, str(process)) for process in range(2)))


# What follows runs in the processes that the tests start.


def meshes():
    """Meshes of eight devices, into how many parts they divide a batch, and how many of these a host of two holds."""
    devices = np.array(jax.devices())
    yield jax.make_mesh((8,), ("data",)), 8, 4  # with explicit axes
    yield Mesh(devices.reshape(4, 2), ("data", "model")), 4, 2
    yield Mesh(devices.reshape(2, 4).T, ("data", "model")), 4, 4  # both hosts need all rows
    yield Mesh(devices.reshape(2, 4).T.reshape(8), ("data",)), 8, 4  # the hosts' devices take turns


def check_global_batches():
    """Local batches of this process become global ones that do not depend on the number of processes."""
    order = list(ShuffledDataset(range(ITEMS), 5))
    images = [{"x": np.full(3, item, np.float32), "label": item} for item in range(ITEMS)]
    for mesh, parts, held in meshes():
        held = parts if jax.process_count() == 1 else held
        builder = DataLoader(StackBatcher()).batch_size(BATCH * held // parts).workers(2).prefetch(2)
        loader = builder.shard(mesh, data_axis_name="data").build(ShuffledDataset(InMemoryDataset(images), 5))
        last = ITEMS % BATCH // parts * parts
        assert loader.num_items() == (ITEMS // BATCH * BATCH + last) * held // parts
        sizes, seen = [], []
        with jax.set_mesh(mesh):
            batches = iter(loader)
            first = next(batches)
        for local_batch in itertools.chain([first], batches):
            batch = loader.sharding_strategy.distribute_global_batch(local_batch)
            sizes.append(len(batch["x"]))
            expected = order[sum(sizes[:-1]) : sum(sizes)]
            for shard in batch["x"].addressable_shards:
                assert np.asarray(shard.data)[:, 0].tolist() == expected[shard.index[0]]
            seen += [int(item) for item in local_batch["label"]]
            if len(sizes) == 1 and len(mesh.shape) == 1:
                assert int(jax.jit(jnp.sum)(batch["label"])) == sum(expected)  # all processes have the same array
        assert sizes == [BATCH] * (ITEMS // BATCH) + [last] * (last > 0)
        assert len(seen) == len(set(seen)) == loader.num_items()  # read once, and only what this process needs


def check_refusals():
    devices, process = np.array(jax.devices()), jax.process_index()
    line = Mesh(devices, ("data",))
    held = 8 // jax.process_count()
    lists = DataLoader(ListBatcher())
    with pytest.raises(ValueError, match=rf"divides by {held}, the parts.* \(of 8 in all\). Got 3. Take {held}\."):
        lists.batch_size(3).shard(line).build(range(100))
    strategy = lists.batch_size(8).shard(line).build(range(100)).sharding_strategy
    with pytest.raises(ValueError, match=f"needs a number of rows that divides by {held}.* Got 3 rows"):
        strategy.distribute_global_batch(np.ones((3, 2)))
    if jax.process_count() == 2:
        with pytest.raises(ValueError, match=r"as many parts of a batch as the others. Got, by process: {0: 4, 1: 2}"):
            lists.batch_size(8).shard(Mesh(devices[:6], ("data",))).build(range(100))
        with pytest.raises(ValueError, match=r"needs all processes to read the same.*\n  items: 10[01] in process"):
            lists.batch_size(8).shard(line).build(range(100 + process))


def check_the_text():
    """The distributed block of the text, on eight devices."""
    (block,) = re.findall(r"^```python\n([^`]*distribute_global_batch.*?)^```", SEED.read_text(), re.M | re.S)
    for old, new in [
        ("from loadax import", "from millstream.dialects.loadax import"),
        ("zero style fsdp)\n    ...\n", "zero style fsdp)\n    return 2.0, None\n"),
        ("    return loss\n", "    seen.append(batch)\n    return jnp.sum(simple_model(batch, model))\n"),
    ]:
        assert old in block
        block = block.replace(old, new)
    names = {"np": np, "jax": jax, "num_data_shards": 4, "num_model_shards": 2, "seen": []}
    exec(compile(block, str(SEED), "exec"), names)
    assert list(itertools.chain(*(batch.tolist() for batch in names["seen"]))) == list(range(128))
    for batch in names["seen"]:
        assert batch.shape == (8,) and {shard.data.shape for shard in batch.addressable_shards} == {(2,)}


if __name__ == "__main__":
    if sys.argv[1:]:
        jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
        check_global_batches()
        check_refusals()
        jax.distributed.shutdown()
    else:
        check_global_batches()
        check_refusals()
        check_the_text()
