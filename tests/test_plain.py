"""Plain values: all of them come back as they were, all others are refused by name, and damaged bytes do no harm."""

import datetime
import enum
import math
import pathlib
import random
import struct
import tracemalloc
import zoneinfo
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from millstream.files.plain import decode, encode


def same(left, right):
    """Equal in type and value, all the way down; nan is nan, and 0.0 is not -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    return left == right


any_text = st.text(st.characters(exclude_categories=()))  # lone surrogates, too
hashable_leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | any_text | st.binary()
    | st.dates() | st.datetimes(timezones=st.none() | st.just(datetime.UTC))
    | st.from_regex(r"[a-z./]+", fullmatch=True).map(pathlib.Path)
)  # fmt: skip
keys = hashable_leaves | st.tuples(hashable_leaves, hashable_leaves) | st.frozensets(st.integers())
dtypes = npst.scalar_dtypes() | npst.byte_string_dtypes() | npst.unicode_string_dtypes()
arrays = npst.arrays(dtypes, npst.array_shapes(min_dims=0, min_side=0, max_side=3))
values = st.recursive(
    hashable_leaves | arrays | st.sets(st.integers()),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner),
    max_leaves=10,
)


@given(values)
def test_every_plain_value_comes_back_as_it_was(value):
    assert same(decode(encode(value)), value)


SPECIAL = [
    *(1 << 100_000, -(1 << 100_000), 127, 128, -128, -129, True, False, 0, 1),
    *(math.nan, -math.nan, math.inf, -0.0, 5e-324, complex(math.nan, -0.0)),
    *("", "\ud800", "\ud83d\ude00", "\U0001f600", "a\0", b"", b"\0" * 1000),
    *((), [], {}, set(), frozenset({1}), {1: "a", "1": "b", (1, 2): "c", None: "d"}, {True: 1}),
    *(np.float32(0.1), np.float64(2), np.bool_(True), np.datetime64("NaT", "s"), np.timedelta64(3, "D"), np.int8(-3)),
    *(np.str_("a\0"), np.bytes_(b"a\0"), np.void(b"ab"), np.longdouble(1) / 3),
    *(np.zeros((0, 3), ">i2"), np.array(3)),
    datetime.datetime(2020, 1, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=-3, seconds=7))),
]


@pytest.mark.parametrize("value", SPECIAL, ids=lambda value: f"{type(value).__name__}")
def test_special_values_come_back_as_they_were(value):
    assert same(decode(encode(value)), value)


def test_a_key_of_a_dict_keeps_its_order_and_a_date_its_fold():
    assert list(decode(encode({"b": 1, "a": 2}))) == ["b", "a"]
    assert decode(encode(datetime.datetime(2020, 10, 25, 2, fold=1))).fold == 1


def test_paths_come_back_as_paths_of_this_system():
    for path in (pathlib.Path("a/b"), pathlib.PurePath("a/b")):
        assert decode(encode(path)) == pathlib.Path("a/b")
        assert type(decode(encode(path))) is type(pathlib.Path())


def test_an_array_of_any_layout_comes_back_in_c_order_and_can_be_written(tmp_path):
    array = np.arange(12).reshape(3, 4)
    mapped = np.memmap(tmp_path / "x", mode="w+", shape=(3, 4), dtype=array.dtype)
    mapped[:] = array
    for value in (array.T.copy().T, np.broadcast_to(array, (3, 4)), array, mapped):
        back = decode(encode(value))
        np.testing.assert_array_equal(back, array)
        assert type(back) is np.ndarray and back.flags.c_contiguous and back.flags.writeable and back.flags.aligned


class Color(enum.IntEnum):
    RED = 1


class Image:
    def __repr__(self):
        return "<Image 3x4>"


class Unspeakable:
    def __repr__(self):
        raise OSError


Point = namedtuple("Point", "x y")
cycle: dict[str, object] = {"inner": []}
cycle["inner"].append(cycle)  # pyright: ignore
deep = []
for _ in range(200):
    deep = [deep]
BERLIN = datetime.datetime(2020, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
REFUSED = {
    "result['image']: <Image 3x4> (Image)": {"image": Image()},
    "result['a'][0][1]: <Image 3x4> (Image)": {"b": 1, "a": [(2, Image())]},
    "result: a value without a repr (Unspeakable)": Unspeakable(),
    "result[2]: <function": [1, 2, lambda: 0],
    "result['a'] (a key of it)[0]: <Image 3x4>": {"a": {(Image(), 1): 2}},
    "result (an item of it): <Image 3x4>": {Image()},
    "result[0]: <Color.RED: 1> (Color)": [Color.RED],
    "result: Point(x=1, y=2) (Point)": Point(1, 2),
    "result: OrderedDict() (OrderedDict)": OrderedDict(),
    "result: bytearray(b'') (bytearray)": bytearray(),
    "result['x']: shape (2,), object": {"x": np.array([None, None])},
    "result: shape (1,), float64": np.ma.masked_array([1.0]),
    "result: shape (1,), StringDType()": np.array(["a"], np.dtypes.StringDType()),
    "result['inner'][0]: a dict that contains itself": cycle,
    "result[0][0][0][0][0][0][0][0][0][0] ... [0][0][0][0][0]: values nested more than 100 deep": deep,
    "result: datetime.datetime(2020, 1, 1, 0, 0, tzinfo=zoneinfo.ZoneInfo(key='Europe": BERLIN,
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_plain_is_refused_with_its_place_and_type(text):
    with pytest.raises(TypeError) as caught:
        encode(REFUSED[text], caller="Processes")
    start = "Processes can send back arrays and plain values (numbers, text, bytes, lists, dicts, paths). Got "
    assert str(caught.value).startswith(start + text)
    assert str(caught.value).endswith(". Turn it into one of these.")


def test_a_dtype_of_another_package_is_refused_rather_than_changed():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.int4):
        for value in (np.zeros(2, kind), kind(1)):
            with pytest.raises(TypeError, match="can send back arrays and plain values"):
                encode(value)


def test_a_value_used_twice_is_no_cycle():
    twice = [1]
    assert decode(encode([twice, twice, {"a": twice}])) == [[1], [1], {"a": [1]}]


def mutated(data, rng):
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        where = rng.randrange(len(damaged) or 1)
        match rng.randrange(5):
            case 0:
                damaged[where : where + 1] = bytes([rng.randrange(256)])
            case 1:
                del damaged[where : where + rng.randint(1, 9)]
            case 2:
                damaged[where:where] = rng.choice([b"l", b"d", b"a", b"g", b"t", b"I", b"P"]) + rng.randbytes(8)
            case 3:
                damaged[where : where + 8] = struct.pack("<Q", rng.choice([0, 1, 1 << 40, (1 << 64) - 1]))
            case 4:
                damaged[where:where] = damaged[where : where + rng.randint(9, 60)]
    return bytes(damaged)


def test_damaged_bytes_are_a_value_error_or_plain_values_and_take_little_memory():
    rng = random.Random(7)
    text = np.array(["ab", "c"])
    value = {"a": [1, 2.5, "text", b"raw", None], (1, 2): {"b": np.arange(3), "c": text}, "d": [np.float32(1)]}
    value |= {"p": pathlib.Path("x"), "t": datetime.datetime(2020, 1, 1), "s": {1, 2}, "z": [[[[()]]]]}
    whole, refused = encode(value), 0
    tracemalloc.start()
    for _ in range(2000):
        try:
            encode(decode(mutated(whole, rng)))
        except ValueError:
            refused += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 1000 < refused
    assert peak < 200 * len(whole)


def nested(depth):
    return (b"l" + struct.pack("<Q", 1)) * depth + b"l" + struct.pack("<Q", 0)


def node(tag, length, payload=b""):
    return tag + struct.pack("<Q", length) + payload


HUGE = 1 << 40
HOSTILE = {
    "nothing": b"",
    "an unknown tag": node(b"?", 0),
    "a text that is too long": node(b"S", HUGE),
    "a list that is too long": node(b"l", HUGE),
    "a dict that is too long": node(b"d", (1 << 64) - 1),
    "a great depth": nested(100_000),
    "more after the end": encode(1) + b"x",
    "an unhashable key": node(b"d", 1) + encode([]) + encode(1),
    "objects": node(b"a", 0) + encode(("|O8", (1,), bytes(8))),
    "objects in fields": node(b"a", 0) + encode(((["a"], ["|O"], [0], 8), (1,), bytes(8))),
    "a huge array": node(b"a", 0) + encode(("<f8", (HUGE,), bytes(8))),
    "a huge text as a shape": node(b"a", 0) + encode(("<f8", (HUGE, "a"), bytes(8))),
    "a number as contents": node(b"a", 0) + encode(("<f8", (HUGE,), 8 * HUGE)),
    "negative sizes": node(b"a", 0) + encode(("<f8", (-1, -1), bytes(8))),
    "code for a dtype": node(b"a", 0) + encode(("__import__('os')", (), b"")),
    "an array of no parts": node(b"a", 0) + encode(3),
    "month 13": node(b"D", 10, b"2020-13-01"),
    "a short float": node(b"F", 4, b"1234"),
    "no UTF-8": node(b"S", 1, b"\xff"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_a_value_error(name):
    with pytest.raises(ValueError, match="decode needs bytes that encode made"):
        decode(HOSTILE[name])


def test_the_depth_that_can_be_written_can_be_read():
    assert decode(nested(99)) == decode(encode(decode(nested(99))))
    with pytest.raises(ValueError, match="nested too deeply"):
        decode(nested(100))
