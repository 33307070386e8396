"""Pictures of loaders: explain as a drawing, orders, mixtures, lengths. What they show, and that texts fit."""

import functools
import io
import re
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import browser
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import PIPELINES
from test_html import parsed

import millstream as ms
from millstream.text.svg import COLORS, Svg, fitted_text, text_width, wrapped_text
from millstream.text.ticks import ticks

KEY = jax.random.key(0)
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert('&')</script>\x00\N{GRINNING FACE}\N{CJK UNIFIED IDEOGRAPH-4E00}"
LONG = "a_field_with_a_name_that_is_much_longer_than_any_box_of_a_drawing_should_have_to_be_wide_" * 2


def loader_of(length=1000, batch=50, ordering: Any = "shuffle"):
    return ms.DataLoader([ms.ArraySampleSource({"x": np.arange(length)}, ordering), ms.BatchTransform(batch)])


def mixed_loader(weights=None, batch=100, **options):
    sources = {"web": 900, "code": 100, "books": 300}
    each = {name: ms.ArraySampleSource({"x": np.full(count, count)}) for name, count in sources.items()}
    view = ms.views.mix(each, weights or {"web": 3, "code": 1, "books": 2}, **options)
    return ms.DataLoader([view, ms.BatchTransform(batch)])


def documents(lengths):
    return ms.DatasetSource([{"ids": np.zeros(length, np.int32)} for length in lengths])


def two_loaders():
    small, large = (loader_of(length, 2) for length in (4, 8))
    return ms.loader.TrainStream(large, validation=ms.loader.MixedLoader({"small": small, "large": large}))


def hostile():
    data = {HOSTILE: np.zeros(8), LONG: np.zeros((8, 3)), **{f"leaf {number}": np.zeros(8) for number in range(12)}}
    return ms.DataLoader([ms.HostArraySource(data), ms.BatchTransform(4)])


def many_sources():
    sources = {f"source number {number} {LONG}": ms.ArraySampleSource({"x": np.arange(9)}) for number in range(12)}
    view = ms.views.mix(sources, dict.fromkeys(sources, 1))
    return ms.DataLoader([view, ms.BatchTransform(16)])


def in_buckets():
    view = ms.views.buckets(documents((1, 7, 2, 8, 3, 1)), "ids", (4, 8), batch_size=2)
    return ms.DataLoader([view, ms.PadTransform({"ids": 0})])


EXPLAINED = {
    **{name: lambda make=make: ms.DataLoader(make()).explain() for name, make in PIPELINES.items()},
    "buckets": lambda: in_buckets().explain(),
    "mixture": lambda: mixed_loader().explain(),
    "many sources": lambda: many_sources().explain(),
    "hostile names": lambda: hostile().explain(),
    "several loaders": lambda: two_loaders().explain(),
    "processes": lambda: loader_of().replace(executor=ms.Processes(2)).explain(),
}
OTHERS = {
    "order": lambda: ms.inspect.order(loader_of(), epochs=4),
    "order of hosts": lambda: ms.inspect.order(loader_of(3000), epochs=1, hosts=4),
    "mixture's plan": lambda: ms.inspect.mixture(mixed_loader()),
    "many sources' plan": lambda: ms.inspect.mixture(many_sources()),
    "lengths": lambda: ms.inspect.lengths(documents(range(1, 200)), "ids", buckets=5, pack=64),
    "lengths in buckets": lambda: ms.inspect.lengths(in_buckets(), "ids"),
    "packed": lambda: ms.inspect.lengths(ms.views.pack(documents(range(1, 60)), 64)),
}


@functools.cache
def made(name):
    """A picture, which is made once for all tests: streams are compiled to be explained."""
    return (EXPLAINED | OTHERS)[name]()


def elements(picture):
    """The elements of a picture's SVG, which has to be XML."""
    return list(ElementTree.fromstring(picture.to_svg()).iter())


def texts(picture):
    return [element.text or "" for element in elements(picture) if element.tag == f"{SVG}text"]


