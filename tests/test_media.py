"""Images and histograms that steps log: the same however steps are run, bounded, and shown by writers that can."""

import io
import struct
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

import millstream as ms
from millstream.callbacks import csv_logger, mlflow_logger, tensorboard, wandb_logger
from millstream.callbacks.contact_sheet import contact_sheet
from millstream.loops import media_log
from millstream.loops.media import BINS, pack_histogram, unpack_histogram
from millstream.text.png import encode_png

pytestmark = pytest.mark.optimized

NUMBERS = st.floats(width=32, allow_subnormal=False) | st.sampled_from([0.0, 1.0, -1.0, 3e38, -3e38])


@jax.jit
def step(state, batch):
    rows, _ = batch
    logs = (
        ms.logs().add_metric("loss", state).add_image("squares", jnp.tile(rows["x"][:, None, None, None], (1, 4, 4, 3)))
    )
    return logs.add_histogram("rows", rows["x"]), state + 1


def make_loader():
    source = ms.ArraySampleSource({"x": np.linspace(0, 1, 40, dtype=np.float32)}, ordering="sequential")
    return ms.DataLoader([source, ms.BatchTransform(4)])


def run(callbacks=(), stop=100, tasks=None, **options):
    tasks = {ms.on_train_step: step} if tasks is None else tasks
    return ms.train_loop(
        jnp.zeros(()), make_loader(), tasks, callbacks=list(callbacks), stop=stop, key=jax.random.key(0), **options
    )


def kept(history):
    return [(item.path, item.elapsed.steps, item.read().tolist()) for item in history.media.since(0)]


# What is logged


@settings(max_examples=40, deadline=None)
@given(st.lists(NUMBERS, min_size=50, max_size=50))
def test_a_histogram_counts_every_value_once_on_any_device(values):
    array = np.array(values, np.float32)
    host = pack_histogram("test", array)
    device = pack_histogram("test", jnp.asarray(array))
    found, finite = unpack_histogram(host), array[np.isfinite(array)]
    assert host.shape == (2, BINS + 1) and found.odd == 50 - len(finite)
    assert found.counts.sum() == len(finite) and (np.diff(found.edges) >= 0).all()
    # A device may divide with another last bit.
    np.testing.assert_allclose(np.asarray(device)[0], host[0], rtol=1e-5, atol=1e-37)
    assert unpack_histogram(np.asarray(device)).odd == found.odd
    assert unpack_histogram(np.asarray(device)).counts.sum() == found.counts.sum()
    if len(finite) and finite.min() < finite.max():
        assert (found.edges[0], found.edges[-1]) == (finite.min(), finite.max())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 127), min_size=50, max_size=50))
def test_a_histogram_is_that_of_numpy_where_values_are_between_edges(whole):
    array = np.array([*whole, 0, 128], np.float32) + np.array([0.5] * 50 + [0.0, 0.0], np.float32)
    expected, _ = np.histogram(array, BINS, (0, 128))
    for values in (array, jnp.asarray(array)):
        assert unpack_histogram(np.asarray(pack_histogram("test", values))).counts.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("values", "ends", "count"),
    [([], (-0.5, 0.5), 0), ([np.nan], (-0.5, 0.5), 0), ([3, 3], (2.5, 3.5), 2), (True, (0.5, 1.5), 1), (1e30, None, 1)],
)
def test_a_histogram_of_one_value_or_none_has_bins_all_the_same(values, ends, count):
    found = unpack_histogram(ms.logs().add_histogram("x", np.asarray(values)).histograms.x)
    assert found.counts.sum() == count and found.edges[0] < found.edges[-1]
    assert ends is None or (found.edges[0], found.edges[-1]) == ends


@pytest.mark.parametrize(
    ("shape", "made"),
    [((4, 5), (1, 4, 5, 1)), ((4, 5, 3), (1, 4, 5, 3)), ((4, 5, 1), (1, 4, 5, 1)), ((20, 4, 5, 4), (16, 4, 5, 4))],
)
def test_images_of_any_form_become_one_form(shape, made):
    floats = np.random.default_rng(0).random(shape, np.float32) * 2 - 0.5
    floats.flat[0] = np.nan
    bytes_of = np.where(np.isnan(floats), 0, np.round(np.clip(floats, 0, 1) * 255)).astype(np.uint8)
    for image in (floats, jnp.asarray(floats), bytes_of, jnp.asarray(bytes_of)):
        logged = ms.logs().add_image("x", image).images.x
        assert logged.shape == made and logged.dtype == np.uint8
        np.testing.assert_array_equal(logged, bytes_of.reshape(-1, *made[1:])[:16])
    assert ms.logs().add_image("x", floats, most=1).images.x.shape == (1, *made[1:])


