"""The order is a bijection, the same in NumPy and JAX, and looks random."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from millstream.plan import order


def permutations(n, *, seed=0, epochs=1):
    words = np.array([0, seed], np.uint32)
    left, right = order.epoch_key(np, words, np.arange(epochs, dtype=np.uint32))
    positions = np.arange(n, dtype=np.uint32)
    return order.shuffled(np, positions[None], n, (left[:, None], right[:, None]))


def p_value(result: Any) -> float:
    return float(result.pvalue)


def assert_bijective(n, permutation):
    counts = np.bincount(permutation, minlength=n)
    assert len(counts) == n and (counts == 1).all(), f"no bijection at n = {n}"


def test_every_size_up_to_2000_is_a_bijection():
    for n in range(1, 2001):
        assert_bijective(n, permutations(n, seed=n)[0])


@pytest.mark.parametrize("k", range(11, 21))
def test_sizes_around_powers_of_two_are_bijections(k):
    for n in (2**k - 1, 2**k, 2**k + 1):
        assert_bijective(n, permutations(n, seed=k)[0])


@pytest.mark.parametrize("n", [1, 2, 3, 5, 17, 255, 1023, 1024, 1025, 60_000, 65_535, 65_536, 65_537, 2**31 - 1])
def test_numpy_and_jax_give_the_same_order(n):
    words = np.array([3, 4], np.uint32)
    positions = np.unique(np.linspace(0, n - 1, 64).astype(np.uint32))

    @jax.jit
    def in_graph(words, epoch):
        return order.shuffled(jnp, jnp.asarray(positions), n, order.epoch_key(jnp, words, epoch))

    for epoch in (0, 1, 2**32 - 1):
        number = np.uint32(epoch)
        np.testing.assert_array_equal(
            order.shuffled(np, positions, n, order.epoch_key(np, words, number)), in_graph(words, number)
        )


@given(n=st.integers(2**31, order.MAX_SAMPLES), seed=st.integers(0, 2**32 - 1))
def test_sizes_past_32_bits_stay_in_range_and_never_repeat(n, seed):
    key = order.epoch_key(np, np.array([1, seed], np.uint32), np.uint64(0))
    positions = np.concatenate([np.arange(500, dtype=np.uint64), n - 1 - np.arange(500, dtype=np.uint64)])
    indices = order.shuffled(np, positions, n, key)
    assert indices.dtype == np.uint64
    assert indices.max() < n
    assert len(np.unique(indices)) == len(positions)


def test_wide_and_narrow_positions_agree():
    key = order.epoch_key(np, np.array([1, 2], np.uint32), np.uint32(3))
    for n in (10, 5_000, 2**31):
        narrow = np.arange(0, min(n, 1000), dtype=np.uint32)
        np.testing.assert_array_equal(
            order.shuffled(np, narrow, n, key), order.shuffled(np, narrow.astype(np.uint64), n, key)
        )


def test_no_seed_and_epoch_share_an_order():
    every = np.concatenate([permutations(64, seed=seed, epochs=100) for seed in range(100)])
    assert len(np.unique(every, axis=0)) == 10_000


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_a_few_samples_are_equally_likely(n):
    codes = permutations(n, epochs=24_000) @ (n ** np.arange(n)).astype(np.uint32)
    _, counts = np.unique(codes, return_counts=True)
    assert len(counts) == [2, 6, 24, 120][n - 2]
    assert p_value(stats.chisquare(counts)) > 1e-3


@pytest.mark.parametrize("n", [6, 10, 31, 64, 1000, 1024, 1500])
def test_every_position_sees_every_value_equally_often(n):
    epochs, bins = 4000, min(n, 16)
    bin_of = np.arange(n) * bins // n
    observed = np.zeros((bins, bins))
    np.add.at(observed, (bin_of[None, :], bin_of[permutations(n, epochs=epochs)]), 1)
    sizes = np.bincount(bin_of)
    expected = np.outer(sizes, sizes) * epochs / n
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(statistic, (bins - 1) ** 2) > 1e-3


@pytest.mark.parametrize("n", [10_000, 50_000, 60_000, 65_536, 65_537, 131_072])
def test_class_balance_of_batches_is_that_of_a_random_permutation(n):
    def spread(permutation):
        """Variance of class counts per batch over its expectation, for data sorted by class."""
        batches = permutation[: n // 256 * 256].reshape(-1, 256).astype(np.int64) * 10 // n
        counts = np.stack([(batches == label).sum(axis=1) for label in range(10)])
        return counts.var(axis=1).mean() / (256 * 0.1 * 0.9 * (1 - 256 / n))

    random = np.random.default_rng(0)
    ours = np.array([spread(p) for p in permutations(n, epochs=10)])
    truly = np.array([spread(random.permutation(n)) for _ in range(10)])
    assert abs(ours.mean() - 1) < 0.05
    assert p_value(stats.ttest_ind(ours, truly)) > 1e-3


@pytest.mark.parametrize("n", [1000, 10_000, 50_000, 60_000, 65_536, 65_537, 131_072])
def test_neighbours_in_the_order_are_unrelated(n):
    """Adjacent pairs and their differences are spread as in a random permutation, and do not correlate."""
    for seed in range(3):
        order_ = permutations(n, seed=seed)[0].astype(np.int64)
        first, second = order_[:-1] * 16 // n, order_[1:] * 16 // n
        table = np.bincount(first * 16 + second, minlength=256).reshape(16, 16)
        assert p_value(stats.chi2_contingency(table)) > 1e-3
        differences = np.bincount((order_[1:] - order_[:-1]) % n * 64 // n, minlength=64)
        assert p_value(stats.chisquare(differences)) > 1e-3
        assert abs(np.corrcoef(order_[:-1], order_[1:])[0, 1]) < 4 / np.sqrt(n)


GOLDEN = [
    (1, [0, 0], 0, [0], "af5570f5a1810b7a"),
    (1, [0, 1], 0, [0], "af5570f5a1810b7a"),
    (1, [1, 2, 3, 4], 5, [0], "af5570f5a1810b7a"),
    (2, [0, 0], 0, [1, 0], "4cbbd8ca5215b8d1"),
    (2, [0, 1], 0, [0, 1], "9d34149fbd1fe777"),
    (2, [1, 2, 3, 4], 5, [1, 0], "4cbbd8ca5215b8d1"),
    (10, [0, 0], 0, [6, 2, 7, 4, 1], "5e1f8f93f635437a"),
    (10, [0, 1], 0, [7, 2, 4, 1, 3], "a4f06bcaeee5460e"),
    (10, [1, 2, 3, 4], 5, [1, 8, 9, 0, 7], "716739f8ede42308"),
    (1000, [0, 0], 0, [392, 876, 246, 974, 204], "f33b6b521fac95b5"),
    (1000, [0, 1], 0, [698, 360, 407, 434, 685], "2cc628bedc6b6320"),
    (1000, [1, 2, 3, 4], 5, [272, 613, 900, 626, 432], "4a26e53b8711ca92"),
    (1024, [0, 0], 0, [477, 793, 196, 935, 260], "931351a9dc97f4c4"),
    (1024, [0, 1], 0, [382, 782, 605, 543, 597], "ca36ce8a2db7ec01"),
    (1024, [1, 2, 3, 4], 5, [696, 427, 493, 401, 237], "6194ae596c29569a"),
    (60000, [0, 0], 0, [28944, 57724, 35828, 35307, 36568], "81e015a4e511dc1c"),
    (60000, [0, 1], 0, [23483, 34967, 19862, 9091, 51493], "20fbfd719e88f66d"),
    (60000, [1, 2, 3, 4], 5, [56019, 161, 19058, 48785, 54158], "4349ca301b38fb68"),
    (65537, [0, 0], 0, [7537, 40726, 24377, 1346, 61880], "d75fa4ca0fd7a40a"),
    (65537, [0, 1], 0, [10514, 47839, 27989, 16023, 38281], "bdd2d2f9e431d627"),
    (65537, [1, 2, 3, 4], 5, [9220, 27830, 54140, 62140, 8992], "552cc64275978db4"),
    (
        1000000000000,
        [0, 0],
        0,
        [434181268311, 785377575294, 562624138200, 870926942344, 955432391089],
        "5166ed1941b91d1c",
    ),
    (
        1000000000000,
        [0, 1],
        0,
        [908508167681, 404855826461, 482195173249, 455428917093, 714122135721],
        "c0992475da83c454",
    ),
    (
        1000000000000,
        [1, 2, 3, 4],
        5,
        [524539777265, 820114817468, 19618040186, 979902236602, 400356113742],
        "8f9c4c5beb05f553",
    ),
]


@pytest.mark.parametrize(("n", "words", "epoch", "first", "digest"), GOLDEN)
def test_the_order_of_version_1_never_changes(n, words, epoch, first, digest):
    dtype = np.uint32 if n <= 2**31 else np.uint64
    positions = np.arange(min(n, 1000), dtype=dtype)
    key = order.epoch_key(np, np.array(words, np.uint32), np.uint32(epoch))
    indices = order.shuffled(np, positions, n, key).astype("<u8")
    assert order.VERSION == 1
    assert indices[: len(first)].tolist() == first
    assert hashlib.sha256(indices.tobytes()).hexdigest()[:16] == digest


def test_a_single_position_is_what_it_is_among_others():
    words = np.array([0, 1], np.uint32)
    for n in (1, 2, 11, 31, 1031):  # on most of these grids, some positions walk
        key = order.epoch_key(np, words, np.uint32(0))
        together = order.shuffled(np, np.arange(n, dtype=np.uint32), n, key)
        assert [int(order.shuffled(np, np.uint32(position), n, key)) for position in range(n)] == together.tolist()


GOLDEN_BATCHES = [2, 8, 0, 6, 9, 5, 4, 7, 1, 3]


def test_the_batch_order_of_version_1_never_changes():
    words = np.array([0, 1], np.uint32)
    key = order.batch_order_key(np, words, np.uint32(3))
    assert order.shuffled(np, np.arange(10, dtype=np.uint32), 10, key).tolist() == GOLDEN_BATCHES
    samples = order.shuffled(np, np.arange(10, dtype=np.uint32), 10, order.epoch_key(np, words, np.uint32(3)))
    assert samples.tolist() != GOLDEN_BATCHES