def boxes(picture, name):
    return [element for element in elements(picture) if element.get("class") == name]


def test_a_drawing_says_where_stages_run_and_how_many_bytes_flow():
    def read(index):
        return {"x": np.float32(index)}

    def double(batch, mask):
        return {"x": batch["x"] * 2}

    stages = [ms.DiskSampleSource(10, read), ms.BatchTransform(4), ms.MapTransform(double)]
    explanation = ms.DataLoader(stages, executor=ms.Threads(3)).explain()
    frames, shown = boxes(explanation, "frame"), texts(explanation)
    assert [frame.get("fill") for frame in frames] == [COLORS[1], COLORS[0]]
    assert shown.index("host: 3 threads") < shown.index("device", 3)  # the first one is in the legend
    assert shown.count("16 B per batch") == 3
    assert explanation.to_text(width=60).splitlines()[-17:] == [
        "   │ which samples come when",
        "┌──▼─ DiskSampleSource(read) ────────────────── 3 threads ─┐",
        "│ x () float32                                             │",
        "└──┬───────────────────────────────────────────────────────┘",
        "   │ 16 B per batch",
        "┌──▼─ BatchTransform ────────────────────────── 3 threads ─┐",
        "│ x (4,) float32                                           │",
        "│ holds 20.5 kB; last batch: 2 of 4 rows real, the others  │",
        "│ padding; 5 buffers of 4.1 kB                             │",
        "└──┬───────────────────────────────────────────────────────┘",
        "   │ 16 B per batch",
        "╔══▼═ MapTransform(double) ═══════════════════════ device ═╗",
        "║ x (4,) float32                                           ║",
        "╚══╤═══════════════════════════════════════════════════════╝",
        "   │ 16 B per batch",
        "   ▼",
        "handed out on JAX's default device",
    ]


def test_sources_of_a_mixture_flow_into_one():
    explanation = mixed_loader().explain()
    assert list(explanation.sources) == ["web", "code", "books"]
    assert explanation.sources["code"] == "100 samples, 16.7 %"
    assert len(boxes(explanation, "source")) == 3
    assert "   ├◄─ code: 100 samples, 16.7 %" in str(explanation).splitlines()
    assert len(boxes(many_sources().explain(), "source")) == 8 and "and 5 more" in texts(many_sources().explain())


def test_every_part_of_several_loaders_is_drawn():
    explanation = two_loaders().explain()
    assert list(explanation.parts) == ["train", "validation"]
    assert {"train", "validation", "small", "large"} <= set(texts(explanation))
    assert explanation.whole == {"validation": explanation.plan["validation"]}


def test_a_terminal_without_box_characters_gets_ascii(monkeypatch):
    explanation = loader_of().explain()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    for picture in (explanation, ms.inspect.order(loader_of(40, 4)), ms.inspect.mixture(mixed_loader())):
        drawn = repr(picture)
        assert "\N{BOX DRAWINGS LIGHT HORIZONTAL}" not in drawn.split("order ")[0].split("source ")[0]
    assert repr(explanation).isascii() and "+==v= BatchTransform" in repr(explanation)


def test_a_drawing_is_as_narrow_as_asked_for():
    explanation = hostile().explain()
    assert max(map(len, explanation.to_text(width=40).splitlines())) == 40
    with pytest.raises(ValueError, match=r"to_text needs width to be an int from 40 to 10,000\. Got 10 \(int\)\."):
        explanation.to_text(width=10)
    assert max(map(len, loader_of().explain().table(width=80).splitlines())) <= 80


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_drawing_has_a_box_for_every_stage_and_fits_80_columns(name):
    explanation = made(name)
    shown = texts(explanation)
    assert len(boxes(explanation, "stage")) == len(explanation.rows)
    for row in explanation.rows:
        stage = row.stage.rpartition(": ")[2]
        assert any(text and stage.startswith(text.rstrip("\u2026")) for text in shown)
    assert max(map(len, str(explanation).splitlines())) <= 80
    assert name == "hostile names" or explanation.to_text(ascii_only=True).isascii()
    assert_stands_alone(explanation)


