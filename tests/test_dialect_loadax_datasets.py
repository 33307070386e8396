"""The datasets of loadax: lazy, seeded, and sequences of their items."""

import itertools
import subprocess
import sys
import threading
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.dialects.loadax import (
    CombinedDataset,
    Dataloader,
    Dataset,
    FilteredDataset,
    InMemoryDataset,
    MappedBatchDataset,
    MappedDataset,
    PartialDataset,
    RangeDataset,
    SampledDataset,
    SampledDatasetWithReplacement,
    Shardable,
    ShardedDataset,
    Shuffleable,
    ShuffledDataset,
    SimpleDataset,
    compute_shard_boundaries,
)


def wrong(value: Any) -> Any:
    """A value that the type checker need not see."""
    return value


def views():
    base = list("abcdefg")
    yield InMemoryDataset(base), base
    yield RangeDataset(3, -4, -1), [*range(3, -4, -1)]
    yield MappedDataset(base, str.upper), list("ABCDEFG")
    yield FilteredDataset(base, lambda item: item > "c"), list("defg")
    yield MappedBatchDataset(base, "".join, 3), ["abc", "def", "g"]
    yield CombinedDataset(base, "", "xy"), list("abcdefgxy")
    yield CombinedDataset([base, InMemoryDataset("x")]), list("abcdefgx")
    yield PartialDataset(base, 2, 5), list("cde")
    yield ShardedDataset(base, 3, 2), list("ef")
    yield ShardedDataset(base, 3, 0, drop_remainder=False), list("abc")
    yield InMemoryDataset(base).split_dataset_by_node(2, 1), list("efg")
    yield ShuffledDataset(base, 5), [base[int(at)] for at in ShuffledDataset(range(7), 5)]
    yield InMemoryDataset(base).shuffle(5), list(ShuffledDataset(base, 5))
    yield SampledDataset(base, 3, 5), list(ShuffledDataset(base, 5))[:3]
    yield InMemoryDataset(base).filter(str.isalpha).map(ord).map_batch(sum, 4), [394, 306]
    yield ShuffledDataset(MappedDataset(CombinedDataset(base, base), ord), 1).filter(lambda item: item == 97), [97, 97]
    yield InMemoryDataset([]), []


@pytest.mark.parametrize("dataset, items", [*views()], ids=lambda value: type(value).__name__)
def test_a_dataset_is_a_sequence_of_its_items(dataset, items):
    assert isinstance(dataset, Dataset) and isinstance(dataset, Shardable) and isinstance(dataset, Shuffleable)
    size = len(items)
    assert len(dataset) == size and dataset.is_empty() == (size == 0)
    assert list(dataset) == items == [dataset[index] for index in range(size)]
    assert [dataset[index] for index in range(-size, 0)] == items
    assert (dataset.get(size), dataset.get(-1)) == (None, None)
    for index in (size, -size - 1):
        with pytest.raises(IndexError, match=f"{type(dataset).__name__} has {size} items. Got index {index}"):
            dataset[index]
    assert list(itertools.chain(*Dataloader(dataset, 3, num_workers=2))) == items  # many at a time


def test_a_dataset_that_reads_many_items_at_once_is_asked_for_many_at_once():
    class Table:
        def __init__(self):
            self.asked = []

        def __len__(self):
            return 8

        def __getitem__(self, index):
            raise AssertionError("one by one")

        def __getitems__(self, indices):
            self.asked.append(indices)
            return [index * 10 for index in indices]

    table = Table()
    dataset = MappedDataset(PartialDataset(CombinedDataset(table, [80]), 1, 8), lambda item: item + 1)
    assert list(Dataloader(dataset, 4)) == [[11, 21, 31, 41], [51, 61, 71]]
    assert table.asked == [[1, 2, 3, 4], [5, 6, 7]]


def test_a_function_is_called_when_its_item_is_read():
    calls = []
    dataset = InMemoryDataset("abc").map(lambda item: calls.append(item) or item).filter(lambda item: item != "b")
    shuffled = ShuffledDataset(dataset)
    assert calls == []
    assert len(shuffled) == 2 and calls == ["a", "b", "c"]  # a filter reads everything, once
    assert sorted(shuffled) == ["a", "c"] and len(calls) == 5


