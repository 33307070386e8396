"""`ms.inspect.show`: what is shown of a batch is what the run has, and words in the data cannot write the page."""

import base64
import dataclasses
import html.parser
import io
import re
from typing import Any

import browser
import jax
import jax.numpy as jnp
import numpy as np
import pipelines
import pytest
import test_views
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import millstream as ms
from millstream.inspect._cells import ImageCell, Lines, Words
from millstream.text.png import encode_png

pytestmark = pytest.mark.optimized

KEY = jax.random.key(3)
HOSTILE = '<script>alert("x")</script>&\'"<img src=x onerror=alert(1)>'


def show(*args: Any, **options: Any) -> Any:
    return ms.inspect.show(*args, **options)


def pictures(batch, name="image"):
    return np.stack([row.cells[name].pixels for row in batch.rows])


def words(batch, name):
    return [row.cells[name].text for row in batch.rows]


def batch_at(loader, key, step):
    value, _, mask = loader.next_batch(loader.init_state(key, step=step))
    return jax.tree.map(np.asarray, value), np.asarray(mask)


def images(n=20, shape=(8, 8, 1), seed=0):
    rng = np.random.default_rng(seed)
    return {"image": rng.integers(0, 256, (n, *shape), np.uint8), "label": (np.arange(n) % 3).astype(np.int32)}


def noisy(value, mask, key):
    return {**value, "image": value["image"].astype(jnp.float32) + jax.random.normal(key, value["image"].shape)}


@pytest.mark.parametrize("executor", [None, ms.Threads(2), ms.Processes(2)], ids=["in graph", "threads", "processes"])
def test_the_batch_of_a_step_is_shown_as_it_is_on_every_executor(executor):
    loader = ms.DataLoader([ms.ArraySampleSource(images(20)), ms.BatchTransform(8)], executor=executor)
    with loader:
        shown = show(loader, KEY, step=4)
    value, _ = batch_at(ms.DataLoader([ms.ArraySampleSource(images(20)), ms.BatchTransform(8)]), KEY, 4)
    assert np.array_equal(pictures(shown), value["image"][..., 0])
    assert words(shown, "label") == [str(label) for label in value["label"]]
    source = images(20)["image"]
    assert all(np.array_equal(source[row.index][..., 0], row.cells["image"].pixels) for row in shown.rows)
    assert shown.title == "step 4, epoch 1, batch 2 of 3" and shown.notes == ("8 rows",)


def test_any_state_of_a_run_can_be_shown():
    loader = ms.DataLoader([ms.ArraySampleSource(images(20)), ms.BatchTransform(8)])
    _, state, _ = loader.next_batch(loader.init_state(KEY, step=6))
    shown, same = show(loader, state=state), show(loader, KEY, 7)
    assert shown.title == same.title and [row.index for row in shown.rows] == [row.index for row in same.rows]


def test_a_step_of_a_saved_run_can_be_shown(tmp_path):
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(12)}), ms.BatchTransform(4)])
    tasks = {ms.every(1): lambda state: state + 1, ms.every(5): ms.checkpoint(tmp_path / "run")}
    ms.loop(jnp.int32(0), loader, tasks, stop=5, key=KEY, skip=[(1, 3)])
    shown, replayed = show(loader, run=tmp_path / "run", step=2), ms.replay(tmp_path / "run", loader, 2)
    assert words(shown, "x") == [str(x) for x in np.asarray(replayed.batch["x"])]
    assert shown.title.startswith("step 3,")


def test_at_most_n_rows_are_shown_and_it_says_so():
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(64)}), ms.BatchTransform(32)])
    assert len(show(loader).rows) == 16
    shown = show(loader, n=3)
    assert len(shown.rows) == 3 and shown.notes[0] == "32 rows, of which the first 3 are shown"


# Images


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_images_of_any_range_are_stretched_as_the_note_says(seed):
    rng = np.random.default_rng(seed)
    scale, offset = 10.0 ** rng.integers(-3, 4), rng.normal()
    values = (scale * (rng.random((4, 8, 8, 3)) + offset)).astype(np.float32)
    shown = show(ms.DataLoader([ms.ArraySampleSource({"image": values}), ms.BatchTransform(4)]), KEY)
    given = values[[row.index for row in shown.rows]].astype(np.float64)
    low, high = given.min(), given.max()
    if 0 <= low and 0.25 <= high <= 1:
        expected = np.rint(255 * given)
        assert len(shown.notes) == 1
    else:
        expected = np.rint((given - low) * (255 / (high - low)))
        assert shown.notes[1] == f"image: {low:.3g} to {high:.3g} in this batch, shown from black to white"
    assert np.array_equal(pictures(shown), expected)


