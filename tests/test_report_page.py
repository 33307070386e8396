"""The page of a report in a real browser: one hue per run, legends, zoom, units, keys, a table to download."""

import csv
import io
import itertools
import json
import pathlib
import re

import numpy as np
import pytest
from browser import CHROMIUM, DRIVER, MISSING, browser

import millstream.report
from millstream.report._charts import curve_charts, moments, time_charts
from millstream.report._reading import read_run, read_runs
from millstream.report.page import make_page, write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING)

NASTY = '</script><script>alert("x")</script><img src=x onerror=alert(1)> \'"&λ\u202e'
DESCRIPTION = {
    "loop": "train",
    "date": 1.7e9,
    "from_step": 0,
    "versions": {"JAX": NASTY},
    "state": {"rows": [], "arrays": 0, "count": 0, "nbytes": 0},
    "loaders": {NASTY: {"stages": [], "plan": {NASTY: NASTY}}},
    "tasks": [[NASTY, NASTY]],
    "stop": NASTY,
    "mixture": None,
    "skip": [],
}


def write_run(folder, *, seed=0, steps=200, metric="gradient_norm", memory=True):
    """A record of a run of two metrics with tests, and one more, over 20 steps per epoch."""
    folder.mkdir(parents=True)
    rng, lines = np.random.default_rng(seed), [{"steps": 0, "run": DESCRIPTION}]
    for step in range(1, steps + 1):
        units = {"steps": step, "samples": 8 * step, "epochs": step // 20, "time": 5 + step / 10}
        rest = float(np.exp(-step / 10))
        values = {"loss": 0.1 + rest + 0.01 * rng.random(), "accuracy": 0.95 - 0.9 * rest + 0.02 * rng.random()}
        values |= {metric: 2.0 + rng.random()}
        if step % 20 == 0:
            values |= {"loss_test": 0.12 + rest, "accuracy_test": 0.93 - 0.9 * rest}
        lines.append(units | {"logged": values})
        if step == 1 or step % 5 == 0:
            spent = {"seconds": 5.1 if step == 1 else 0.5 if step > 5 else 0.4, "steps": 5, "samples": 40}
            spent |= {"compiling": 5.0 if step == 1 else 0.0, "data": 0.01, "evaluation": 0.0, "callbacks": 0.0}
            spent |= {"host_memory": 4e8 + 1e6 * step, "device_memory": 2e8 + 1e6 * step} if memory else {}
            lines.append(units | {"spent": spent})
    lines.append({"steps": steps, "samples": 8 * steps, "epochs": steps // 20, "time": 5 + steps / 10, "ended": "stop"})
    (folder / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def window():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def one(memory):
    return write_report(write_run(memory / "one" / "run"))


@pytest.fixture(scope="module")
def three(memory):
    folders = [write_run(memory / "three" / f"run {name}", seed=name) for name in range(3)]
    return write_report(folders, memory / "three" / "three.html")


@pytest.fixture
def opened(window):
    def open_page(page, width=1200, height=900, scheme="light"):
        window.size(width, height)
        window.scheme(scheme)
        window.open(page)
        return window

    return open_page


def area(window, number=0):
    """The box of a chart, on the screen."""
    return window.run(
        "const area = document.querySelectorAll('.area')[arguments[0]]; area.scrollIntoView({block: 'center'});"
        "const box = area.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]",
        number,
    )


def texts(window, selector):
    return window.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)


def ticks(window, axis, number=0):
    figure = "[...document.querySelectorAll('figure')[arguments[0]].querySelectorAll(arguments[1])]"
    found = window.run(f"return {figure}.map((e) => e.textContent)", number, f".{axis}-axis text:not(.name)")
    return [float(text.split()[0].replace("k", "e3")) for text in found]


def choose(window, name, value):
    window.run(
        "const control = document.getElementById(arguments[0]);"
        "control.value = arguments[1]; control.dispatchEvent(new Event('input'))",
        name,
        value,
    )


def zoom_half(window, number=0):
    left, top, width, height = area(window, number)
    window.drag(left + width / 2, left + width - 2, top + height / 2)


# Colors


def style():
    return (pathlib.Path(millstream.report.__file__).parent / "page.css").read_text()


def as_seen(color, kind):
    """A color as Oklab has it, of somebody with all cones or without one kind (Machado and others, 2009)."""
    cones = {
        "all": np.eye(3),
        "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    }
    to_lms = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    to_lab = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    return to_lab @ np.cbrt(to_lms @ np.clip(np.array(cones[kind]) @ linear(color), 0, 1))


def linear(color):
    parts = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("kind", ["all", "no red", "no green"])
def test_ten_runs_have_ten_colors_that_the_color_blind_tell_apart(kind):
    colors = re.findall(r"--c\d: (#\w{6})", style())
    assert len(colors) == 20
    for ten in (colors[:10], colors[10:]):
        far = [np.linalg.norm(as_seen(a, kind) - as_seen(b, kind)) for a, b in itertools.combinations(ten, 2)]
        assert min(far) >= (0.1 if kind == "all" else 0.07)  # about 0.02 is seen side by side


def test_colors_of_curves_stand_out_from_their_card():
    colors, cards = re.findall(r"--c\d: (#\w{6})", style()), re.findall(r"--card: (#\w{6})", style())
    for ten, card in ((colors[:10], cards[0]), (colors[10:], cards[1])):
        paper = linear(card) @ [0.2126, 0.7152, 0.0722]
        for color in ten:
            ink = linear(color) @ [0.2126, 0.7152, 0.0722]
            assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 3, color


def test_a_run_has_one_hue_in_all_charts_and_its_tests_are_dashed(folder):
    runs = read_runs([write_run(folder / str(number), steps=40) for number in range(12)])
    for chart in (*curve_charts(runs)[0], *time_charts(runs)):
        for series in chart.series:
            if not chart.stacked:
                assert series.color == series.run
            assert series.dash == int(series.label.endswith("_test") or series.label == "devices")
    page = make_page(runs)
    assert "Not drawn" not in page and 'class="swatch c1 s0"></span>11<' in page  # colors begin again after ten


def test_with_one_run_training_and_tests_have_two_hues(folder):
    (loss, *_), _ = curve_charts([read_run(write_run(folder / "run"))])
    assert [(series.label, series.color, series.dash) for series in loss.series] == [
        ("loss", 0, 0),
        ("loss_test", 1, 1),
    ]


def test_memory_is_a_chart_where_the_record_has_it(folder):
    runs = read_runs([write_run(folder / "a"), write_run(folder / "b", memory=False)])
    (chart,) = [chart for chart in time_charts(runs) if chart.title == "Memory"]
    assert [(series.label, series.run, series.last) for series in chart.series] == [
        ("host", 0, "600 MB"),
        ("devices", 0, "400 MB"),
    ]
    assert [text for _, text in chart.y.ticks][-1] == "600 MB"
    assert "Memory" not in [chart.title for chart in time_charts(runs[1:])]


def test_it_is_known_where_a_run_was_in_every_unit(folder):
    found = moments(read_run(write_run(folder / "run", steps=50)))
    assert found["step"] == list(range(51)) and found["samples"] == list(range(0, 401, 8))
    np.testing.assert_allclose(found["epoch"], np.arange(51) / 20)
    np.testing.assert_allclose(found["time"][1:], 5 + np.arange(1, 51) / 10)


def test_long_numbers_of_tiles_are_shortened(folder):
    (folder / "run").mkdir()
    lines = [{"steps": 0, "run": DESCRIPTION}]
    lines += [
        {"steps": n, "samples": 1_251_060 * n, "epochs": 0, "time": 1.0 * n, "logged": {"loss": 1.0}} for n in (1, 2)
    ]
    (folder / "run" / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert '<strong title="2,502,120">2.5M</strong>' in make_page([read_run(folder / "run")])


# Axes


def test_an_axis_shows_what_matters_and_says_what_it_leaves_out(opened, one):
    window = opened(one)
    assert texts(window, "[data-chart='1'] h3") == ["accuracy"]
    said = "return document.querySelector(\"[data-chart='1'] .caption\").innerText"
    assert window.run(said).split() == "best 0.93 at step 200 start cut off".split()
    shown = ticks(window, "y", 1)
    assert shown[0] >= 0.8 and np.diff(shown).max() <= 0.05 + 1e-9
    choose(window, "scale", "linear")
    assert ticks(window, "y", 1)[0] <= 0.2 and "cut" not in window.run(said)


def test_the_script_draws_what_was_there_before(opened, one, three):
    script = (
        "return ['.y-axis text', '.x-axis text', '.epoch', '.raw', '.dot', '.best', '.block'].map((name) =>"
        " [...document.querySelectorAll(name)].map((e) => [e.textContent, e.getAttribute('class'),"
        " ...['x', 'y', 'cx', 'cy', 'x1'].map((a) => +(parseFloat(e.getAttribute(a)) || 0).toFixed(0))]))"
    )
    for page in (one, three):
        window = opened(page)
        before = window.run(script)
        choose(window, "smooth", "2")
        for number, (old, new) in enumerate(zip(before, window.run(script), strict=True)):
            assert sorted(map(str, old)) == sorted(map(str, new)), number
        assert window.messages() == []


def test_axes_have_names_and_epochs_do_not_lie_on_the_curves(opened, one):
    window = opened(one)
    assert texts(window, ".x-axis .name") == ["step"] * 3 + ["time"] * 4
    overlaps = window.run(
        "return [...document.querySelectorAll('.area')].flatMap((area) => [...area.querySelectorAll('text.epoch')]"
        ".filter((text) => text.getBoundingClientRect().bottom > area.getBoundingClientRect().top + 1))"
        ".map((text) => text.textContent)"
    )
    assert overlaps == [] and "epoch 2" in texts(window, "text.epoch")


def test_no_card_has_an_empty_half_beside_it(opened, one):
    window = opened(one)
    width, widths = window.run(
        "const grid = document.querySelector('.charts');"
        "return [grid.clientWidth, [...grid.children].map((card) => card.offsetWidth)]"
    )
    assert widths[0] == widths[1] < width / 2 and widths[2] == width


@pytest.mark.parametrize(("unit", "last"), [("epoch", 10), ("samples", 1600), ("time", 25), ("step", 200)])
def test_curves_are_shown_over_the_unit_that_is_chosen(opened, one, unit, last):
    window = opened(one)
    choose(window, "unit", unit)
    assert texts(window, ".x-axis .name")[:3] == [unit] * 3
    assert 0.75 * last <= ticks(window, "x")[-1] <= last
    window.run("document.querySelector('figure').focus()")
    window.press("ArrowLeft")
    told = {"epoch": "epoch 10.00", "samples": "1,600 samples", "time": "25 s", "step": "step 200"}
    assert window.run("return document.querySelector('.readout th').textContent") == told[unit]
    assert texts(window, ".x-axis .name")[3:] == ["time"] * 4 and window.messages() == []


def test_units_that_are_not_known_are_not_offered(opened, folder):
    (folder / "run.csv").write_text("steps,samples,epochs,time,date,loss\n1,0,,0.0,0.0,0.5\n2,0,,0.0,0.0,0.4\n")
    window = opened(write_report(folder / "run.csv"))
    assert window.run("return [...document.getElementById('unit').options].filter((o) => !o.hidden).length") == 1


# Legends


def test_a_run_is_hidden_in_all_charts_and_comes_back(opened, three):
    window = opened(three)
    count = "return document.querySelectorAll('.lines .raw.c1').length"
    figures = "return [...document.querySelectorAll('figure')].filter((each) => !each.hidden).length"
    assert texts(window, "#runs button") == ["run 0", "run 1", "run 2"]
    curves, charts = window.run(count), window.run(figures)
    assert curves >= 8
    left, top = window.run(
        "const button = document.querySelectorAll('#runs button')[1]; button.scrollIntoView({block: 'center'});"
        "const box = button.getBoundingClientRect(); return [box.left + 5, box.top + 5]"
    )
    window.click(left, top)
    assert (window.run(count), window.run(figures)) == (0, charts - 1)  # one chart is about that run alone
    assert window.run("return document.querySelectorAll('#runs button')[1].getAttribute('aria-pressed')") == "false"
    window.run("document.querySelectorAll('#runs button')[1].focus()")
    window.press("Enter")
    assert (window.run(count), window.run(figures)) == (curves, charts)
    assert window.messages() == []


def test_the_curves_of_one_kind_are_hidden_in_their_chart_only(opened, three):
    window = opened(three)
    dashed = "return [...document.querySelectorAll('figure')].map((each) => each.querySelectorAll('.raw.s1').length)"
    assert window.run(dashed)[:3] == [3, 3, 0]
    window.run("document.querySelectorAll('figure')[0].querySelectorAll('.legend button')[1].click()")
    assert window.run(dashed)[:3] == [0, 3, 0]
    window.run("document.querySelectorAll('figure')[0].querySelectorAll('.legend button')[1].click()")
    assert window.run(dashed)[:3] == [3, 3, 0]


def test_values_of_all_runs_are_shown_under_the_pointer(opened, three):
    window = opened(three)
    left, top, width, height = area(window)
    window.move(left + width / 2, top + height / 2)
    shown = window.run("return document.querySelector('.readout').innerText").split("\n")
    step, *labels = re.split(r"\t| {2,}", shown[0].strip())
    assert re.fullmatch(r"step (99|10[012])", step) and labels == ["loss", "loss_test"]
    for number, line in enumerate(shown[1:]):
        assert re.fullmatch(rf"run {number}\s+0\.1\d*\s+0\.12\d*", line.strip()), line
    window.run("document.querySelectorAll('#runs button')[0].click()")
    window.move(left + width / 2 + 3, top + height / 2)
    assert "run 0" not in window.run("return document.querySelector('.readout').innerText")


# Zoom


def test_dragging_zooms_all_charts_and_a_double_click_goes_back(opened, three):
    window = opened(three)
    whole = [ticks(window, "x", number) for number in range(3)]
    tall = np.ptp(ticks(window, "y"))
    zoom_half(window)
    for number in range(3):
        shown = ticks(window, "x", number)
        assert shown[0] >= 100 and shown[-1] <= 200 and len(shown) >= 3
    assert np.ptp(ticks(window, "y")) < tall / 5  # the loss falls little in the second half
    assert 14 <= ticks(window, "x", 3)[0] and ticks(window, "x", 3)[-1] <= 25.5  # the same part of the time
    assert window.run("return document.getElementById('back').disabled") is False
    left, top, width, height = area(window)
    window.click(left + width / 2, top + height / 2, count=2)
    assert [ticks(window, "x", number) for number in range(3)] == whole
    zoom_half(window, 1)
    assert ticks(window, "x")[0] >= 100
    window.run("document.getElementById('back').click()")
    assert ticks(window, "x") == whole[0] and window.messages() == []


def test_a_zoomed_axis_tells_values_apart_that_are_close(opened, one):
    window = opened(one)
    zoom_half(window, 1)
    shown = ticks(window, "y", 1)
    assert shown[0] >= 0.9 and np.diff(shown).max() <= 0.01 + 1e-9


def test_a_zoom_stays_when_the_unit_changes(opened, one):
    window = opened(one)
    zoom_half(window)
    choose(window, "unit", "epoch")
    assert 5 <= ticks(window, "x")[0] and ticks(window, "x")[-1] <= 10


def test_keys_zoom_and_go_back(opened, one):
    window = opened(one)
    whole = ticks(window, "x")
    window.run("document.querySelector('figure').focus()")
    window.press("ArrowLeft")
    window.press("+")
    assert ticks(window, "x")[0] >= 100
    window.press("+")
    assert ticks(window, "x")[0] >= 150
    window.press("-")
    window.press("-")
    assert ticks(window, "x") == whole
    window.press("+")
    window.press("Escape")
    assert ticks(window, "x") == whole and window.run("return document.getElementById('back').disabled")


def test_a_finger_zooms(opened, one):
    window = opened(one, width=390)
    left, top, width, height = area(window)
    window.swipe(left + width / 2, left + width - 2, top + height / 2)
    assert ticks(window, "x")[0] >= 100 and window.messages() == []


# The rest of it


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_several_runs_fit_on_a_phone(opened, three, width):
    window = opened(three, width=width)
    zoom_half(window)
    left, top, wide, _ = area(window)
    for part in (0.01, 0.5, 0.99):
        window.move(left + part * wide, top + 30)
        assert window.run("return document.documentElement.scrollWidth") == width
        begin, end = window.run(
            "const box = document.querySelector('.readout').getBoundingClientRect(); return [box.left, box.right]"
        )
        assert 0 <= begin < end <= width


def test_numbers_do_not_break(opened, one):
    window = opened(one, width=320)
    heights = window.run("return [...document.querySelectorAll('.tiles strong')].map((e) => e.getClientRects().length)")
    assert set(heights) == {1}
    spaces = window.run(
        "return [...document.querySelectorAll('.tiles strong')].map((e) => getComputedStyle(e).whiteSpace)"
    )
    assert set(spaces) == {"nowrap"}


def test_all_numbers_can_be_downloaded_as_a_table(opened, folder):
    (folder / "=1+1").mkdir()
    write_run(folder / "=1+1" / "run", steps=40, metric='=cmd|"x"')
    write_run(folder / "other" / "run", steps=40, seed=1)
    page = write_report([folder / "=1+1" / "run", folder / "other" / "run"], folder / "page.html")
    window = opened(page)
    window.run(
        "URL.createObjectURL = (blob) => { blob.text().then((text) => (window.found = text)); return '#'; };"
        "HTMLAnchorElement.prototype.click = function () { window.named = this.download; };"
        "document.getElementById('csv').click()"
    )
    text = window.command(
        "Runtime.evaluate", expression="new Promise((done) => setTimeout(() => done(found), 100))", awaitPromise=True
    )["result"]["value"]
    assert window.run("return window.named").endswith(".csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    runs = dict(
        zip(("'=1+1/run", "other/run"), read_runs([folder / "=1+1" / "run", folder / "other" / "run"]), strict=True)
    )
    for name, run in runs.items():
        found = [row for row in rows if (row["run"], row["chart"], row["curve"]) == (name, "loss", "loss")]
        steps, losses, samples, times = run.history.collect("steps", "loss", "samples", "time")
        assert [int(row["step"]) for row in found] == steps and [int(row["samples"]) for row in found] == samples
        np.testing.assert_allclose([float(row["value"]) for row in found], losses, rtol=1e-5)
        np.testing.assert_allclose([float(row["time"]) for row in found], times, rtol=1e-5)
        np.testing.assert_allclose([float(row["epoch"]) for row in found], np.array(steps) / 20, rtol=1e-5)
    assert {row["chart"] for row in rows} >= {"loss", "accuracy", '\'=cmd|"x"', "Throughput", "Memory"}


def test_nothing_is_injected_by_any_name(opened, folder):
    hostile = NASTY.replace("/", "|")  # a folder cannot have it
    write_run(folder / hostile, steps=40, metric=NASTY)
    write_run(folder / "other", steps=40, metric=NASTY)
    page = write_report([folder / hostile, folder / "other"], folder / "page.html")
    window = opened(page)
    zoom_half(window)
    window.run("document.querySelectorAll('#runs button')[1].click()")
    left, top, width, height = area(window, 2)
    window.move(left + width / 2, top + height / 2)
    window.run("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert window.run("return [document.scripts.length, document.images.length]") == [2, 0]
    assert hostile in texts(window, "#runs button") and NASTY in texts(window, "figure h3")
    assert hostile in window.run("return document.querySelectorAll('.readout')[2].textContent")
    assert window.messages() == [] and window.requests() == [page.as_uri()]


def test_the_page_prints_without_its_controls(opened, three):
    window = opened(three)
    window.command("Emulation.setEmulatedMedia", media="print")
    try:
        display = "return getComputedStyle(document.querySelector(arguments[0])).display"
        assert window.run(display, ".controls") == "none" and window.run(display, "#runs") != "none"
        assert len(window.command("Page.printToPDF")["data"]) > 20_000
    finally:
        window.command("Emulation.setEmulatedMedia", media="")
