"""loadax: its own text runs, its promises hold, and what it did wrong is not done here."""

import contextlib
import gc
import io
import itertools
import pathlib
import re
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import code_blocks
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.dialects import loadax
from millstream.dialects.loadax import (
    Batcher,
    DataLoader,
    Dataloader,
    DistributedDataLoader,
    FixedBatchStrategy,
    InMemoryDataset,
    JaxShardingStrategy,
    ListBatcher,
    MappedDataset,
    Progress,
    ShuffledDataset,
    StackBatcher,
)
from millstream.dialects.loadax._sharding import Shard

SEED = pathlib.Path(__file__).parent / "seeds" / "003_loadax.md"
FILLED = {  # what the text leaves to the reader
    "# Standard jax distributed setup\n...\n": "",
    "(see fsdp example for zero style fsdp)\n    ...\n": "\n    return 2.0, None\n",
    "    # Your loss calculation logic\n": "    loss = jnp.sum(simple_model(batch, model))\n    seen.append(batch)\n",
}


@pytest.fixture
def pairs():
    return DataLoader(ListBatcher()).batch_size(2)


def reader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("millstream-reader")]


def wrong(value: Any) -> Any:
    """A value that the type checker need not see."""
    return value


def wait_until(condition):
    end = time.monotonic() + 120
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


# The text of the library


@pytest.fixture(scope="module")
def told():
    """What each code block of the text prints, and what the text says that it prints."""
    text = SEED.read_text()
    for placeholder, filling in FILLED.items():
        assert placeholder in text
        text = text.replace(placeholder, filling)
    text = re.sub(r"^from loadax import", "from millstream.dialects.loadax import", text, flags=re.MULTILINE)
    names = {"time": time, "np": np, "jax": jax, "num_data_shards": 1, "num_model_shards": 1, "seen": []}
    told = []
    for block in code_blocks(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, str(SEED), "exec"), names)
        promised = re.findall(r"^# Output:((?:\n# .*)+)", block, re.MULTILINE)
        told.append((printed.getvalue(), "\n".join(promised).replace("\n# ", "\n").lstrip("\n")))
    return told, names


def test_all_blocks_of_the_text_are_run(told):
    blocks, _ = told
    assert len(blocks) == 8 == SEED.read_text().count("```python")


@pytest.mark.parametrize("block", [0, 2, 3])
def test_blocks_print_what_the_text_says(told, block):
    printed, promised = told[0][block]
    assert len(promised.splitlines()) == 5
    assert printed == promised + "\n"


def test_iterators_of_one_loader_begin_at_the_first_batch(told):
    # The text says "Output: 1" of loaders whose batches have two items.
    assert told[0][1][0] == "[1, 2]\n[1, 2]\n"


def test_a_batch_function_that_adds_gives_sums(told):
    # The text shows pairs from 1 to 10 here, of a dataset that begins at 0 and a batch function that adds.
    assert told[0][5][0] == "1\n5\n9\n13\n17\n"


def test_the_distributed_block_trains_on_global_batches(told):
    _, names = told
    assert [batch.tolist() for batch in names["seen"]] == np.arange(128).reshape(16, 8).tolist()
    assert all(batch.sharding.spec == jax.P("data") for batch in names["seen"])
    assert names["loss"] == 2 * sum(range(120, 128))


def test_the_last_blocks_leave_lazy_datasets_behind(told):
    _, names = told
    dataset = names["dataset"]
    assert isinstance(dataset, MappedDataset) and isinstance(names["base_dataset"], ShuffledDataset)
    assert dataset[0] == 2 * names["base_dataset"][0]


# Loaders