@pytest.mark.parametrize(
    ("shape", "dtype", "shown_shape"),
    [
        ((8, 8), np.uint8, (8, 8)),
        ((8, 6, 1), np.uint8, (8, 6)),
        ((8, 6, 3), np.float32, (8, 6, 3)),
        ((8, 6, 4), np.uint8, (8, 6, 4)),
        ((3, 8, 6), np.float32, (8, 6, 3)),
        ((1, 8, 6), np.uint8, (8, 6)),
        ((8, 8, 3), jnp.bfloat16, (8, 8, 3)),
        ((8, 8, 1), np.bool_, (8, 8)),
        ((16, 16), np.float32, (16, 16)),
    ],
)
def test_images_are_told_by_shape_and_dtype(shape, dtype, shown_shape):
    values = np.random.default_rng(0).integers(0, 255, (4, *shape)).astype(dtype)
    loader = ms.DataLoader([ms.ArraySampleSource({"x": jnp.asarray(values)}), ms.BatchTransform(4)])
    assert pictures(show(loader), "x").shape[1:] == shown_shape


@pytest.mark.parametrize(
    ("shape", "dtype"), [((5,), np.float32), ((3, 2), np.int32), ((20, 2), np.float32), ((8, 8), np.int32)]
)
def test_other_arrays_are_not_images_unless_they_are_named(shape, dtype):
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.ones((4, *shape), dtype)}), ms.BatchTransform(4)])
    assert not any(isinstance(row.cells["x"], ImageCell) for row in show(loader).rows)
    named = show(loader, images=["x"])
    assert all(isinstance(row.cells["x"], ImageCell) == (len(shape) == 2) for row in named.rows)


def test_huge_images_become_thumbnails_and_numbers_that_are_not_finite_are_marked():
    huge = np.zeros((2, 1000, 500, 3), np.float32)
    huge[:, :500] = 1.0
    huge[0, 0, 0] = np.nan
    loader = ms.DataLoader([ms.ArraySampleSource({"x": huge}, ordering="sequential"), ms.BatchTransform(2)])
    first, second = pictures(show(loader), "x")
    assert first.shape == (166, 83, 3)
    assert first[0, 0].tolist() == [255, 0, 80]
    assert (second[:80] == 255).all() and (second[90:] == 0).all()


def test_padding_does_not_change_how_the_others_are_shown():
    source = ms.ArraySampleSource({"image": np.full((3, 8, 8, 1), 7.0, np.float32) + np.eye(8)[..., None]})
    loader = ms.DataLoader([source, ms.BatchTransform(4)])
    shown = show(loader, KEY)
    assert shown.notes[1] == "image: 7 to 8 in this batch, shown from black to white"
    assert np.array_equal(pictures(shown)[0], 255 * np.eye(8))


@given(seed=st.integers(0, 2**32 - 1), channels=st.sampled_from([None, 3, 4]))
@settings(max_examples=30, deadline=None)
def test_a_png_is_what_pillow_reads(seed, channels):
    rng = np.random.default_rng(seed)
    shape = (*rng.integers(1, 40, 2), *([] if channels is None else [channels]))
    pixels = rng.integers(0, 256, shape, np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encode_png(pixels)))), pixels)


# Before and after


def test_samples_are_shown_before_and_after_random_stages():
    data = images(20)
    loader = ms.DataLoader([ms.ArraySampleSource(data), ms.RandomMapTransform(noisy), ms.BatchTransform(8)])
    shown = show(loader, KEY, step=2)
    value, _ = batch_at(loader, KEY, 2)
    assert shown.names == ("image before", "image", "label")
    for number, row in enumerate(shown.rows):
        if row.index is None:
            assert row.note == "padding" and "image before" not in row.cells
            continue
        assert np.array_equal(row.cells["image before"].pixels, data["image"][row.index][..., 0])
        own = value["image"][number][..., 0]
        low, high = value["image"][:4].min(), value["image"][:4].max()  # 20 samples in batches of 8: 4 are left
        assert np.array_equal(
            row.cells["image"].pixels, np.rint((own - np.float64(low)) * (255 / (np.float64(high) - low)))
        )
    assert "image before" not in show(loader, KEY, step=2, before=False).names


