"""The block shuffle: exact epochs of blocks, lanes and windows, the same everywhere, read almost in sequence."""

import collections
import hashlib
import itertools
import math
import re
from typing import Any

import format_pipelines as formats
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_trees_equal
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.plan import block_order as blocks
from millstream.plan import order
from millstream.plan.keys import fold, named_key
from millstream.plan.plan import Batching, Plan
from millstream.reading.blocks import block_sizes

WORDS = np.array([3, 4], np.uint32)
SIZES = [7, 3, 20, 0, 11, 9]


def touched_blocks(sizes: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """The numbers of the blocks that some samples are in, rising."""
    return np.unique(np.searchsorted(np.cumsum(sizes), indices, side="right"))


class Stored(ms.sources.HostSource):
    """A user's own source, whose samples are their numbers, stored in blocks."""

    sample_spec = ms.sources.spec_of("Stored", {"x": np.int32(0)})

    def __init__(self, sizes: Any = tuple(SIZES), ordering: Any = None, divides: bool = False) -> None:
        self.blocks = sizes
        self.ordering = ms.Shuffle("blocks", window=4) if ordering is None else ordering
        self.divides_blocks = divides

    def __len__(self) -> int:
        return 50 if self.blocks is None else int(np.sum(self.blocks))

    def read_rows(self, indices, out, keys=None):
        out[0][...] = indices


def made(
    sizes: Any, batch_size: int | None = None, sample_bytes: int = 1, divisible: bool = False, **given: Any
) -> Any:
    stored = blocks.StoredBlocks(np.asarray(sizes), sample_bytes, divisible)
    return blocks.block_order(ms.Shuffle("blocks", **given), stored, batch_size)


def plan_of(sizes: Any, batch_size: int, ending: Any = "pad", **given: Any) -> Plan:
    stored = blocks.StoredBlocks(np.asarray(sizes), 1, False)
    plan = Plan(int(np.sum(sizes)), ms.Shuffle("blocks", **given)).in_blocks(stored)
    return plan.batched(Batching(batch_size, ending, plan.samples))


def indices_of(plan: Plan, steps: Any, chosen: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The indices and masks of steps, all rows or those of a host."""
    rows = None if chosen is None else np.array(chosen, np.uint64)
    positions, levels = plan.at(np, WORDS, np.asarray(steps), rows)
    return plan.indices(np, WORDS, levels[-1].epoch, positions).astype(np.int64), levels[-1].mask


def drawn(loader: Any, steps: int, first: int = 0) -> list[Any]:
    return [
        jax.device_get(pair) for pair in loader.iterate(loader.init_state(jax.random.key(0), step=first), steps=steps)
    ]


def samples_of(batches: list[Any]) -> list[int]:
    return np.concatenate([batch["x"][mask] for batch, mask in batches]).tolist()


# The order


def naive_order(sizes: list[int], lanes: int, window: int, epoch: int) -> list[int]:
    """The epoch written down: all samples with the blocks permuted, cut into lanes, cut into windows, each permuted."""
    key, sizes = fold(np, named_key(WORDS, "millstream block order 1"), np.uint32(epoch)), [s for s in sizes if s]
    firsts, total = list(itertools.accumulate(sizes, initial=0)), sum(sizes)
    numbers = np.arange(len(sizes), dtype=np.uint32)
    permuted = order.shuffled(np, numbers, len(sizes), fold(np, key, np.uint32(0))).tolist()
    in_blocks = [index for block in permuted for index in range(firsts[block], firsts[block + 1])]
    found, start = [-1] * total, 0
    short = total // lanes
    windows = 1 if short <= window else math.ceil(short / window + 0.5)
    most = short + 1 if windows == 1 else 2 * (short // (2 * windows - 1) + 1)
    for lane in range(lanes):
        places = range(lane, total, lanes)
        stretch = np.array(in_blocks[start : start + len(places)], int)
        halves = [len(half) for half in np.array_split(stretch, 2 * windows - 1)]
        later = lane * (short // len(halves)) // lanes  # windows begin in the middle of a half, elsewhere in each lane
        borders = [sum(halves[:count]) + later for count in range(1, len(halves), 2)]
        start, mixed = start + len(places), []
        for number, part in enumerate(np.split(stretch, borders)):
            its_key = fold(np, key, np.uint32(lane * windows + number + 1))
            step = order.shuffled(np, np.arange(most, dtype=np.uint32), most, its_key).tolist()
            for place in range(len(part)):
                place = step[place]
                while place >= len(part):  # walks on until it is inside
                    place = step[place]
                mixed.append(int(part[place]))
        for place, index in zip(places, mixed, strict=True):
            found[place] = index
    return found


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any),
    lanes=st.integers(1, 12),
    window=st.integers(1, 40),
    epoch=st.integers(0, 5),
)
def test_an_epoch_is_the_one_written_down_and_has_every_sample_once(sizes, lanes, window, epoch):
    function, table = made(sizes, lanes=lanes, window=window)
    positions = np.arange(sum(sizes), dtype=np.uint64)
    found = function.locate(np, table, WORDS, np.uint32(epoch), positions).tolist()
    assert found == naive_order(sizes, lanes, window, epoch)
    assert sorted(found) == list(range(sum(sizes)))


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    lanes=st.integers(1, 12),
    window=st.integers(1, 40),
    asked=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 4)), max_size=20),
)
def test_any_positions_of_any_epochs_are_found_alone(sizes, lanes, window, asked):
    function, table = made(sizes, lanes=lanes, window=window)
    total = sum(sizes)
    positions = np.array([place % total for place, _ in asked], np.uint64)
    epochs = np.array([epoch for _, epoch in asked], np.uint32)
    expected = [naive_order(sizes, lanes, window, epoch)[place % total] for place, epoch in asked]
    assert function.locate(np, table, WORDS, epochs, positions).tolist() == expected


@pytest.mark.parametrize(("sizes", "lanes", "window"), [(SIZES, 4, 5), ([5000, 1, 2999], 8, 300)])
def test_a_compiled_program_has_the_same_order(sizes, lanes, window):
    function, table = made(sizes, lanes=lanes, window=window)
    positions = np.arange(sum(sizes), dtype=np.uint32)
    epochs = (positions * 7 % 3).astype(np.uint32)
    in_graph = jax.jit(lambda *given: function.locate(jnp, *given))(table, WORDS, epochs, positions)
    np.testing.assert_array_equal(in_graph, function.locate(np, table, WORDS, epochs, positions.astype(np.uint64)))


def test_far_past_32_bits_samples_stay_in_their_blocks_and_never_repeat():
    function, table = made(np.full(10**6, 10**6), lanes=64, window=10**5)
    positions = np.arange(5 * 10**11, 5 * 10**11 + 20_000, dtype=np.uint64)
    found = function.locate(np, table, WORDS, np.uint32(1), positions)
    assert len(np.unique(found)) == len(found) and found.max() < 10**12 and found.max() > 10**11
    assert len(touched_blocks(np.diff(table), found)) <= 128  # a lane's window lies in one block or two


GOLDEN = [
    ([7, 3, 20, 11, 9], 4, 5, 0, [42, 1, 20, 30, 43, 2], "d989102f795b9934"),
    ([1] * 9, 16, 1, 3, [7, 2, 0, 6, 4, 1], "b9a7534b379d153a"),
    ([1000] * 50, 8, 900, 1, [26246, 41370, 32737, 20822, 4438, 29287], "8c056b07162d1de9"),
    ([10**6] * 10**5, 64, 4096, 2, [89772001048, 85540500739, 48337000896, 54225500356], "8bb745308bc88bab"),
]


@pytest.mark.parametrize(("sizes", "lanes", "window", "epoch", "first", "digest"), GOLDEN)
def test_the_block_order_of_version_1_never_changes(sizes, lanes, window, epoch, first, digest):
    function, table = made(sizes, lanes=lanes, window=window)
    positions = np.arange(min(function.length, 1000), dtype=np.uint64)
    indices = function.locate(np, table, WORDS, np.uint32(epoch), positions).astype("<u8")
    assert blocks.VERSION == 1
    assert indices[: len(first)].tolist() == first
    assert hashlib.sha256(indices.tobytes()).hexdigest()[:16] == digest


# Batches and hosts


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    lanes=st.sampled_from([1, 2, 4, 6]),
    each=st.integers(1, 3),
    window=st.integers(1, 20),
    ending=st.sampled_from(["pad", "drop", "wrap"]),
)
def test_rows_are_arranged_by_lane_and_a_batch_has_the_samples_of_its_positions(sizes, lanes, each, window, ending):
    size, total = lanes * each, sum(sizes)
    if ending == "drop" and total < size:
        return
    plan = plan_of(sizes, size, ending, lanes=lanes, window=window)
    epochs = [naive_order(sizes, lanes, window, epoch) for epoch in range(2)]
    run = [(epoch, place) for epoch in range(2) for place in range(total)]
    steps = 2 * total // size if ending == "wrap" else 2 * plan.steps_per_epoch
    found, mask = indices_of(plan, np.arange(steps))
    for step in range(steps):
        epoch, batch = divmod(step, plan.steps_per_epoch)
        rows = range(step * size, (step + 1) * size) if ending == "wrap" else range(batch * size, (batch + 1) * size)
        places = run if ending == "wrap" else [(epoch, place) for place in range(total)]
        by_lane = [[row for row in rows if row % lanes == rows[lane] % lanes] for lane in range(lanes)]
        expected = [
            epochs[places[row][0]][places[row][1]] if row < len(places) else None for row in itertools.chain(*by_lane)
        ]
        assert [
            index if real else None for index, real in zip(found[step].tolist(), mask[step], strict=True)
        ] == expected


@given(
    sizes=st.lists(st.integers(1, 40), min_size=4, max_size=12),
    lanes=st.sampled_from([4, 8, 12]),
    each=st.integers(1, 2),
    window=st.integers(1, 20),
    change=st.integers(0, 100),
    data=st.data(),
)
def test_hosts_read_the_lanes_that_are_theirs_and_may_change_in_number(sizes, lanes, each, window, change, data):
    size = lanes * each
    plan = plan_of(sizes, size, lanes=lanes, window=window)
    change %= plan.steps_per_epoch + 1
    divisors = [count for count in range(1, lanes + 1) if lanes % count == 0]
    numbers = data.draw(st.tuples(st.sampled_from(divisors), st.sampled_from(divisors)))
    whole, whole_mask = indices_of(plan, np.arange(plan.steps_per_epoch))
    seen = []
    for hosts, steps in zip(numbers, (range(change), range(change, plan.steps_per_epoch)), strict=True):
        for host in range(hosts):
            rows = range(host * size // hosts, (host + 1) * size // hosts)
            found, mask = indices_of(plan, np.array(steps, int), rows)
            np.testing.assert_array_equal(found, whole[steps.start : steps.stop, rows.start : rows.stop])
            seen += found[mask].tolist()
            samples = plan.rows_at(np, WORDS, np.array(steps, int), np.array(rows, np.uint64))[-1]
            its_lanes = set((samples.element[samples.mask] % lanes).tolist())
            assert its_lanes <= set(range(host * lanes // hosts, (host + 1) * lanes // hosts))
    assert sorted(seen) == sorted(whole[whole_mask].tolist()) == list(range(sum(sizes)))


@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
def test_a_host_reads_its_share_of_the_blocks_and_no_block_twice(hosts):
    sizes = np.random.default_rng(0).integers(50, 150, 2000)
    plan = plan_of(sizes, 64, lanes=64, window=300)
    touched = []
    for host in range(hosts):
        rows = range(host * 64 // hosts, (host + 1) * 64 // hosts)
        found, mask = indices_of(plan, np.arange(plan.steps_per_epoch), rows)
        touched.append(len(touched_blocks(sizes, found[mask])))
    assert max(touched) <= 1.05 * len(sizes) / hosts
    assert sum(touched) <= len(sizes) + hosts  # a block at the border of two hosts is read by both


def loads(plan: Plan, sizes: np.ndarray, kept: int) -> int:
    """How many blocks are read in an epoch, if those used least recently make room for others."""
    cache: collections.OrderedDict[int, None] = collections.OrderedDict()
    found, count = indices_of(plan, np.arange(plan.steps_per_epoch))[0], 0
    for batch in found:
        for block in touched_blocks(sizes, batch).tolist():
            count += block not in cache
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > kept:
            cache.popitem(last=False)
    return count


def test_a_cache_for_the_blocks_in_flight_reads_each_block_about_once():
    sizes = np.random.default_rng(0).integers(50, 150, 1000)
    plan = plan_of(sizes, 64, lanes=16, window=400)
    kept = 16 * (400 // 100 + 2)
    assert loads(plan, sizes, kept) <= 1.2 * len(sizes)
    shuffled = Plan(plan.samples, "shuffle", (Batching(64, "pad", plan.samples),))
    assert loads(shuffled, sizes, kept) > 50 * len(sizes)


def test_lanes_do_not_need_new_blocks_all_at_once():
    sizes = np.full(1000, 100)
    found, _ = indices_of(plan_of(sizes, 64, lanes=16, window=400), np.arange(1500))  # a window lasts 100 steps
    first_needed = [int(np.flatnonzero((found // 100 == block).any(axis=1))[:1].sum()) for block in range(1000)]
    new = np.bincount(np.array(first_needed) // 25)[4:]  # after the first windows
    assert new.max() <= 2.5 * new.mean()  # all of a window's in 25 of 100 steps would be 4


def test_at_any_time_few_blocks_are_in_use():
    plan = plan_of([100] * 1000, 64, lanes=16, window=400)
    for step in (0, 700, 1400):
        found, _ = indices_of(plan, np.arange(step, step + 50))  # half of a window
        assert len(touched_blocks(np.full(1000, 100), found)) <= 16 * 2 * 6


# How well it mixes


def chi_square(plan: Plan, labels: np.ndarray, epochs: int = 2) -> float:
    """Of the labels of a batch, on average over all batches of some epochs."""
    found, mask = indices_of(plan, np.arange(epochs * plan.steps_per_epoch))
    counts = np.stack([np.bincount(labels[batch], minlength=labels.max() + 1) for batch in found[mask.all(axis=1)]])
    expected = found.shape[1] / (labels.max() + 1)
    return float((np.square(counts - expected) / expected).sum(axis=1).mean())


@pytest.mark.parametrize(("lanes", "window"), [(4, 800), (4, 1600), (8, 400), (8, 800), (16, 400), (16, 800)])
def test_labels_of_sorted_data_vary_by_the_law(lanes, window):
    labels, size = np.repeat(np.arange(100), 1000), 64
    full = chi_square(Plan(len(labels), "shuffle", (Batching(size, "pad", len(labels)),)), labels)
    plan = plan_of([100] * 1000, size, lanes=lanes, window=window)
    ratio, in_flight = chi_square(plan, labels) / full, lanes * window / 100
    assert ratio == pytest.approx(1 + size / in_flight, rel=0.2)


@pytest.mark.parametrize(("lanes", "window"), [(4, 1600), (16, 200), (16, 800), (32, 50), (64, 400)])
def test_explain_knows_how_labels_of_sorted_data_vary(lanes, window):
    labels, size = np.repeat(np.arange(100), 1000), 64
    sizes = np.random.default_rng(1).integers(80, 120, 1000)
    sizes[-1] += len(labels) - sizes.sum()
    full = chi_square(Plan(len(labels), "shuffle", (Batching(size, "pad", len(labels)),)), labels)
    plan = plan_of(sizes, size, lanes=lanes, window=window)
    assert plan.blocks is not None and plan.selection is not None
    table: Any = plan.selection.tables[0]
    expected = blocks.mixing(plan.blocks, table, size)
    assert expected.samples == lanes * window
    assert chi_square(plan, labels) / full == pytest.approx(expected.ratio, rel=0.1)
    assert expected.ratio <= 1 + size / expected.blocks


def test_few_large_blocks_that_can_be_divided_mix_as_well_as_many():
    labels, size = np.repeat(np.arange(100), 1000), 64
    full = chi_square(Plan(len(labels), "shuffle", (Batching(size, "pad", len(labels)),)), labels)
    ratios = {}
    for divisible in (True, False):
        stored = blocks.StoredBlocks(np.full(8, 12_500), 4096, divisible)
        plan = Plan(len(labels), ms.Shuffle("blocks", lanes=4, window=400)).in_blocks(stored)
        ratios[divisible] = chi_square(plan.batched(Batching(size, "pad", len(labels))), labels) / full
    assert ratios[True] < 1.4 < 4 < ratios[False]


def test_what_is_not_given_is_chosen_for_memory_and_batch_size():
    function, _ = made([100] * 100_000, 128, sample_bytes=4096)
    assert function.lanes == 64 and function.lanes * (function.window + 100) == pytest.approx(2**28 / 4096, rel=0.01)
    function, _ = made([10_000] * 1000, 128, sample_bytes=4096)  # blocks of 40 MB: fewer lanes
    assert function.lanes == 2 and function.window + 10_000 == pytest.approx(2**28 / 4096 / 2, rel=0.01)
    function, table = made([1_000_000] * 10, 128, sample_bytes=4096, divisible=True)
    assert np.diff(table).max() == 2**28 // 4096 // (4 * 128)  # four blocks in flight for each row
    kept = blocks.StoredBlocks(np.array([100] * 100_000), 4096, False, 64 << 20)
    function, _ = blocks.block_order(ms.Shuffle("blocks"), kept, 128)
    assert 32 * (function.window + 100) == pytest.approx(2**25 / 4096, rel=0.01) and function.lanes == 32
    function, _ = made([10] * 10, 96)
    assert function.lanes == 32 and function.window == 4  # all of a lane
    function, table = made([100, 7], 4, block_size=30)
    assert np.diff(table).tolist() == [25, 25, 25, 25, 7]


# Loaders


def test_verify_finds_the_same_batches_everywhere():
    assert ms.inspect.verify(ms.DataLoader([Stored(), ms.BatchTransform(8, pad_last_batch=False)])).ok


def test_an_epoch_keeps_every_sample_once_where_the_batch_size_changes():
    loader = ms.DataLoader([Stored(), ms.BatchTransform({0: 8, 3: 12, 5: 4})])
    batches = drawn(loader, 40)
    epochs = np.bincount(samples_of(batches))
    assert epochs.max() - epochs.min() <= 1
    first = samples_of(batches[: loader.steps_per_epoch])
    assert sorted(first) == list(range(50))


def test_a_function_on_the_host_sees_padding_nowhere_and_samples_once():
    seen = []

    def collate(samples):
        seen.append(len(samples))
        return [int(sample["x"]) for sample in samples]

    loader = ms.DataLoader([Stored(), ms.BatchTransform(8, collate=collate)])
    batches = [batch for batch, _ in loader.iterate(loader.init_state(jax.random.key(0)))]
    assert sorted(itertools.chain(*batches)) == list(range(50))


def test_sources_of_a_mixture_go_through_their_own_epochs_in_blocks():
    def numbered(first, sizes):
        return Stored(sizes).map(lambda sample: {"x": np.int32(sample["x"] + first)})

    parts = {"a": numbered(0, [5, 10, 5]), "b": numbered(100, [4] * 10)}
    view = ms.views.mix(parts, {"a": 1, "b": 2}, samples=60)
    loader = ms.DataLoader([view, ms.BatchTransform(6)])
    for epoch in range(3):
        found = samples_of(drawn(loader, 10, first=10 * epoch))
        assert sorted(found) == [*range(20), *range(100, 140)]
    assert samples_of(drawn(loader, 10)) != samples_of(drawn(loader, 10, first=10))
    own = np.array([one - 100 for one in samples_of(drawn(loader, 10)) if one >= 100])
    assert len(touched_blocks(np.full(10, 4), own[:4])) > 2  # of several lanes
    assert "in sequence" not in dict(loader.init_state(jax.random.key(0)).origin)["view"]


def test_a_mixture_in_a_compiled_program_is_that_on_the_host():
    first = ms.ArraySampleSource({"x": np.arange(20)}, ms.Shuffle("blocks", block_size=4, window=3))
    second = ms.ArraySampleSource({"x": np.arange(20, 40)}, "sequential")
    loader = ms.DataLoader([ms.views.mix({"a": first, "b": second}, {"a": 2, "b": 1}), ms.BatchTransform(8)])
    state, compiled = loader.init_state(jax.random.key(0)), jax.jit(lambda loader, state: loader.next_batch(state))
    for expected in drawn(loader, 12):
        batch, state, mask = compiled(loader, state)
        assert_trees_equal(expected, jax.device_get((batch, mask)))


def test_weighted_draws_come_in_blocks_and_may_get_new_weights():
    source = ms.ArraySampleSource({"x": np.arange(40)}, ms.Shuffle("blocks", block_size=5, window=4))
    loader = ms.DataLoader([ms.views.weighted(source, np.arange(40) + 1.0), ms.BatchTransform(8)])
    counts = np.bincount(samples_of(drawn(loader, 5)), minlength=40)
    assert counts.sum() == 40 and counts[35:].sum() > 4 * counts[:5].sum()
    changed = loader.with_weights(np.arange(40) < 2)
    assert np.bincount(samples_of(drawn(changed, 5))).tolist() == [20, 20]


def test_a_state_of_a_different_order_is_refused_by_name():
    def state(**given):
        loader = ms.DataLoader([Stored(ordering=ms.Shuffle("blocks", **given)), ms.BatchTransform(8)])
        return loader, loader.init_state(jax.random.key(0))

    loader, _ = state(window=4)
    for other in ({"window": 3}, {"window": 4, "lanes": 2}, {"window": 4, "block_size": 5}):
        with pytest.raises(
            ValueError, match=r"ordering: .*, blocks: 5 blocks .* in 8 lanes with windows of 4, version 1 here"
        ):
            loader.next_batch(state(**other)[1])
    shuffled = ms.DataLoader([Stored(ordering="shuffle"), ms.BatchTransform(8)])
    with pytest.raises(ValueError, match="ordering"):
        loader.next_batch(shuffled.init_state(jax.random.key(0)))


def test_explain_says_what_is_in_flight_and_how_it_mixes():
    source = Stored([100] * 1000, ms.Shuffle("blocks", lanes=16, window=400))
    words = ms.inspect.explain(ms.DataLoader([source, ms.BatchTransform(64)])).table()
    assert "order       blocks: a different order every epoch, read almost in sequence" in words
    assert "1,000 of 100 samples on average, about 64 in flight (6,400 samples, 25.6 kB) in 16 lanes" in words
    assert "vary 1.68 times as much from batch to batch as after a full shuffle" in re.sub(r"\s+", " ", words)


# Which blocks there are


def test_views_know_the_blocks_of_their_samples():
    source = Stored()
    cases = {
        "slice": (source[5:45], [2, 3, 20, 0, 11, 4]),
        "slice of a slice": (source[5:45][2:30], [0, 3, 20, 0, 5, 0]),
        "backwards": (source[::-1], [9, 11, 20, 3, 7]),
        "selected": (ms.views.select(source, lambda sample: sample["x"] % 2 == 0), [4, 1, 10, 6, 4]),
        "mapped": (source.map(lambda sample: sample), SIZES),
        "mapped slice": (source[5:45].map(lambda sample: sample), [2, 3, 20, 0, 11, 4]),
        "concatenated": (ms.views.concat(source, Stored([4, 6])), [*SIZES, 4, 6]),
        "concatenated with one that has none": (ms.views.concat(source, Stored(None)), [*SIZES, 50]),
        "concatenated slices": (ms.views.concat(source[5:45], source[:9]), [2, 3, 20, 11, 4, 7, 2]),
        "repeated": (ms.views.repeat(source[:9], 2), [7, 2, 7, 2]),
        "without blocks": (Stored(None)[3:], None),
        "weighted": (ms.views.weighted(source, np.ones(50)), None),
    }
    for name, (view, expected) in cases.items():
        found = block_sizes(view)
        assert (found if found is None else found.tolist()) == expected, name


def test_a_loader_over_a_view_reads_each_sample_once():
    for view in (Stored()[5:45], ms.views.select(Stored(), lambda sample: sample["x"] % 2 == 0), Stored()[::-1]):
        loader = ms.DataLoader([view, ms.BatchTransform(8)])
        assert sorted(samples_of(drawn(loader, loader.steps_per_epoch))) == sorted(view.read(np.arange(len(view)))["x"])


def test_parts_of_a_source_that_has_no_blocks_are_those_of_a_given_size():
    source = Stored(None, ms.Shuffle("blocks", block_size=8, window=4, lanes=2))
    loader = ms.DataLoader([source, ms.BatchTransform(4)])
    assert "7 blocks" in dict(loader.init_state(jax.random.key(0)).origin)["ordering"]
    assert sorted(samples_of(drawn(loader, loader.steps_per_epoch))) == list(range(50))


def _tokens():
    for number in range(2):
        np.array([5, 0, 7, 0, 8, 0][: 4 + 2 * number], np.uint16).tofile(formats.place(f"part-{number}.tok"))
    return ms.sources.TokenFileSource(
        [formats.place("part-0.tok"), formats.place("part-1.tok")], np.uint16, end_token=0
    )


def _npy():
    parts = []
    for number in range(2):
        np.save(formats.place(f"part-{number}.npy"), np.arange(3 + number))
        parts.append(ms.sources.NpySource({"x": formats.place(f"part-{number}.npy")}))
    return ms.views.concat(*parts)


def _hugging_face():
    import datasets

    from millstream.integrations.huggingface import HuggingFaceSource

    parts = [datasets.Dataset.from_dict({"x": list(range(length))}) for length in (4, 7)]
    return HuggingFaceSource(datasets.concatenate_datasets(parts))


def _source(make):
    return lambda: make()[0]


FORMATS = {
    "Parquet row groups": (_source(formats.parquet), [4, 4, 3], False),
    "Arrow record batches": (lambda: formats.arrow(formats.arrow_file())[0], [4, 4, 3], False),
    "tar files": (_source(formats.tar), [11], True),
    "ArrayRecord files": (_source(formats.array_record), [11], True),
    "zarr chunks": (_source(formats.zarr), [4, 4, 3], False),
    "HDF5 chunks": (_source(formats.hdf5), [4, 4, 3], False),
    "Lance fragments": (_source(formats.lance), [4, 4, 3], True),
    "TFRecord files": (lambda: ms.sources.TFRecordSource([formats.tfrecord_file()] * 2), [11, 11], True),
    "MDS shards": (lambda: ms.sources.MdsSource(formats.mds_folder()), [11], True),
    "lines": (lambda: ms.sources.JsonlSource([formats.json_lines()] * 2), [11, 11], True),
    "token files": (_tokens, [2, 3], True),
    "tokens": (lambda: _tokens().tokens, [4, 6], True),
    "record batches of Hugging Face": (_hugging_face, [4, 7], True),
    "joined .npy files": (_npy, [3, 4], True),
}


@pytest.mark.parametrize("name", FORMATS)
def test_sources_of_files_say_their_blocks(name):
    make, expected, divides = FORMATS[name]
    source = make()
    sizes = block_sizes(source)
    assert sizes is not None and sizes.tolist() == expected
    assert source.divides_blocks == divides


def test_a_dataset_of_hugging_face_that_lists_its_rows_has_no_blocks():
    import datasets

    from millstream.integrations.huggingface import HuggingFaceSource

    dataset = datasets.Dataset.from_dict({"x": list(range(9))})
    assert block_sizes(HuggingFaceSource(dataset.select([5, 1, 7]))) is None
    ordering = ms.Shuffle("blocks", lanes=2, window=2)
    loader = ms.DataLoader([HuggingFaceSource(dataset, ordering=ordering), ms.BatchTransform(4)])
    assert sorted(samples_of(drawn(loader, loader.steps_per_epoch))) == list(range(9))


# What is refused


def test_wrong_arguments_are_refused_by_name():
    def refused(words, **given):
        with pytest.raises((ValueError, TypeError), match=words):
            ms.Shuffle(**{"mode": "blocks", **given})

    refused(r'Shuffle takes window with the mode "blocks" alone. Got \'itemwise\'', mode="itemwise", window=4)
    refused("Shuffle needs lanes", lanes=0)
    refused("Shuffle needs block_size", block_size=2.5)
    refused(r'Shuffle\("blocks"\) shuffles every epoch', first_epoch=False)


def test_what_a_block_shuffle_cannot_do_is_refused_by_name():
    def refused(words, *stages):
        with pytest.raises(ValueError, match=words):
            ms.DataLoader(list(stages))

    batch = ms.BatchTransform(8)
    refused(r"does not say them. Pass block_size=.* use ordering=\"shuffle\"", Stored(None), batch)
    refused(
        r"View\(6 .* of ArraySampleSource\) does not say",
        ms.ArraySampleSource(np.arange(8), ms.Shuffle("blocks"))[2:],
        batch,
    )
    lanes = Stored(ordering=ms.Shuffle("blocks", lanes=3))
    refused(
        r"multiple of lanes, which are 3: .* Got BatchTransform\(8\). Use lanes=8, or leave lanes out", lanes, batch
    )
    refused(r"multiple of lanes", lanes, ms.BatchTransform({0: 6, 5: 8}))
    refused(r"Wrong.blocks needs to add up to the 50 samples .* Got 2 blocks with 4 samples", Wrong([1, 3]), batch)
    for wrong in ([[50]], [60, -10], [25.0, 25.0], "many"):
        refused(r"Wrong.blocks needs to be the number of samples of each block, in order. Got", Wrong(wrong), batch)
    with pytest.raises(ValueError, match=r"buckets takes samples of one length .*Shuffle\(mode='blocks', window=4\)"):
        ms.views.buckets(Stored(), lambda sample: 3, lengths=(8,), batch_size=4)


class Wrong(Stored):
    """Says that it has other blocks than it has samples."""

    def __len__(self) -> int:
        return 50