@pytest.mark.parametrize("name", OTHERS)
def test_pictures_are_the_same_every_time(name):
    assert made(name).to_svg() == OTHERS[name]().to_svg()
    assert max(map(len, str(made(name)).splitlines())) <= 80
    assert_stands_alone(made(name))


def assert_stands_alone(picture):
    root, *rest = elements(picture)
    assert root.get("role") == "img" and root.get("aria-label")
    assert [element.tag for element in rest[:2]] == [f"{SVG}title", f"{SVG}desc"] and rest[0].text and rest[1].text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|<image|<script", picture.to_svg())
    assert "prefers-color-scheme:dark" in picture.to_svg()
    assert parsed(picture).seen.count("details") == 1


def test_names_of_users_are_escaped_everywhere(tmp_path):
    explanation = hostile().explain()
    for path in (tmp_path / "a.svg", tmp_path / "a.html"):
        explanation.save(path)
        assert "<script" not in path.read_text() and "&lt;script" in path.read_text()


def test_files_are_written_by_their_ending(tmp_path):
    picture = ms.inspect.order(loader_of(40, 4))
    picture.save(tmp_path / "order.svg")
    assert (tmp_path / "order.svg").read_text() == picture.to_svg()
    picture.save(str(tmp_path / "order.html"))
    page = (tmp_path / "order.html").read_text()
    assert page.startswith("<!doctype html>") and "<svg" in page and "<table>" in page
    with pytest.raises(ValueError, match=r"save needs a path that ends with \.svg or \.html\. Got 'order\.png'\."):
        picture.save("order.png")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        picture.save(tmp_path)
    with pytest.raises(ValueError, match=r"save writes to this machine alone\. Got the address s3://bucket/o\.svg\. "):
        picture.save("s3://bucket/o.svg?secret")


@pytest.mark.skipif(browser.DRIVER is None or browser.CHROMIUM is None, reason=browser.MISSING)
def test_no_text_leaves_its_box_in_a_browser(tmp_path):
    # A text has to be inside its picture, and inside every box that it begins in.
    script = """
    const found = [];
    for (const svg of document.querySelectorAll('svg')) {
        const view = svg.viewBox.baseVal, rects = [...svg.querySelectorAll('rect')].map(rect => rect.getBBox());
        for (const text of svg.querySelectorAll('text')) {
            const box = text.getBBox(), right = box.x + box.width, below = box.y + box.height;
            const overflows = (left, top, width, height) =>
                box.x < left - 1 || right > left + width + 1 || box.y < top - 1 || below > top + height + 1;
            const begins = rects.filter(one => box.x >= one.x && box.x <= one.x + one.width
                && box.y + box.height / 2 >= one.y && box.y + box.height / 2 <= one.y + one.height);
            if (box.width && (overflows(0, 0, view.width, view.height)
                    || begins.some(one => overflows(one.x, one.y, one.width, one.height))))
                found.push([svg.parentNode.id, text.textContent]);
        }
    }
    return [document.querySelectorAll('text').length, found];
    """
    names = [*EXPLAINED, *OTHERS]
    page = "".join(f'<div id="{number}">{made(name)._repr_html_()}</div>' for number, name in enumerate(names))
    (tmp_path / "page.html").write_text(f'<!doctype html><meta charset="utf-8">{page}')
    with browser.browser() as window:
        window.open(tmp_path / "page.html")
        count, found = window.run(script)
        assert count > 20 * len(names)
        assert [(names[int(number)], text) for number, text in found] == []
        assert window.requests() == [(tmp_path / "page.html").as_uri()]
        made("mixture").save(tmp_path / "alone.svg")
        window.scheme("dark")
        window.open(tmp_path / "alone.svg")
        colors = "const of = name => getComputedStyle(document.querySelector(name)).fill;"
        assert window.run(f"{colors} return [of('text'), of('.paper')]") == ["rgb(230, 237, 243)", "rgb(13, 17, 23)"]
        assert window.messages() == []


