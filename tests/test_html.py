"""What a notebook shows: HTML that stands alone, with the users' words escaped."""

import html.parser
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millstream as ms
from millstream.text.html import html_curves, html_names, html_table

VOID = ("br",)


class Page(html.parser.HTMLParser):
    """The elements of a page, which must be closed in order, and its texts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.attributes, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], "an element is not closed"

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def parsed(value):
    """The page of a value, which must need nothing from elsewhere and have no colors of text or background."""
    text = value if isinstance(value, str) else value._repr_html_()
    page = Page(text)
    assert not {"script", "style", "link", "img", "iframe"} & set(page.seen)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("href", "src")]
    assert not re.search(r"background|#000|#fff|black|white", text)
    return page


def test_a_table_has_the_columns_that_have_a_text():
    page = parsed(html_table(["<name>", "count", "note"], [["a\nb", "1", ""], ["c & d", "2", ""]], numbers=["count"]))
    assert page.seen.count("td") == 4 and page.seen.count("th") == 2 and page.seen.count("br") == 1
    assert page.words == ["<name>", "count", "a", "b", "1", "c & d", "2"]
    assert page.attributes.count(("style", "text-align: right")) == 3


def test_names_and_texts_are_escaped():
    assert parsed(html_names([("<script>", "a < b")])).words == ["<script>", "a < b"]


def test_what_is_known_of_a_loader_is_shown_as_tables():
    loader = ms.DataLoader([ms.ArraySampleSource({"<x>": np.arange(4.0)}), ms.BatchTransform(2)])
    explanation = parsed(loader.explain())
    assert "<x> (2,) float32" in explanation.words and explanation.seen.count("table") == 2
    assert parsed(loader.stats()).words == ["nothing read yet"]
    assert "inf" not in str(loader.stats())
    verification = loader.verify(executors=[], hosts=[1], progress=False)
    assert {"check", "stages", "ok", "all"} <= set(parsed(verification).words)


def test_a_source_a_view_and_a_loader_are_shown_as_small_tables():
    source = ms.ArraySampleSource({"<x>": np.zeros((10, 2), np.uint8), "label": np.arange(10)})
    loader = ms.DataLoader([source, ms.BatchTransform(4)], executor=ms.Threads(2))
    rows = ["samples", "10", "<x>", "u8[2]", "label", "i32[]"]
    assert parsed(source).words == ["source", "ArraySampleSource", *rows]
    assert parsed(source[:3]).words[:4] == ["view", "[0:3] of ArraySampleSource", "samples", "3"]
    stages, batch = ["ArraySampleSource(10 samples)", "BatchTransform(4)"], ["<x> u8[4,2]", "label i32[4]"]
    options = ["epoch", "3 steps", "executor", "Threads(2)"]
    assert parsed(loader).words == ["stages", *stages, "batch", *batch, *options]
    assert parsed(loader.init_state(jax.random.key(7), step=2)).words[:4] == ["key", "[0, 7]", "step", "2"]


def test_a_source_of_notebooks_reads_no_sample_to_show_itself():
    class Items(list):
        def __getitem__(self, index):
            raise AssertionError("read")

    for source in (ms.DatasetSource(Items("ab")), ms.DatasetSource(Items("ab"))[:1]):
        assert "Items" in repr(source) or "DatasetSource" in parsed(source).words[1]
    mapped = ms.DatasetSource(Items("ab")).map(lambda item: item)
    assert parsed(mapped).words[1] == "DatasetSource(2 items of Items) -> HostMapTransform(<lambda>)"


def test_the_output_of_a_run_is_shown_with_its_curves():
    output = ms.train_loop(
        {"w": jnp.zeros(3)},
        [np.ones(4)] * 3,
        {ms.on_train_step: lambda state, batch: ({"metrics": {"<l>": 1.0}}, state)},
    )
    page = parsed(output)
    assert page.words[0] == "done" and page.words[1].startswith("3 steps, 12 samples in ")
    assert {"{w: f32[3]}", "<l>"} <= set(page.words) and page.seen.count("svg") == 1


def test_what_cannot_be_shown_as_a_page_is_shown_as_text(monkeypatch):
    source = ms.ArraySampleSource(np.arange(3))
    monkeypatch.setattr(type(source), "shown_spec", lambda self: 1 / 0)
    assert parsed(source).words == [repr(source)]


def test_a_tuning_is_shown_as_tables():
    tuning = ms.inspect.Tuning(
        [ms.inspect.TimedStage("<stage>", "sample", 0.001)],
        [ms.inspect.TriedOptions(ms.Threads(2), 2, 1000.0)],
        {"executor": ms.Threads(2), "prefetch": 2},
        "it is <faster>",
        {},
    )
    words = parsed(tuning).words
    assert {"<stage>", "1 ms", "ms.Threads(2)", "1,000", "advised", "it is <faster>"} <= set(words)
    assert "ms.DataLoader(pipeline, executor=ms.Threads(2), prefetch=2)" in words


def test_a_failed_verification_shows_the_difference():
    difference = ms.inspect.Difference("resume", "step 3", "batch['<x>']", "1.5", "2.5", "The stage counts calls.")
    rows = (ms.inspect.VerificationRow("resume", "failed", "3 steps", difference, ("left <out>",)),)
    words = " ".join(parsed(ms.inspect.Verification(rows, 1.0)).words)
    assert "batch['<x>']: 1.5 expected, 2.5 found" in words and "left <out>" in words


def test_an_overview_is_shown_as_a_table_with_a_total():
    page = parsed(ms.overview({"<w>": jnp.ones((3, 4)), "b": jnp.ones(4)}))
    assert {"<w>", "(3, 4)", "2 arrays", "16"} <= set(page.words)


def test_a_history_is_shown_as_a_curve_per_metric():
    history = ms.loops.history()
    for step in range(1, 2001):
        history.commit(ms.loops.Elapsed(steps=step), {"loss": 1 / step, "<acc>": step / 2000, "text": "x"})
        if step % 500 == 0:
            history.commit(ms.loops.Elapsed(steps=step), {"loss_test": 2 / step})
    page = parsed(history)
    assert page.seen.count("svg") == 2 and page.seen.count("polyline") == 3
    assert {"loss", "loss 0.0005", "loss_test 0.001", "<acc>"} <= set(page.words)
    assert page.words.count("step 2000") == 2
    points = [len(value.split()) for name, value in page.attributes if name == "points"]
    assert sorted(points) == [4, 301, 301], "a curve has no more points than can be seen"


def test_a_history_without_numbers_is_shown_in_words():
    assert parsed(ms.loops.history()).words == ["History(0 rows: nothing logged)"]


def test_a_history_of_many_metrics_shows_the_first_ones():
    history = ms.loops.history()
    history.commit(ms.loops.Elapsed(steps=1), {f"metric {number}": 1.0 for number in range(20)})
    page = parsed(history)
    assert page.seen.count("svg") == 12 and page.seen.count("circle") == 12
    assert "The first 12 of 20:" in page.words[0]


@pytest.mark.parametrize("values", [[1.0, 1.0], [0.0, 0.0], [5.0, 1e-30]])
def test_curves_stay_inside_their_picture(values):
    page = parsed(html_curves("x", [("x", [1, 2], values)]))
    (points,) = (value for name, value in page.attributes if name == "points")
    for point in points.split():
        across, down = map(float, point.split(","))
        assert 56 <= across <= 356 and 20 <= down <= 110


def test_what_is_not_finite_is_a_gap():
    nan, inf = float("nan"), float("inf")
    page = parsed(html_curves("x", [("x", [1, 2, 3, 4, 5], [1, 2, nan, 3, inf])]))
    assert page.seen.count("polyline") == 1 and page.seen.count("circle") == 1
    assert parsed(html_curves("<x>", [("x", [1], [nan])])).words == ["<x>: no finite value"]
