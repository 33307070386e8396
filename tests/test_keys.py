"""The cipher and the keys made with it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from millstream.plan.keys import fold, name_words, named_key, threefry2x32


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers published with Random123
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_answers(counter, key, expected):
    def words(numbers):
        return np.array([numbers[0]], np.uint32), np.array([numbers[1]], np.uint32)

    assert tuple(int(word[0]) for word in threefry2x32(words(key), words(counter))) == expected


def test_numpy_and_jax_derive_the_same_keys():
    for words in (np.array([1, 2], np.uint32), np.array([1, 2, 3, 4], np.uint32)):
        numbers = np.arange(100, dtype=np.uint32)
        ours = fold(np, named_key(words, "stage"), numbers)
        theirs = jax.jit(lambda words, numbers: fold(jnp, named_key(words, "stage"), numbers))(words, numbers)
        np.testing.assert_array_equal(ours, theirs)


def test_a_few_numbers_get_the_keys_that_they_have_among_many():
    key, zeros = named_key(np.array([1, 2], np.uint32), "stage"), np.zeros(100, np.uint32)
    counters = np.random.default_rng(0).integers(0, 1 << 32, (2, 100), np.uint32)
    many = threefry2x32((key[0] + zeros, key[1] + zeros), (counters[0], counters[1]))
    for shape in [(), (1,), (2, 1), (2, 4), (3, 3)]:
        size = math.prod(shape)
        few = threefry2x32(key, (counters[0, :size].reshape(shape), counters[1, :size].reshape(shape)))
        for found, expected in zip(few, many, strict=True):
            assert found.shape == shape and found.dtype == np.uint32
            np.testing.assert_array_equal(found, expected[:size].reshape(shape))


def test_names_key_words_and_numbers_all_matter():
    words = np.array([1, 2, 3, 4], np.uint32)
    keys = {tuple(int(w) for w in named_key(other, name)) for other in (words, words[::-1], words[:2]) for name in "ab"}
    assert len(keys) == 6
    assert name_words("a") != name_words("b")


def test_numbers_past_32_bits_are_not_truncated():
    key = (np.uint32(1), np.uint32(2))
    small, large = np.array([5], np.uint64), np.array([5 + (1 << 32)], np.uint64)
    assert [int(w[0]) for w in fold(np, key, small)] == [int(w[0]) for w in fold(np, key, small.astype(np.uint32))]
    assert [int(w[0]) for w in fold(np, key, large)] != [int(w[0]) for w in fold(np, key, small)]


def test_a_million_sample_keys_of_many_epochs_are_all_different():
    base = named_key(np.array([0, 1], np.uint32), "stage")
    epochs, samples = np.arange(100, dtype=np.uint32)[:, None], np.arange(10_000, dtype=np.uint32)
    left, right = fold(np, fold(np, base, epochs), samples)
    packed = (left.astype(np.uint64) << np.uint64(32)) | right
    assert len(np.unique(packed)) == packed.size