def test_functions_on_the_host_before_the_random_one_are_part_of_before():
    source = ms.DatasetSource([{"x": np.float32(n)} for n in range(6)]).map(lambda sample: {"x": sample["x"] * 10})
    stages = [source, ms.RandomHostMapTransform(lambda sample, rng: {"x": sample["x"] + rng.random(dtype=np.float32)})]
    shown = show(ms.DataLoader([*stages, ms.BatchTransform(4)]), KEY)
    for row in shown.rows:
        assert float(row.cells["x before"].text) == 10 * row.index
        assert 0 <= float(row.cells["x"].text) - 10 * row.index <= 1


def test_without_random_stages_before_is_shown_if_it_is_asked_for():
    stages = [
        ms.ArraySampleSource({"x": np.arange(6)}).map(lambda sample: {"x": sample["x"] * 10}),
        ms.BatchTransform(4),
    ]
    loader = ms.DataLoader(stages)
    assert show(loader, KEY).names == ("x",)
    shown = show(loader, KEY, before=True)
    assert [row.cells["x before"].text for row in shown.rows] == [str(row.index) for row in shown.rows]


def test_images_of_pillow_are_shown_before_they_become_arrays():
    items = [{"image": Image.fromarray(np.full((5, 4, 3), 20 * n, np.uint8))} for n in range(4)]
    resize = ms.HostMapTransform(lambda sample: {"image": np.asarray(sample["image"].resize((8, 8)))})
    shown = show(ms.DataLoader([ms.DatasetSource(items), resize, ms.BatchTransform(4)]), KEY, before=True)
    assert {row.cells["image before"].pixels.shape for row in shown.rows} == {(5, 4, 3)}
    assert {row.cells["image"].pixels.shape for row in shown.rows} == {(8, 8, 3)}


# Masks


@dataclasses.dataclass(frozen=True)
class WithoutOne(ms.Transform):
    def apply(self, value, mask, key):
        return value, mask & (value["x"] != 1.0)


def test_rows_that_do_not_count_are_marked_with_the_reason():
    def read(index):
        if index == 2:
            raise ValueError("broken")
        return {"x": np.float32(index)}

    source = ms.DiskSampleSource(6, read, ordering="sequential")
    loader = ms.DataLoader([source, ms.BatchTransform(8), WithoutOne()], on_error="skip item")
    shown = show(loader, KEY)
    assert [row.real for row in shown.rows] == [True, False, False, True, True, True, False, False]
    notes = [row.note for row in shown.rows]
    assert notes[1] == "masked" and notes[6:] == ["padding", "padding"]
    assert notes[2] == "could not be read: ValueError('broken') (ValueError)"
    assert shown.notes[0] == "8 rows; 4 do not count, shown in gray"
    page = shown._repr_html_()
    assert page.count("opacity: 0.35") == 4


# Text


def tokens(seed=0):
    tokenizer = ms.tokenizers.byte_tokenizer()
    rng = np.random.default_rng(seed)
    texts = ["".join(rng.choice(list("abc "), rng.integers(3, 20))) for _ in range(40)]
    source = ms.DatasetSource([{"tokens": tokenizer(text)} for text in texts])
    return tokenizer, texts, ms.DataLoader([ms.views.pack(source, 64, eos=tokenizer.eos), ms.BatchTransform(4)])


def test_packed_rows_are_shown_as_their_documents():
    tokenizer, texts, loader = tokens()
    seen = []
    for step in range(loader.steps_per_epoch):
        shown = show(loader, KEY, step, tokenizer=tokenizer)
        assert {"segments", "positions"}.isdisjoint(shown.names)
        for row in shown.rows:
            numbers = [segment for _, segment in row.cells["tokens"].pieces if segment]
            assert numbers == list(range(1, len(numbers) + 1))
            seen += [text for text, segment in row.cells["tokens"].pieces if segment]
    assert sorted(seen) == sorted(texts)


def test_tokens_are_numbers_without_a_tokenizer():
    _, _, loader = tokens()
    shown = show(loader, KEY)
    value, _ = batch_at(loader, KEY, 0)
    for number, row in enumerate(shown.rows):
        pieces = [text for text, segment in row.cells["tokens"].pieces if segment]
        real = value["tokens"][number][value["segments"][number] > 0]
        assert " ".join(pieces).split() == [str(token) for token in real]
        padding = 64 - len(real)
        assert (f"{padding} padding" in row.cells["tokens"].text) == (padding > 0)