@pytest.mark.parametrize("workers, prefetch", [(0, 0), (1, 0), (1, 3), (2, 0), (3, 2)])
@pytest.mark.parametrize("items, size", [(0, 2), (1, 2), (5, 2), (6, 3), (5, 7), (5, 1)])
def test_every_pass_has_every_item_once_and_in_order(items, size, workers, prefetch):
    expected = [list(range(items))[start : start + size] for start in range(0, items, size)]
    built = DataLoader(ListBatcher()).batch_size(size).workers(workers).prefetch(prefetch).build(range(items))
    direct = Dataloader(InMemoryDataset(range(items)), size, workers, prefetch)
    for loader in (built, direct):
        assert len(loader) == loader.num_batches() == len(expected) and loader.num_items() == items
        assert [list(loader) for _ in range(2)] == [expected] * 2  # nothing is left over for the next pass


def test_a_last_shorter_batch_is_dropped_on_request():
    loader = Dataloader("abcde", 2, drop_last=True)
    assert list(loader) == [["a", "b"], ["c", "d"]]
    assert (len(loader), loader.num_items()) == (2, 4)
    with pytest.raises(ValueError, match="would drop everything"):
        Dataloader("a", 2, drop_last=True)


@pytest.mark.parametrize("item", [None, {"a": 1}, (1, "x"), [1, [2]], np.arange(3), "text", object()])
def test_items_arrive_as_they_are(item):
    (batch,) = Dataloader([item, item], 2, num_workers=1)
    assert batch[0] is item and batch[1] is item


@pytest.mark.parametrize(
    "made",
    [None, 3, "text", {"x": [1]}, np.arange(2), np.array(5), jnp.arange(2)],
    ids=lambda made: type(made).__name__,
)
def test_batches_are_what_the_batcher_returns(made):
    assert [batch is made for batch in DataLoader(Batcher(lambda items: made)).batch_size(2).build(range(4))] == [
        True
    ] * 2


def test_batches_may_differ_in_shape():
    loader = DataLoader(Batcher(np.concatenate)).batch_size(2).build([np.ones(length) for length in (1, 2, 3, 4, 5)])
    assert [batch.shape for batch in loader] == [(3,), (7,), (5,)]


def test_progress_counts_what_the_loop_has_got(pairs):
    read = []
    dataset = MappedDataset(range(9), lambda item: read.append(item) or item)
    batches = iter(pairs.workers(2).prefetch(3).build(dataset))
    assert batches.progress() == Progress(0, 9)
    next(batches)
    assert wait_until(lambda: len(read) == 8)  # three batches are there already
    assert batches.progress() == Progress(items_processed=2, items_total=9)
    assert [batches.progress().items_processed for _ in batches] == [4, 6, 8, 9]
    assert len(batches) == 5


def test_iterators_are_independent(pairs):
    loader = pairs.prefetch(1).build(range(10))
    fast, slow = iter(loader), iter(loader)
    assert [next(fast) for _ in range(4)][-1] == [6, 7]
    assert next(slow) == [0, 1]
    assert fast.progress().items_processed == 8 and slow.progress().items_processed == 2
    assert list(itertools.chain(slow, fast)) == [[2, 3], [4, 5], [6, 7], [8, 9], [8, 9]]


def test_a_builder_is_a_value(pairs):
    larger = pairs.batch_size(3)
    assert [len(batch) for batch in pairs.build(range(6))] == [2, 2, 2]
    assert [len(batch) for batch in larger.build(range(6))] == [3, 3]


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_all_workers_read_at_once(pairs, workers, prefetch):
    together = threading.Barrier(workers)  # opens only when all of them are reading

    def slow(item):
        if item % 2 == 0:
            together.wait(timeout=120)
        return item

    loader = pairs.workers(workers).prefetch(prefetch).build(MappedDataset(range(8 * workers), slow))
    assert [batch[0] for batch in loader] == list(range(0, 8 * workers, 2))


def test_no_worker_means_nothing_is_read_ahead():
    read = []
    batches = iter(Dataloader(MappedDataset(range(6), lambda item: read.append(item) or item), 2, prefetch_factor=2))
    for count in (2, 4, 6):
        next(batches)
        assert len(read) == count