@pytest.mark.parametrize(
    ("add", "kind", "text"),
    [
        (
            lambda logs: logs.add_image("x", np.zeros((4, 5, 2))),
            ValueError,
            r"add_image needs an image as HxW or HxWxC.*"
            r"Got shape \(4, 5, 2\), float64. Several without channels are images\[..., None\]",
        ),
        (lambda logs: logs.add_image("x", np.zeros(4)), ValueError, r"Got shape \(4,\)"),
        (lambda logs: logs.add_image("x", np.zeros((0, 4))), ValueError, r"Got shape \(0, 4\)"),
        (
            lambda logs: logs.add_image("x", np.zeros((4, 5), int)),
            TypeError,
            r"uint8, or of floats from 0 to 1. Got shape "
            r"\(4, 5\), int64. Scale it",
        ),
        (
            lambda logs: logs.add_image("x", "cat.png"),
            TypeError,
            r"add_image needs an image as an array. Got 'cat.png'",
        ),
        (lambda logs: logs.add_image("x", np.zeros((2, 2)), most=0), ValueError, r"most"),
        (lambda logs: logs.add_image(3, np.zeros((2, 2))), TypeError, r"names that are text. Got 3"),
        (
            lambda logs: logs.add_histogram("x", np.zeros(2, complex)),
            TypeError,
            r"add_histogram needs real numbers. Got "
            r"shape \(2,\), complex128",
        ),
        (
            lambda logs: logs.add_histogram("x", {"w": 1}),
            TypeError,
            r"add_histogram needs values as an array. Got \{'w'",
        ),
        (lambda logs: logs.add_histogram("x", [[1], [2, 3]]), TypeError, r"needs values as an array. Got \[\[1\]"),
        (lambda logs: logs.add_histogram("x", jax.random.key(0)), TypeError, r"needs values as an array"),
    ],
)
def test_what_is_neither_image_nor_numbers_is_refused_by_name(add, kind, text):
    with pytest.raises(kind, match=text):
        add(ms.logs())


def test_what_others_put_into_the_collections_is_refused_by_name():
    history = ms.loops.History()
    with pytest.raises(TypeError, match=r"images are what add_image makes. images.x is shape \(2, 2\), float64"):
        history.commit(ms.loops.Elapsed(steps=1), {"images": {"x": np.zeros((2, 2))}})
    with pytest.raises(TypeError, match=r"histograms are what add_histogram makes. histograms.x is 3"):
        history.commit(ms.loops.Elapsed(steps=1), {"histograms": {"x": 3}})


# What is kept of it


@pytest.mark.parametrize("options", [{}, {"fuse": 16}], ids=["steps", "fused"])
def test_media_are_the_same_however_steps_are_run(options):
    one_by_one = run(tasks={ms.on_train_step: lambda state, batch: step(state, batch)}).history
    other = run(**options).history
    for (path, steps, value), expected in zip(kept(other), kept(one_by_one), strict=True):
        assert (path, steps) == expected[:2]
        np.testing.assert_allclose(value, expected[2], rtol=1e-6)  # one program may contract what another does not
    wanted, count = [], 0
    for number in range(1, 101):  # the first 32, then one each time steps have grown by 5 %
        if count < 32 or number >= wanted[-1] * 1.05:
            wanted, count = [*wanted, number], count + 1
    assert [steps for path, steps, _ in kept(other) if path == ("histograms", "rows")] == wanted
    assert other.collect("loss") == list(range(100))


def test_tables_bars_and_checkpoints_do_not_see_media(folder, capsys):
    history = run([csv_logger(folder / "loss.csv"), ms.checkpoint(folder / "run"), ms.callbacks.keras_bar()]).history
    assert history.names() == ["metrics.loss"] and list(history.to_dict()) == [
        *("steps", "samples", "epochs", "time", "date", "loss")
    ]
    assert (folder / "loss.csv").read_text().splitlines()[0] == "steps,samples,epochs,time,date,loss"
    assert "squares" not in capsys.readouterr().out
    assert [column["name"] for column in history.to_state()["columns"]] == ["loss"]
    assert list(history.latest()) == ["metrics"]


def test_a_row_that_has_media_alone_is_no_row_of_a_table(folder):
    image = {ms.every(10): lambda state: ms.logs().add_image("x", np.zeros((2, 2)))}
    history = run([csv_logger(folder / "loss.csv")], tasks=image, stop=50).history
    assert [steps for _, steps, _ in kept(history)] == [10, 20, 30, 40, 50]
    assert len((folder / "loss.csv").read_text().splitlines()) <= 1


def test_only_so_many_bytes_are_held_and_the_first_is_one_of_them(monkeypatch):
    monkeypatch.setattr(media_log, "_MOST_BYTES", 10_000)
    log = media_log.MediaLog()
    for number in range(1, 33):
        log.add(("images", "x"), ms.loops.Elapsed(steps=number), np.zeros((1, 50, 20, 1), np.uint8))
        assert sum(item.nbytes for item in log.since(0)) <= 10_000
    assert [item.elapsed.steps for item in log.since(0)] == [1, *range(24, 33)]
    log.add(("images", "x"), ms.loops.Elapsed(steps=40), np.zeros((1, 200, 200, 1), np.uint8))
    assert [item.elapsed.steps for item in log.since(0)] == [1, 40]  # the newest stays, whatever its size