def test_padding_of_ragged_tokens_is_told_by_their_mask():
    source = ms.DatasetSource([{"ids": np.arange(1, n + 1, dtype=np.int32)} for n in (2, 9, 5)], ordering="sequential")
    shown = show(ms.DataLoader([source, ms.PadTransform({"ids": 0}, 12), ms.BatchTransform(3)]))
    assert shown.names == ("ids",)
    assert words(shown, "ids") == ["1 2 | 10 padding", "1 2 3 4 5 6 7 8 9 | 3 padding", "1 2 3 4 5 | 7 padding"]


def test_of_long_rows_the_first_tokens_are_shown():
    lengths = (300, 100)
    source = ms.DatasetSource([{"ids": np.arange(n, dtype=np.int32)} for n in lengths], ordering="sequential")
    shown = show(ms.DataLoader([source, ms.PadTransform({"ids": 0}, 400), ms.BatchTransform(2)]))
    long, short = (row.cells["ids"] for row in shown.rows)
    assert long.pieces[0][0].split() == [str(n) for n in range(256)] and long.more == "... 44 more tokens"
    assert short.more == "" and short.pieces[1] == ("300 padding", 0)


def test_ids_that_a_tokenizer_does_not_have_are_numbers():
    source = ms.ArraySampleSource({"tokens": np.array([[104, 105, -100]] * 2)})
    shown = show(ms.DataLoader([source, ms.BatchTransform(2)]), tokenizer=ms.tokenizers.byte_tokenizer())
    assert words(shown, "tokens") == ["104 105 -100"] * 2


# Labels, curves and the rest


def test_labels_have_names():
    data = {"label": np.array([0, 1, 5]), "count": np.array([1, 1, 1]), "soft": np.eye(2, dtype=np.float32)[[0, 1, 1]]}
    data["soft"][2] = [0.25, 0.75]
    loader = ms.DataLoader([ms.ArraySampleSource(data, ordering="sequential"), ms.BatchTransform(3)])
    for labels in (["cat", "dog"], {0: "cat", 1: "dog"}):
        shown = show(loader, labels=labels)
        assert words(shown, "label") == ["cat (0)", "dog (1)", "5"]
        assert words(shown, "count") == ["1", "1", "1"]
        assert words(shown, "soft") == ["cat", "dog", "dog 0.75, cat 0.25"]


def test_long_vectors_are_curves_and_short_ones_numbers():
    rng = np.random.default_rng(0)
    data = {"series": rng.normal(size=(4, 500, 2)), "wave": rng.normal(size=(4, 20)), "box": np.arange(8).reshape(4, 2)}
    loader = ms.DataLoader([ms.ArraySampleSource(data, ordering="sequential"), ms.BatchTransform(4)])
    shown = show(loader)
    series, wave = shown.rows[1].cells["series"], shown.rows[1].cells["wave"]
    assert isinstance(series, Lines) and series.values.shape == (2, 125)
    assert np.array_equal(wave.values[0], data["wave"][1].astype(np.float32))
    assert wave.low == data["wave"].astype(np.float32).min() and wave.high == data["wave"].astype(np.float32).max()
    assert words(shown, "box") == ["0, 1", "2, 3", "4, 5", "6, 7"]
    assert shown._repr_html_().count("<polyline") == 4 * 3


def test_samples_that_are_objects_are_shown_as_they_are():
    items = [{"text": "oat\nand <b>rye</b>", "n": None}, {"text": "barley", "n": 3}, {"text": "x" * 3000, "n": 4}]
    loader = ms.DataLoader([ms.DatasetSource(items, ordering="sequential"), ms.BatchTransform(4)])
    shown = show(loader)
    assert [row.cells["text"].text for row in shown.rows[:2]] == ["oat and <b>rye</b>", "barley"]
    assert shown.rows[3].cells == {} and shown.rows[3].note == "padding"
    assert shown.rows[2].cells["text"].more == "... 1,800 more characters"
    assert [row.cells["n"].text for row in shown.rows[:3]] == ["none", "3", "4"]


# Loaders of all kinds