def test_building_a_loader_reads_and_batches_nothing():
    calls = []
    dataset = MappedDataset(range(4), lambda item: calls.append(item))
    DataLoader(Batcher(lambda items: calls.append(items))).batch_size(2).build(ShuffledDataset(dataset))
    assert calls == []


def test_good_batches_come_before_an_error_and_the_error_names_its_item(pairs):
    def reciprocal(item):
        return 1 / (item - 5)

    batches = iter(pairs.workers(2).prefetch(3).build(ShuffledDataset(MappedDataset(range(10), reciprocal))))
    order = list(ShuffledDataset(range(10)))
    for _ in range(order.index(5) // 2):
        next(batches)
    with pytest.raises(ZeroDivisionError) as caught:
        next(batches)
    notes = " ".join(caught.value.__notes__)
    assert "This came from reciprocal, at item 5 of MappedDataset." in notes
    assert "ShuffledDataset was asked for items [" in notes
    with pytest.raises(ZeroDivisionError):  # and it is not skipped the second time either
        next(batches)


def test_an_error_of_a_batcher_or_a_dataset_says_where_it_came_from(pairs):
    with pytest.raises(ValueError) as caught:
        list(DataLoader(Batcher(np.stack)).batch_size(2).build([np.ones(1), np.ones(2)]))
    assert "This came from Batcher.batch, given items [0, 1]" in caught.value.__notes__[0]
    with pytest.raises(KeyError) as caught:
        list(pairs.build(MappedDataset({0: "a", 2: "b"}, str)))
    assert "This came from dict[1]." in caught.value.__notes__


def test_a_stop_iteration_of_an_item_does_not_end_the_loop_silently(pairs):
    with pytest.raises(RuntimeError, match="a sample raised StopIteration"):
        list(pairs.build(MappedDataset(range(4), lambda item: next(iter(())))))


@pytest.mark.parametrize("ending", ["forgotten", "closed", "exhausted", "failed"])
def test_however_a_pass_ends_it_leaves_no_threads(pairs, ending):
    before = set(reader_threads())
    fn = (lambda item: 1 // (item - 3)) if ending == "failed" else abs
    batches = iter(pairs.workers(2).prefetch(2).build(MappedDataset(range(100 if ending != "exhausted" else 2), fn)))
    next(batches)
    if ending == "closed":
        batches.close()
        batches.close()
        assert list(batches) == []
    elif ending == "exhausted":
        assert list(batches) == []
    elif ending == "failed":
        with pytest.raises(ZeroDivisionError):
            next(batches)
    else:
        del batches
        gc.collect()
    assert wait_until(lambda: set(reader_threads()) <= before)


def test_a_program_that_abandons_a_slow_pass_ends():
    program = """
import time
from millstream.dialects.loadax import Batcher, DataLoader, MappedDataset, RangeDataset
dataset = MappedDataset(RangeDataset(0, 1000), lambda item: time.sleep(0.01) or item)
batches = iter(DataLoader(Batcher(list)).batch_size(2).workers(2).prefetch(3).build(dataset))
print(next(batches))
"""
    ended = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[0, 1]\n", "")


def test_a_batcher_puts_batches_on_a_device_ahead_of_the_loop():
    device = jax.devices()[0]
    loader = DataLoader(Batcher(np.stack, device=device)).batch_size(2).build([np.ones(3, np.float32)] * 4)
    assert all(isinstance(batch, jax.Array) and batch.devices() == {device} for batch in loader)
    with pytest.raises(ValueError, match="StackBatcher: JAX keeps int64 as int32"):  # and would cut it off
        StackBatcher(device).batch([{"x": 1}, {"x": 2**40}])


def test_stacking_works_on_trees():
    loader = DataLoader(StackBatcher()).batch_size(2).build([{"x": np.full(3, i), "y": i} for i in range(3)])
    first, last = loader
    assert first["x"].shape == (2, 3) and last["y"].tolist() == [2]


@pytest.mark.parametrize(
    "attempt, words",
    [
        (
            lambda: DataLoader(wrong(len)),
            r"DataLoader needs a Batcher, .* Got .* Write DataLoader\(Batcher\(function\)\)",
        ),
        (lambda: Batcher(wrong(3)), "Batcher needs batch_fn to be a function. Got 3"),
        (lambda: Batcher(len, device="gpu"), r"Batcher needs device to be one of jax.devices\(\), or a sharding"),
        (lambda: DataLoader(ListBatcher()).batch_size(0), "needs batch_size to be an int of at least 1. Got 0"),
        (lambda: DataLoader(ListBatcher()).workers(-1), "needs workers to be an int from 0 to 4,096. Got -1"),
        (lambda: DataLoader(ListBatcher()).prefetch(wrong(1.5)), "needs prefetch to be an int of at least 0. Got 1.5"),
        (
            lambda: DataLoader(ListBatcher()).build(wrong({1, 2})),
            r"DataLoader needs a dataset with a length and \[index\]",
        ),
        (lambda: InMemoryDataset(wrong(iter([1]))), r"InMemoryDataset needs a dataset with a length and \[index\]"),
        (lambda: _distributed(strategy=wrong(2)), r"needs strategy to be a FixedBatchStrategy\(batch_size\). Got 2"),
        (lambda: _distributed(shard_id=2, num_shards=2), "needs shard_id below num_shards, 2. Got 2"),
        (lambda: FixedBatchStrategy(0), "needs batch_size to be an int of at least 1. Got 0"),
        (lambda: DataLoader(ListBatcher()).build([1]).sharding_strategy, r"has no mesh. Say .shard\(mesh"),
        (lambda: Broken()._read(), "Broken.__getitems__ was asked for 2 items and returned 1"),
    ],
)
def test_what_cannot_work_is_refused_at_once(attempt, words):
    with pytest.raises((ValueError, TypeError), match=words):
        attempt()


class OwnDataset:
    """As loadax's example of distributed loading writes one: a length and `get`."""

    def __len__(self):
        return 10

    def get(self, index):
        return np.array([index])


class OwnBatcher:
    """As that example writes one."""

    def batch(self, items):
        return jnp.stack(items)


def _distributed(**changes):
    strategy = JaxShardingStrategy(jax.make_mesh((1,), ("data",)), "data")
    options = {"num_workers": 2, "prefetch_factor": 2, "sharding_strategy": strategy, "strategy": FixedBatchStrategy(2)}
    return DistributedDataLoader(dataset=OwnDataset(), batcher=wrong(OwnBatcher()), **options | changes)


def test_a_distributed_loader_is_made_without_the_builder():
    loader = _distributed()
    batches = [loader.sharding_strategy.distribute_global_batch(batch) for batch in loader]
    assert [batch[:, 0].tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert len(loader) == 5 and iter(loader).progress() == Progress(0, 10)
    second = _distributed(shard_id=1, num_shards=2)
    assert [batch[:, 0].tolist() for batch in second] == [[2, 3], [6, 7], [9]]
    first_form = JaxShardingStrategy(jax.make_mesh((1,), ("data",)), jax.sharding.PartitionSpec("data"))
    assert len(_distributed(sharding_strategy=first_form)) == 5
    alone = _distributed(sharding_strategy=None)
    assert [len(batch) for batch in alone] == [2] * 5


def test_a_strategy_says_which_items_a_shard_of_a_dataset_has():
    strategy = JaxShardingStrategy(jax.make_mesh((1,), ("data",)), "data")
    assert [strategy.get_shard(10, shard, 3) for shard in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert strategy.get_shard(dataset_size=0, shard_id=1, num_shards=2) == []
    with pytest.raises(ValueError, match=r"get_shard needs shard_id below num_shards, 2\. Got 2"):
        strategy.get_shard(10, 2, 2)


def test_an_empty_dataset_has_no_batches_with_a_mesh_either(pairs):
    loader = pairs.shard(jax.make_mesh((1,), ("data",))).build([])
    assert (len(loader), loader.num_items(), list(loader)) == (0, 0, [])


class Broken(InMemoryDataset):
    """Loses an item."""

    def __init__(self):
        super().__init__([1, 2])

    def __getitems__(self, indices):
        return [self[0]]

    def _read(self):
        return list(Dataloader(self, 2))


def test_every_name_is_there_and_says_what_it_is():
    for name in loadax.__all__:
        member = getattr(loadax, name)
        assert ">>>" in member.__doc__, name
    assert set(loadax.__all__) == set(dir(loadax))
    with pytest.raises(AttributeError, match="has no 'DataLoaders'"):
        loadax.DataLoaders  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_the_names_for_meshes_are_those_of_the_sharding_room():
    from millstream.dialects.loadax import sharding

    for name in [name for name in dir(sharding) if not name.startswith("_")]:
        assert getattr(sharding, name) is getattr(ms.sharding, name)


# Shards


@given(size=st.integers(1, 100), parts=st.integers(1, 6), width=st.integers(1, 4), hosts=st.sampled_from([1, 2, 3]))
def test_shards_of_any_number_of_hosts_make_up_the_same_global_batches(size, parts, width, hosts):
    parts, each = parts * hosts, parts  # every host holds as many parts
    shards = [Shard(size, parts, tuple(range(host * each, (host + 1) * each)), width) for host in range(hosts)]
    assert len({len(shard) for shard in shards}) == 1
    for first in range(0, len(shards[0]), each * width):
        rows = [item for shard in shards for item in shard[first : first + each * width]]
        begin = first * hosts
        assert rows == list(range(begin, begin + len(rows)))
    covered = len(shards[0]) * hosts
    assert size - parts < covered <= size


def test_shard_number_zero_is_a_shard():
    mesh = jax.make_mesh((1,), ("data",))
    loader = DataLoader(ListBatcher()).batch_size(2)
    by_shard = [loader.shard(mesh, num_shards=2, shard_id=shard).build(range(9)) for shard in range(2)]
    assert [list(loader) for loader in by_shard] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [loader.num_items() for loader in by_shard] == [4, 4]
    assert list(loader.shard(mesh, num_shards=2).build(range(8))) == [[0, 1], [4, 5]]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"data_axis_name": "rows"}, r"DataLoader.shard knows no axis 'rows'.* The mesh has: 'data'"),
        ({"num_shards": 0}, "needs num_shards to be an int of at least 1. Got 0"),
        ({"num_shards": 2, "shard_id": 2}, "needs shard_id below num_shards, 2. Got 2"),
        ({"shard_id": 1}, "needs shard_id below num_shards, 1. Got 1"),
        ({"num_shards": 9, "shard_id": 0}, "divides a batch into 9 parts, with at least one item each. Got 8 items"),
    ],
)
def test_a_shard_that_cannot_be_is_refused(pairs, options, words):
    with pytest.raises(ValueError, match=words):
        pairs.shard(jax.make_mesh((1,), ("data",)), **options).build(range(8))


def test_a_batch_that_does_not_line_up_is_refused():
    mesh = jax.make_mesh((1,), ("data",))
    strategy = DataLoader(ListBatcher()).batch_size(2).shard(mesh).build(range(4)).sharding_strategy
    with pytest.raises(ValueError, match="needs arrays with rows"):
        strategy.distribute_global_batch([1, 2])
    with pytest.raises(ValueError, match="needs arrays with the same number of rows"):
        strategy.distribute_global_batch({"x": np.ones(2), "y": np.ones(3)})
    assert strategy.named_sharding(None, "data").spec == jax.P(None, "data")