def test_steps_run_together_again_after_an_image():
    history = ms.loops.History()
    history.commit(ms.loops.Elapsed(steps=1), ms.logs().add_metric("loss", 1.0).add_image("x", np.zeros((2, 2))))
    assert not history.plain
    history.commit(ms.loops.Elapsed(steps=2), ms.logs().add_metric("loss", 1.0))
    assert history.plain


def test_an_array_that_is_written_into_later_stays_as_it_was():
    history, image = ms.loops.History(), np.zeros((2, 2), np.uint8)
    history.commit(ms.loops.Elapsed(steps=1), ms.logs().add_image("x", image))
    image[:] = 7
    assert not history.media.since(0)[0].read().any()


def test_a_test_shows_the_images_of_its_first_batch():
    tasks = {ms.on_train_step: lambda state, batch: state + 1, ms.on_test_step: step}
    history = run(tasks=tasks, test_dataset=make_loader(), stop=30).history
    first = np.round(np.linspace(0, 1, 40)[:4] * 255).tolist()
    shown = [item for item in history.media.since(0) if item.path == ("images", "squares_test")]
    assert [item.elapsed.steps for item in shown] == [10, 20, 30]
    assert all(item.read()[:, 0, 0, 0].tolist() == first for item in shown)


def test_a_donated_image_is_named():
    donated = jnp.zeros((1, 2, 2, 1), jnp.uint8)
    history = ms.loops.History()
    history.commit(ms.loops.Elapsed(steps=1), {"images": {"x": donated}})
    donated.delete()
    with pytest.raises(RuntimeError, match=r"images.x was donated to a later step before it was read. Log a copy"):
        history.media.since(0)[0].read()


# Writers


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_png_is_read_as_what_it_was(seed):
    rng = np.random.default_rng(seed)
    height, width = rng.integers(1, 9, 2)
    for shape in ((height, width), (height, width, 3), (height, width, 4)):
        pixels = rng.integers(0, 256, shape, np.uint8)
        np.testing.assert_array_equal(np.asarray(PIL.Image.open(io.BytesIO(encode_png(pixels)))), pixels)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 3, 4]))
def test_every_image_is_on_the_sheet(count, height, width, channels):
    images = np.random.default_rng(0).integers(0, 256, (count, height, width, channels), np.uint8)
    sheet = contact_sheet(images)
    sheet = sheet[:, :, None] if channels == 1 else sheet
    places = [
        sheet[top : top + height, left : left + width]
        for top in range(0, sheet.shape[0], height + 1)
        for left in range(0, sheet.shape[1], width + 1)
    ]
    assert len(places) >= count
    for image, place in zip(images, places, strict=False):
        np.testing.assert_array_equal(image, place)


def events_of(folder):
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


@pytest.mark.parametrize("options", [{}, {"fuse": 16}], ids=["steps", "fused"])
def test_tensorboard_gets_images_and_histograms(folder, options):
    history = run([tensorboard(folder)], **options).history
    values = [(event.step, value) for event in events_of(folder) for value in event.summary.value]
    for item in history.media.since(0):
        (value,) = [value for step, value in values if step == item.elapsed.steps and value.tag == item.path[1]]
        if item.path[0] == "images":
            pixels = np.asarray(PIL.Image.open(io.BytesIO(value.image.encoded_image_string)))
            np.testing.assert_array_equal(pixels, contact_sheet(item.read()))
            assert (value.image.height, value.image.width, value.image.colorspace) == pixels.shape
        else:
            found = unpack_histogram(item.read())
            assert list(value.histo.bucket) == found.counts.tolist() and value.histo.num == 4
            assert list(value.histo.bucket_limit) == found.edges[1:].tolist()
    assert sum(value.tag == "loss" for _, value in values) == 100


def test_wandb_gets_images_and_histograms_with_their_rows(monkeypatch):
    wandb = types.ModuleType("wandb")
    wandb.__dict__["Image"] = lambda pixels: ("image", pixels.shape)
    wandb.__dict__["Histogram"] = lambda np_histogram: ("histogram", np_histogram[0].sum(), len(np_histogram[1]))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    calls = []
    server: Any = types.SimpleNamespace(log=lambda values, step: calls.append((step, values)))
    run([wandb_logger(server)], stop=40)
    assert [step for step, _ in calls] == list(range(1, 41))
    with_media = {step: values for step, values in calls if "rows" in values}
    assert list(with_media) == [*range(1, 33), 34, 36, 38, 40]
    assert with_media[40]["squares"] == ("image", (9, 9, 3)) and with_media[40]["rows"] == ("histogram", 4, 65)


def test_mlflow_gets_images(monkeypatch):
    entities, mlflow = types.ModuleType("mlflow.entities"), types.ModuleType("mlflow")
    entities.__dict__["Metric"] = lambda *values: values
    mlflow.__dict__["entities"] = entities
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    images = []
    client: Any = types.SimpleNamespace(
        log_batch=lambda run_id, metrics: None,
        log_image=lambda run_id, image, key, step: images.append((run_id, image.shape, key, step)),
    )
    run([mlflow_logger("abc", client=client)], stop=3)
    assert images == [("abc", (9, 9, 3), "squares", number) for number in (1, 2, 3)]