def test_a_mixture_names_the_source_of_each_row():
    parts = {"a": ms.ArraySampleSource({"x": np.arange(6)}), "b": ms.ArraySampleSource({"x": 100 + np.arange(6)})}
    loader = ms.DataLoader([ms.views.mix(parts, {"a": 1, "b": 1}), ms.BatchTransform(8)])
    shown = show(loader, KEY)
    assert {row.source for row in shown.rows} == {"a", "b"}
    assert all((int(row.cells["x"].text) >= 100) == (row.source == "b") for row in shown.rows)
    assert "source" in str(shown) and "<th" in shown._repr_html_()


def test_a_mixed_loader_names_the_loader():
    loaders = {
        name: ms.DataLoader(
            [ms.ArraySampleSource({name: np.arange(4.0)}), ms.RandomMapTransform(shift), ms.BatchTransform(2)]
        )
        for name in ("small", "large")
    }
    mixed = ms.loader.MixedLoader(loaders)
    for step in range(4):
        shown = show(mixed, KEY, step)
        group = "small" if "small" in shown.names else "large"
        assert shown.title.endswith(f"from {group!r}") and shown.names == (f"{group} before", group)
        assert [row.cells[f"{group} before"].text for row in shown.rows] == [str(row.index) for row in shown.rows]


def shift(value, mask, key):
    return jax.tree.map(lambda x: x + jax.random.uniform(key), value)


def test_buckets_phases_and_streams_are_shown():
    ragged = ms.DatasetSource([{"ids": np.arange(n, dtype=np.int32)} for n in (1, 7, 2, 8, 3, 1)])
    view = ms.views.buckets(ragged, "ids", (4, 8), batch_size=2)
    buckets = ms.DataLoader([view, ms.PadTransform({"ids": 0})])
    lengths = {len(row.cells["ids"].text.split()) > 0 for step in range(3) for row in show(buckets, KEY, step).rows}
    assert lengths == {True}
    phased = ms.DataLoader(
        [ms.ArraySampleSource({"x": np.arange(32.0)}), ms.RandomMapTransform(shift), ms.BatchTransform({0: 2, 3: 4})]
    )
    assert [len(show(phased, KEY, step).rows) for step in (2, 3)] == [2, 4]
    stream = ms.DataLoader(
        [ms.sources.IterableSource(lambda: ({"x": np.float32(n)} for n in range(5))), ms.BatchTransform(2)]
    )
    shown = show(stream, step=1)
    assert words(shown, "x") == ["2", "3"] and shown.title == "step 1" and shown.rows[0].index is None
    assert words(show(stream, step=3), "x") == ["0", "1"]  # of the second pass


SHOWN = [
    "samples",
    "windows",
    "host, packed",
    "host padding",
    "host, fields beside",
    "time series",
    "stream of batches",
]


@pytest.mark.parametrize("name", SHOWN)
def test_pipelines_of_all_kinds_are_shown(name, tmp_path):
    loader = ms.DataLoader(pipelines.PIPELINES[name]())
    shown = show(loader, KEY)
    batch, mask = next(loader.iterate(loader.init_state(KEY)))
    assert len(shown.rows) == mask.size and [row.real for row in shown.rows] == np.asarray(mask).reshape(-1).tolist()
    assert set(batch) - {"positions", "segments", "ids_mask", "ids_positions"} <= {
        *shown.names,
        *(note.split(",")[0] for note in shown.notes),
    }
    assert Page(shown._repr_html_()).elements and len(str(shown).splitlines()) > mask.size
    shown.save(tmp_path / "batch.png")


@pytest.mark.parametrize("view", test_views.VIEWS)
def test_every_view_is_shown_with_the_indices_of_its_source(view):
    source = test_views.VIEWS[view](test_views.dataset())
    shown = show(ms.DataLoader([source, ms.BatchTransform(8)]), KEY, step=1, before=True)
    assert shown.names == ("x", "y") if "packed" not in view else ("x" in shown.names)
    if "packed" not in view and not any(row.source for row in shown.rows):
        assert all(int(row.cells["x"].text) == row.index for row in shown.rows if row.real)
    assert ms.inspect.statistics(source)["x"].present == len(source)