@given(st.text(max_size=60), st.floats(20, 400), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_texts_are_cut_and_wrapped_to_what_fits(text, width, bold, mono):
    cut = fitted_text(text, width, 12, bold=bold, mono=mono)
    assert text_width(cut, 12, bold=bold, mono=mono) <= width or cut == "\u2026"
    assert cut == text or text.startswith(cut[:-1])
    lines = wrapped_text(text, width, 12, mono=mono)
    assert all(text_width(line, 12, mono=mono) <= width or len(line) == 1 for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert len(wrapped_text(text, width, 12, mono=mono, most=2)) <= 2


@given(st.floats(-1e9, 1e9), st.floats(1e-3, 1e9), st.integers(1, 8), st.booleans())
@settings(max_examples=200, deadline=None)
def test_ticks_are_few_and_inside(low, size, most, whole):
    found = ticks(low, low + size, most, whole=whole)
    assert len(found) <= most + 1
    assert all(low - 1e-6 * size - 1e-6 <= value <= low + size * (1 + 1e-6) + 1e-6 for value in found)
    assert not whole or all(value == round(value) for value in found)


def test_widths_are_those_of_a_wide_font():
    picture = Svg(100, 20, "a", "b")
    picture.text(0, 10, "x" * 100, width=50)
    assert "\u2026</text>" in picture.inline()
    assert text_width("W", 10) > text_width("i", 10) and text_width("a", 10, bold=True) > text_width("a", 10)


@given(st.integers(0, 2**32 - 1), st.sampled_from(["shuffle", "sequential", "blocks"]), st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_counts_of_an_order_are_those_of_its_batches(seed, ordering, hosts):
    blocks = ms.Shuffle("blocks", block_size=7, lanes=2, window=14)
    loader = loader_of(90, 6, blocks if ordering == "blocks" else ordering)
    key = jax.random.key(seed)
    orders = ms.inspect.order(loader, key, epochs=2, hosts=hosts)
    with loader.iterate(loader.init_state(key), steps=30, with_info=True) as batches:
        steps = [(info.step, np.asarray(info.indices)) for _, _, info in batches]
    for number, epoch in enumerate(orders.epochs):
        expected = np.zeros((hosts, 60, 60), int)
        for step, indices in steps[15 * number : 15 * number + 15]:
            for row, index in enumerate(indices.tolist()):
                host = next(h for h in range(hosts) if row in range(*ms.sharding.shard_bounds(hosts, h, 6)))
                expected[host, index * 60 // 90, int((step % 15 + (row + 0.5) / 6) / 15 * 60)] += 1
        assert (epoch.counts == expected).all() and epoch.samples == epoch.looked_at == 90
        assert epoch.points is not None
        assert epoch.points[1].tolist() == [i for _, one in steps[15 * number : 15 * number + 15] for i in one.tolist()]


def test_the_variation_of_an_order_is_what_explain_expects():
    blocks = ms.Shuffle("blocks", block_size=50, lanes=4, window=100)
    loader = loader_of(40_000, 64, blocks)
    (epoch,), (sequence, full) = (orders := ms.inspect.order(loader, epochs=1)).epochs, orders.compared
    stated = float(re.findall(r"vary ([\d.]+) times", loader.explain().plan["mixing"])[0])
    assert epoch.expected == pytest.approx(stated, abs=0.01)
    assert epoch.variation == pytest.approx(stated, rel=0.15)
    assert full.variation == pytest.approx(1, rel=0.15) and full.expected is None
    assert sequence.variation is not None and sequence.variation > 50
    compared = ms.inspect.order(loader_of(40_000, 64), epochs=1, compare=[blocks]).compared[0]
    assert (compared.name, compared.expected) == ("block shuffle", epoch.expected)


def test_views_and_buckets_and_single_samples_have_an_order():
    view = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(100)})[::-2], ms.BatchTransform(10)])
    points = ms.inspect.order(view, compare=["sequential"]).compared[0].points
    assert points is not None and points[1].tolist() == list(range(99, 0, -2))
    orders = ms.inspect.order(in_buckets(), epochs=1)
    assert sorted(orders.epochs[0].points[1].tolist()) == list(range(6))  # pyright: ignore[reportOptionalSubscript]
    alone = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(10)})])
    assert ms.inspect.order(alone).epochs[0].variation is None