def test_an_error_of_a_filter_names_the_item():
    with pytest.raises(ZeroDivisionError) as caught:
        len(FilteredDataset([1, 2, 0], lambda item: 1 // item))
    assert caught.value.__notes__ == ["This came from <lambda>, at item 2 of FilteredDataset's dataset."]


def test_a_filter_may_be_asked_by_several_threads_at_once():
    dataset, found = FilteredDataset(range(1000), lambda item: item % 3 == 0), []
    threads = [threading.Thread(target=lambda: found.append(list(dataset))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[*range(0, 1000, 3)]] * 4


@given(size=st.integers(1, 300), seed=st.integers(0, 2**64 - 1))
def test_shuffles_and_samples_are_functions_of_their_key(size, seed):
    order = list(ShuffledDataset(range(size), seed))
    assert sorted(order) == list(range(size)) and order == list(ShuffledDataset(range(size), seed))
    assert list(SampledDataset(range(size), size // 2, seed)) == order[: size // 2]
    again = SampledDatasetWithReplacement(range(size), 50, seed)
    assert list(again) == list(again) == list(SampledDatasetWithReplacement(range(size), 50, seed))
    assert set(again) <= set(range(size))


def test_a_seed_is_a_key_and_another_one_is_another_order():
    by_seed = list(ShuffledDataset(range(50), 7))
    assert by_seed == list(ShuffledDataset(range(50), jax.random.key(7)))
    assert by_seed == list(ShuffledDataset(range(50), jax.random.PRNGKey(7)))
    orders = {tuple(ShuffledDataset(range(50), seed)) for seed in (0, 1, 7, 2**32 + 7)}
    assert len(orders) == 4 and tuple(ShuffledDataset(range(50))) in orders
    assert list(ShuffledDataset(range(8), 1)) == [7, 6, 0, 2, 1, 4, 3, 5]  # on every machine


def test_draws_with_replacement_are_even():
    counts = np.bincount(list(SampledDatasetWithReplacement(range(10), 10_000, 3)), minlength=10)
    assert counts.min() > 850 and counts.max() < 1150


def test_parts_cover_a_dataset():
    parts = PartialDataset.split_dataset("abcdefgh", 3)
    assert [list(part) for part in parts] == [list("abc"), list("def"), list("gh")]
    assert [list(part) for part in PartialDataset.split("abc", 1)] == [list("abc")]
    shards = [ShardedDataset("abcdefgh", 3, shard, drop_remainder=False) for shard in range(3)]
    assert [shard.shard_boundaries() for shard in shards] == [(0, 3), (3, 6), (6, 8)]
    assert [compute_shard_boundaries(3, shard, 8) for shard in range(3)] == [(0, 2), (2, 4), (4, 6)]


def test_shuffling_ten_thousand_items_takes_a_few_calls_not_ten_thousand(count_compilations):
    with count_compilations() as compiled:
        assert len(set(SimpleDataset(list(range(10_000))).shuffle(jax.random.key(0)))) == 10_000
    assert compiled == [0]


def test_datasets_serve_the_engine_itself_in_worker_processes():
    dataset = ShuffledDataset(MappedDataset(RangeDataset(0, 6), lambda item: np.int32(item * 2)), 1)
    loader = ms.DataLoader([ms.DatasetSource(dataset, "sequential"), ms.BatchTransform(6)], executor=ms.Processes(1))
    ((batch, _),) = loader.iterate(loader.init_state(jax.random.key(0)))
    assert batch.tolist() == list(dataset)


def test_datasets_load_no_jax():
    program = (
        "import sys; from millstream.dialects.loadax import ShuffledDataset, FilteredDataset, CombinedDataset; "
        "list(ShuffledDataset(FilteredDataset(CombinedDataset('ab', 'c'), str.isalpha), 3)); "
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "attempt, words",
    [
        (lambda: RangeDataset(0, 5, 0), "RangeDataset needs step to be an int other than 0. Got 0"),
        (lambda: RangeDataset(0, wrong(5.0)), "RangeDataset needs end to be an int. Got 5.0"),
        (lambda: CombinedDataset("abc"), "needs several datasets, or one list of them. Got 'abc'"),
        (lambda: PartialDataset("abc", 2, 2), "needs 0 <= start < end <= 3, the length.* Got start 2 and end 2"),
        (lambda: PartialDataset("abc", 0, 4), "needs 0 <= start < end <= 3"),
        (lambda: PartialDataset.split_dataset("abc", 4), "cannot make 4 parts of 3 items"),
        (lambda: PartialDataset.split_dataset("abc", 0), "needs num_partitions to be an int of at least 1"),
        (lambda: SampledDataset("abc", 4), "cannot take 4 of 3 items without taking some twice"),
        (lambda: SampledDatasetWithReplacement("", 4), "needs a dataset with items"),
        (lambda: ShuffledDataset("abc", -1), "ShuffledDataset needs key to be an int of at least 0. Got -1"),
        (lambda: ShuffledDataset("abc", 2**64), "ShuffledDataset needs a seed of at most 64 bits as its key"),
        (lambda: ShuffledDataset("abc", "x"), r"ShuffledDataset needs a key such as jax.random.key\(0\). Got 'x'"),
        (lambda: ShardedDataset("abc", 4, 0), "at least one item per shard"),
        (lambda: ShardedDataset("abc", 3, 3), "needs shard_id below num_shards, 3. Got 3"),
        (lambda: MappedDataset("abc", wrong(3)), "MappedDataset needs fn to be a function"),
    ],
)
def test_what_cannot_work_is_refused_at_once(attempt, words):
    with pytest.raises((ValueError, TypeError), match=words):
        attempt()