def test_batches_of_batches_and_over_a_mesh_are_shown():
    source = ms.ArraySampleSource({"x": np.arange(8)}, ordering="sequential")
    nested = show(ms.DataLoader([source, ms.BatchTransform(2), ms.BatchTransform(3)]), KEY)
    assert [row.note for row in nested.rows] == [""] * 6 and words(nested, "x") == ["0", "1", "2", "3", "4", "5"]
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shown = show(ms.DataLoader([source, ms.BatchTransform(8)], sharding=mesh), KEY)
    assert words(shown, "x") == [str(n) for n in range(8)]


def test_what_belongs_to_the_whole_batch_is_a_note():
    stages = [ms.ArraySampleSource({"x": np.arange(4.0)}), ms.BatchTransform(4)]
    total = ms.MapTransform(lambda value, mask: {**value, "total": value["x"].sum()})
    shown = show(ms.DataLoader([*stages, total]), KEY)
    assert shown.notes[-1].startswith("total, of the whole batch:") and shown.names == ("x",)


# Pages, files and terminals


class Page(html.parser.HTMLParser):
    """The elements of a page, and its texts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_data(self, data):
        self.words.append(data)


def hostile():
    items = [{HOSTILE: HOSTILE, "image": np.full((8, 8, 3), 20 * n + 60, np.uint8)} for n in range(4)]
    return ms.DataLoader([ms.DatasetSource(items), ms.BatchTransform(4)])


def test_words_of_others_are_escaped_everywhere():
    shown = show(hostile(), KEY)
    page = Page(shown._repr_html_())
    assert {tag for tag, _ in page.elements} == {"div", "span", "img"}
    assert all(
        attributes["src"].startswith("data:image/png;base64,") for tag, attributes in page.elements if tag == "img"
    )
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert page.words.count(HOSTILE) == 8  # names and values
    table = ms.DataLoader([ms.DatasetSource([{HOSTILE: HOSTILE}] * 2), ms.BatchTransform(2)])
    assert {tag for tag, _ in Page(show(table)._repr_html_()).elements} == {
        "div",
        "span",
        "table",
        "tr",
        "th",
        "td",
    }


def test_words_of_others_cannot_drive_a_terminal():
    items = [{"\x1b[2Jname": "\x1b]0;title\x07\x9b31m red"}] * 2
    text = str(show(ms.DataLoader([ms.DatasetSource(items), ms.BatchTransform(2)])))
    assert all(letter.isprintable() for letter in text.replace("\n", "")) and "red" in text


def test_images_in_a_page_are_the_pixels():
    loader = ms.DataLoader([ms.ArraySampleSource(images(4)), ms.BatchTransform(4)])
    shown = show(loader, KEY)
    found = re.findall(r"data:image/png;base64,([^\"]+)", shown._repr_html_())
    decoded = [np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for data in found]
    assert np.array_equal(np.stack(decoded), pictures(shown))


@pytest.mark.skipif(browser.CHROMIUM is None or browser.DRIVER is None, reason=browser.MISSING)
def test_a_saved_page_stands_alone_in_a_browser(tmp_path):
    page_file = tmp_path / "batch.html"
    show(hostile(), KEY).save(page_file)
    with browser.browser() as window:
        for scheme in ("light", "dark"):
            window.scheme(scheme)
            window.size(500, 900)
            window.open(page_file)
            assert window.run("return [...document.images].map(i => i.complete && i.naturalWidth)") == [8] * 4
            assert window.run("return [...document.images].map(i => i.width)") == [96] * 4
            assert window.run("return document.documentElement.scrollWidth") <= 500
            assert window.run("return document.scripts.length") == 0
            ink, page = (
                window.run(f"return getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")
            )
            light = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in (ink, page)]
            assert (light[0] < 200 and light[1] > 600) if scheme == "light" else (light[0] > 600 and light[1] < 200)
            assert window.messages() == []
            assert [url for url in window.requests() if not url.startswith("data:")] == [page_file.as_uri()]


def test_a_png_has_all_rows(tmp_path):
    loader = ms.DataLoader([ms.ArraySampleSource(images(20)), ms.RandomMapTransform(noisy), ms.BatchTransform(8)])
    show(loader, KEY, step=2).save(tmp_path / "batch.png")
    drawn = np.asarray(Image.open(tmp_path / "batch.png"))
    assert drawn.ndim == 3 and drawn.shape[1] <= 1100
    source = images(20)["image"]
    shown = show(loader, KEY, step=2)
    large = source[shown.rows[0].index].repeat(12, 0).repeat(12, 1)
    windows = np.lib.stride_tricks.sliding_window_view(drawn[..., 0], (96, 96))[:, 24]
    assert (windows == large[..., 0]).all(axis=(1, 2)).any(), "the first image is in the first column"
    for case in (tokens()[2], hostile()):
        show(case, KEY).save(tmp_path / "other.png")
        assert np.asarray(Image.open(tmp_path / "other.png")).size


def test_a_png_without_pillow_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(4)}), ms.BatchTransform(4)])
    with pytest.raises(ImportError, match=r"save needs Pillow. Run: pip install 'pillow"):
        show(loader).save(tmp_path / "batch.png")
    show(loader).save(tmp_path / "batch.html")


def test_a_terminal_with_colors_shows_images(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown = show(ms.DataLoader([ms.ArraySampleSource(images(4)), ms.BatchTransform(4)]), KEY)
    assert "\x1b" not in repr(shown)
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    first = shown.rows[0].cells["image"].pixels
    assert "\x1b[38;2;{0};{0};{0};48;2;{1};{1};{1}m▀".format(first[0, 0], first[1, 0]) in repr(shown)
    assert repr(shown).endswith(str(shown))
    monkeypatch.setenv("NO_COLOR", "1")
    assert repr(shown) == str(shown)


def test_the_text_is_a_table():
    data = {"x": np.arange(3), "wave": np.tile(np.linspace(0, 1, 8, dtype=np.float32), (3, 1))}
    loader = ms.DataLoader([ms.ArraySampleSource(data, ordering="sequential"), ms.BatchTransform(4)])
    assert str(show(loader, n=4)).splitlines() == [
        "step 0, epoch 0, batch 1 of 1",
        "4 rows; 1 does not count, shown in gray",
        "",
        "row  index  wave                    x  note",
        "──────────────────────────────────────────────",
        "  0      0  ▁▂▃▄▅▆▇█ f32[8] 0 to 1  0",
        "  1      1  ▁▂▃▄▅▆▇█ f32[8] 0 to 1  1",
        "  2      2  ▁▂▃▄▅▆▇█ f32[8] 0 to 1  2",
        "  3         ▁▁▁▁▁▁▁▁ f32[8] 0 to 0  0  padding",
    ]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"n": 0}, "show needs n to be an int of at least 1. Got 0"),
        ({"step": -1}, "show needs step to be an int from 0"),
        (
            {"step": 0, "run": "x"},
            "show with run= needs a step as the history of the run has it, from 1 on. Got step=0",
        ),
        ({"before": 1}, "show needs before to be a bool"),
        ({"labels": "cat"}, r"show needs labels to be a list of names, or a dict of names by number"),
        ({"labels": {"cat": 0}}, r"show needs labels to be a list of names, or a dict of names by number"),
        (
            {"tokenizer": len},
            r"show needs tokenizer to be an ms.tokenizers.Tokenizer. Got .*Write ms.tokenizers.Tokenizer",
        ),
        ({"images": "x"}, r"show needs images to be a list of names. Got 'x' \(str\); write \['x'\]"),
        ({"key": KEY, "run": "x", "step": 1}, "show takes one of key, state and run"),
        ({"state": 1}, r"show needs state to be one of loader.init_state\(key\). Got 1"),
        ({"key": 1}, r"show needs a key such as jax.random.key\(0\). Got 1"),
        ({"run": 1}, "show needs run to be the path of a saved run. Got 1"),
        ({"state": 1, "step": 1}, "show takes the step of the state, or step=1 with a key"),
    ],
)
def test_wrong_arguments_are_refused_by_name(options, error):
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(4)}), ms.BatchTransform(4)])
    with pytest.raises((TypeError, ValueError), match=error):
        show(loader, **options)


def test_other_things_are_not_shown_or_saved(tmp_path):
    with pytest.raises(TypeError, match=r"show needs loader to be a DataLoader or a MixedLoader. Got 3"):
        show(3)
    shown = show(ms.DataLoader([ms.ArraySampleSource({"x": np.arange(4)}), ms.BatchTransform(4)]))
    with pytest.raises(ValueError, match=r'save writes files that end in ".html" or ".png". Got .*batch.jpg'):
        shown.save(tmp_path / "batch.jpg")
    assert not list(tmp_path.iterdir())
    assert isinstance(shown.rows[0].cells["x"], Words)