@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from([{}, {"drop_last": True}, {"pad_last_batch": False}]))
@settings(max_examples=10, deadline=None)
def test_a_mixture_s_plan_is_what_its_batches_have(web, code, ending):
    sources = {name: ms.ArraySampleSource({"x": np.full(n, n)}) for name, n in (("web", 90), ("code", 30))}
    view = ms.views.mix(sources, {"web": ms.views.ramp(web, 5, samples=90), "code": code})
    loader = ms.DataLoader([view, ms.BatchTransform(32, **ending)])
    steps = 9
    plan = ms.inspect.mixture(loader, steps=steps)
    batches = []
    for batch, mask in loader.iterate(loader.init_state(KEY), steps=steps):
        values = np.asarray(batch["x"])[np.asarray(mask)]
        batches.append([int((values == count).sum()) for count in (90, 30)])
    assert plan.batches.tolist() == batches
    if ending.get("drop_last"):  # those that are left out at the end of an epoch come before the next one
        assert plan.drawn.sum(axis=1).tolist() == [step // 3 * 120 + step % 3 * 32 for step in range(steps + 1)]
        return
    drawn = np.concatenate([np.zeros((1, 2), int), np.cumsum(batches, axis=0)])
    assert plan.steps.tolist() == list(range(steps + 1)) and (plan.drawn == drawn).all()
    starts = {"web": [], "code": []}
    for at, (name, length) in enumerate((("web", 90), ("code", 30))):
        for number in range(1, (int(drawn[-1, at]) - 1) // length + 1):
            starts[name].append(int(np.flatnonzero(drawn[1:, at] > number * length)[0]))
    assert plan.starts == starts


def test_weights_that_change_are_in_the_plan_of_a_mixture():
    sources = {name: ms.ArraySampleSource({"x": np.full(n, n)}) for name, n in (("web", 9000), ("code", 3000))}
    view = ms.views.mix(sources, {"web": 3, "code": 1}, samples=1024)
    loader = ms.DataLoader([ms.views.reweight(view, {"web": 1, "code": 1}, after=4096), ms.BatchTransform(256)])
    plan = ms.inspect.mixture(loader)
    assert len(plan.steps) == 21  # past the change after 16 steps
    assert plan.shares[[0, -1]].tolist() == [[0.75, 0.25], [0.5, 0.5]]
    assert "code" in repr(plan) and max(map(len, repr(plan).splitlines())) <= 80


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_padding_in_buckets_is_what_batches_have(lengths, count, size):
    found = ms.inspect.lengths(documents(lengths), lengths, buckets=count)
    places = sum(one.samples * one.length for one in found.buckets)
    assert sum(one.samples for one in found.buckets) == len(lengths)
    assert found.padding == pytest.approx(1 - sum(lengths) / places)
    view = ms.views.buckets(documents(lengths), lengths, (10, 20, 40), batch_size=size)
    loader = ms.DataLoader([view, ms.PadTransform({"ids": 0})])
    found = ms.inspect.lengths(loader, "ids")
    assert sorted(found.lengths.tolist()) == sorted(lengths)
    assert found.padding == pytest.approx(1 - loader.pipeline.fill)
    for bucket in found.buckets:
        inside = [n for n in lengths if n <= bucket.length and not any(n <= e < bucket.length for e in (10, 20))]
        assert (bucket.samples, bucket.tokens) == (len(inside), sum(inside))
        assert bucket.places == -(-len(inside) // size) * size * bucket.length


def test_lengths_that_a_source_knows_are_not_read():
    class Known(ms.DatasetSource):
        lengths = np.array([3, 1, 2])

    class Samples(list):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    samples = Samples([{"ids": np.zeros(3, int)}] * 3)
    source = Known(samples)
    before = samples.reads
    assert ms.inspect.lengths(source).lengths.tolist() == [3, 1, 2]
    assert ms.inspect.lengths(source[1:], buckets=(1, 2), pack=2).lengths.tolist() == [1, 2]
    assert samples.reads == before
    assert ms.inspect.lengths(source, lambda sample: len(sample["ids"])).lengths.tolist() == [3, 3, 3]
    assert samples.reads > before
    with pytest.raises(TypeError, match=r"lengths needs by, what is long: .* DatasetSource.* does not say it\."):
        ms.inspect.lengths(documents([1, 2]))


def test_empty_samples_have_a_picture():
    found = ms.inspect.lengths(documents([1]), [0])
    assert found.padding == 0 and repr(found).splitlines()[:2] == ["█", "from 0 to 2"]
    assert "1 samples by length" in texts(found)


def test_packed_rows_are_counted_from_their_plan():
    lengths = [5, 3, 2, 4, 1]
    packed = ms.inspect.lengths(ms.views.pack(documents(lengths), 8))
    tried = ms.inspect.lengths(documents(lengths), "ids", pack=8)
    assert sorted(packed.lengths.tolist()) == sorted(lengths) and packed.are_segments and not tried.are_segments
    assert (packed.rows, packed.fill, packed.segments) == (tried.rows, tried.fill, 5)
    assert packed.fill == pytest.approx(15 / 16)
    loader = ms.DataLoader([ms.views.pack(documents(lengths), 8), ms.BatchTransform(2)])
    assert ms.inspect.lengths(loader).fill == packed.fill
    with pytest.raises(ValueError, match=r"lengths takes pack= to try it on a source, and packed rows are there"):
        ms.inspect.lengths(loader, pack=4)
    with pytest.raises(ValueError, match=r"lengths takes buckets= .* this loader has buckets\. Pass the source\."):
        ms.inspect.lengths(in_buckets(), "ids", buckets=2)


def test_what_has_no_plan_is_refused_by_name():
    stream = ms.DataLoader(PIPELINES["stream"]())
    for ask in (ms.inspect.order, ms.inspect.mixture):
        with pytest.raises(TypeError, match=f"{ask.__name__} needs a loader that finds its samples by index"):
            ask(stream)
        with pytest.raises(TypeError, match=f"{ask.__name__} needs loader to be a DataLoader"):
            ask(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"mixture needs a loader over what ms\.views\.mix gave\. This one has no"):
        ms.inspect.mixture(loader_of())
    with pytest.raises(TypeError, match=r"This one has \[0:200:2\]\. Mix last"):
        ms.inspect.mixture(ms.DataLoader([ms.ArraySampleSource({"x": np.arange(200)})[::2], ms.BatchTransform(10)]))
    with pytest.raises(ValueError, match="order needs epochs to be an int from 1 to 12"):
        ms.inspect.order(loader_of(), epochs=0)
    with pytest.raises(TypeError, match=r"order needs compare to be a list of orderings\. Got 'shuffle'"):
        ms.inspect.order(loader_of(), compare="shuffle")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"lengths\(buckets=\.\.\.\): buckets needs lengths that rise\. Got \(8, 4\)"):
        ms.inspect.lengths(documents([1, 2]), "ids", buckets=(8, 4))
    with pytest.raises(TypeError, match="lengths needs a source"):
        ms.inspect.lengths(3)  # pyright: ignore[reportArgumentType]


def test_a_long_epoch_is_looked_at_in_parts(monkeypatch):
    monkeypatch.setattr("millstream.inspect._orders._MOST_SAMPLES", 1000)
    epoch = ms.inspect.order(loader_of(10_000, 50), epochs=1).epochs[0]
    assert (epoch.samples, epoch.looked_at) == (10_000, 1000)
    assert "every 10th batch" in texts(ms.inspect.order(loader_of(10_000, 50), epochs=1))
