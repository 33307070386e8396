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
    assert [dataset.get(index) for index in range(-size, size)] == items * 2
    assert (dataset.get(size), dataset.get(-size - 1)) == (None, None)
    for index in (size, -size - 1):
        with pytest.raises(IndexError, match=f"{type(dataset).__name__} has {size} items. Got index {index}"):
            dataset[index]
    assert list(itertools.chain(*Dataloader(dataset, 3, num_workers=2))) == items  # many at a time


class Twice(InMemoryDataset):
    """As a dataset of one's own is written for loadax."""

    def get(self, index):
        return wrong(super().get(index)) * 2


class AndOne(Twice):
    """A second level, by `[index]`."""

    def __getitem__(self, index):
        return super().__getitem__(index) + 1


class AndTen(AndOne):
    """A third level, by `get` again."""

    def get(self, index):
        return wrong(super().get(index)) + 10


class Tens:
    """A class without a base, with a length and `get`."""

    def __len__(self):
        return 4

    def get(self, index):
        return index * 10 if index < 4 else None


class TensOfTheBase(Tens, Dataset):
    """The same with the base."""


class Louder(MappedDataset):
    """Overrides `get` of a dataset that reads many items at once."""

    def get(self, index):
        return f"{super().get(index)}!"


@pytest.mark.parametrize(
    "dataset, items",
    [
        (Twice([1, 2, 3, 4]), [2, 4, 6, 8]),
        (AndOne([1, 2]), [3, 5]),
        (AndTen([1, 2]), [13, 15]),
        (TensOfTheBase(), [0, 10, 20, 30]),
        (Louder("ab", str.upper), ["A!", "B!"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_dataset_with_a_get_of_its_own_is_read_by_it(dataset, items):
    size = len(items)
    assert list(dataset) == items == [dataset[index] for index in range(size)]
    assert [dataset.get(index) for index in range(size)] == items
    assert list(Dataloader(dataset, 2)) == [items[start : start + 2] for start in range(0, size, 2)]
    assert list(ShuffledDataset(dataset, 3)) == list(ShuffledDataset(items, 3))
    assert list(MappedDataset(dataset, str)) == [str(item) for item in items]
    assert dataset[-1] == items[-1]
    with pytest.raises(IndexError, match=f"{type(dataset).__name__} has {size} items. Got index {size}"):
        dataset[size]


def test_a_class_without_a_base_is_read_by_its_get():
    views = [
        PartialDataset(Tens(), 1, 4),
        MappedDataset(Tens(), lambda item: item),
        FilteredDataset(Tens(), lambda item: item > 0),
        CombinedDataset(Tens(), Tens()),
        InMemoryDataset(Tens()),
        MappedBatchDataset(Tens(), sum, 2),
    ]
    read = [[10, 20, 30], [0, 10, 20, 30], [10, 20, 30], [0, 10, 20, 30] * 2, [0, 10, 20, 30], [10, 50]]
    assert [list(view) for view in views] == read
    assert [list(itertools.chain(*Dataloader(view, 2))) for view in [*views, Tens()]] == [*read, [0, 10, 20, 30]]


def test_an_overridden_item_is_what_many_at_once_give():
    class Louder(MappedDataset):
        def __getitem__(self, index):
            return f"{super().__getitem__(index)}!"

    assert list(Dataloader(Louder("ab", str.upper), 2)) == [["A!", "B!"]]
    assert Louder("ab", str.upper).get(-1) == "B!"


def test_a_dataset_without_a_way_to_read_an_item_says_what_it_needs():
    class Empty(Dataset):
        def __len__(self):
            return 1

    for attempt in (lambda: Empty()[0], lambda: Empty().get(0)):
        with pytest.raises(TypeError, match=r"Empty needs a method get\(index\) or __getitem__\(index\)"):
            attempt()


def test_parts_end_where_the_dataset_ends():
    assert list(PartialDataset("abcde", 1, 10)) == list("bcde")
    assert list(PartialDataset("abcde", 7, 9)) == [] == list(PartialDataset([], 0, 3))
    assert list(PartialDataset("abcde", 3, 2)) == []
    assert [list(part) for part in PartialDataset.split("abc", 5)] == [["a"], ["b"], ["c"], [], []]
    assert list(Dataloader(PartialDataset([], 0, 3), 2)) == []


def test_a_dataset_shows_what_it_is_made_of():
    shown = "InMemoryDataset(items=[1, 2]...)"
    assert repr(InMemoryDataset([1, 2, 3])) == shown
    assert repr(RangeDataset(0, 10)) == "RangeDataset(start=0, end=10, step=1)"
    assert repr(MappedDataset(InMemoryDataset([1, 2, 3]), abs)) == f"MappedDataset(dataset={shown}, map_fn=abs)"
    assert repr(ShuffledDataset(InMemoryDataset([1, 2, 3]), 1)) == f"ShuffledDataset(dataset={shown})"
    assert repr(CombinedDataset([InMemoryDataset([1, 2, 3])])) == f"CombinedDataset(datasets=[{shown}])"
    assert repr(PartialDataset(RangeDataset(0, 9), 1, 4)) == (
        "PartialDataset(dataset=RangeDataset(start=0, end=9, step=1), start_index=1, end_index=4)"
    )
    assert repr(MappedBatchDataset(Tens(), sum, 2)).startswith("MappedBatchDataset(dataset=<")


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
        (lambda: RangeDataset(10, 0), "at least one number from start to before end. Got start 10, end 0 and step 1"),
        (lambda: RangeDataset(0, 0), "RangeDataset needs at least one number"),
        (lambda: PartialDataset("abc", -1, 2), "PartialDataset needs start_index to be an int of at least 0. Got -1"),
        (lambda: PartialDataset.split_dataset("abc", 0), "needs num_partitions to be an int of at least 1"),
        (lambda: SampledDataset("abc", 4), "cannot take 4 of 3 items without taking some twice"),
        (lambda: SampledDatasetWithReplacement("", 4), "needs a dataset with items"),
        (lambda: ShuffledDataset("abc", -1), "ShuffledDataset needs key to be an int of at least 0. Got -1"),
        (lambda: ShuffledDataset("abc", 2**64), "ShuffledDataset needs a seed of at most 64 bits as its key"),
        (lambda: ShuffledDataset("abc", "x"), r"ShuffledDataset needs a key such as jax.random.key\(0\). Got 'x'"),
        (lambda: ShardedDataset("abc", 4, 0), "at least one item per shard"),
        (lambda: ShardedDataset("abc", 3, 3), "needs shard_id below num_shards, 3. Got 3"),
        (lambda: MappedDataset("abc", wrong(3)), "MappedDataset needs map_fn to be a function"),
    ],
)
def test_what_cannot_work_is_refused_at_once(attempt, words):
    with pytest.raises((ValueError, TypeError), match=words):
        attempt()
