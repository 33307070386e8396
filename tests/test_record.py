"""What a record says of a run besides its curves: config, origin, memory, images, samples, advice, and differences."""

import argparse
import base64
import dataclasses
import enum
import io
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
from browser import CHROMIUM, DRIVER, MISSING, browser

import millstream as ms
from millstream.callbacks import _media_file
from millstream.callbacks._provenance import GitQuestion
from millstream.callbacks._secrets import masked_command
from millstream.loops import History
from millstream.loops._clock import StepSpan
from millstream.loops.curves import Curve
from millstream.report._advice import divergence, findings, overfitting
from millstream.report._reading import read_run, read_runs
from millstream.report._run_data import RunData, times_of
from millstream.report._summary import all_tables, tiles
from millstream.report.page import make_page, write_report

NASTY = '</script><script>alert("x")</script> <img src=x onerror=alert(1)> <b title=\'&amp;\'>λ "'


@jax.jit
def step(state, batch):
    return ms.logs().add_metric("loss", 1 / (1 + state)), state + 1


@jax.jit
def media_step(state, batch):
    rows, _ = batch
    logs = ms.logs().add_metric("loss", 1 / (1 + state)).add_image("squares", jnp.zeros((4, 4)) + state / 100)
    return logs.add_histogram("values", rows["label"]), state + 1


def make_loader(samples=40, size=8):
    images = np.arange(samples * size * size, dtype=np.float32).reshape(samples, size, size)
    data = {"image": images - 3.0, "label": np.arange(samples) % 10}
    return ms.DataLoader([ms.ArraySampleSource(data, ordering="sequential"), ms.BatchTransform(4)])


def train(record, stop=20, tasks=None, loader=None, **options):
    return ms.train_loop(
        jnp.zeros(()),
        make_loader() if loader is None else loader,
        {ms.on_train_step: step} if tasks is None else tasks,
        callbacks=[record, *options.pop("callbacks", [])],
        stop=stop,
        key=jax.random.key(0),
        **options,
    )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def described(folder):
    return lines(folder / "record.jsonl")[0]["run"]


def history_of(**columns):
    history, count = History(), len(next(iter(columns.values())))
    passed = StepSpan(
        range(1, count + 1), list(range(4, 4 * count + 1, 4)), None, (np.arange(count) / 10).tolist(), 0.0, 0
    )
    history.commit_columns(passed, {("metrics", name): list(values) for name, values in columns.items()})
    return history


# Config, note, command line, commit


class Kind(enum.Enum):
    FAST = 1


@dataclasses.dataclass
class Model:
    width: int = 8
    act: str = "relu"


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (None, {}),
        ({"rate": 0.1, "model": Model(), "sizes": (1, np.int32(2)), "on": np.True_}, {
            "rate": 0.1, "model": {"width": 8, "act": "relu"}, "sizes": [1, 2], "on": True
        }),
        (Model(3), {"width": 3, "act": "relu"}),
        (argparse.Namespace(rate=np.float32(0.5), path=pathlib.PurePosixPath("a/b"), kind=Kind.FAST, none=None), {
            "rate": 0.5, "path": "a/b", "kind": "FAST", "none": None
        }),
        ({"limit": float("inf"), "api_key": "abc", "db": {"password": "x", "host": "y"}, "pad_token": "<pad>"}, {
            "limit": "inf", "api_key": "***", "db": {"password": "***", "host": "y"}, "pad_token": "<pad>"
        }),
    ],
)  # fmt: skip
def test_a_config_is_recorded_as_plain_values(folder, config, plain):
    train(ms.record(folder, config=config, note="why\nnot"), stop=1)
    assert described(folder)["config"] == plain and described(folder)["note"] == "why\nnot"
    page = write_report(folder).read_text()
    assert ("<h3>Config</h3>" in page) == bool(plain)
    assert "abc" not in page and "why\nnot" in page


def nested(levels):
    return {"x": nested(levels - 1)} if levels else 1


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"config": 3}, TypeError, r"record needs config as a dict, a dataclass or an argparse.Namespace. Got 3"),
        ({"config": Model}, TypeError, r"record needs config as a dict"),
        (
            {"config": {"model": {"act": jnp.tanh}}},
            TypeError,
            r"config\['model'\]\['act'\] is .* Give its name, or leave",
        ),
        ({"config": {"sizes": [1, np.zeros(3)]}}, TypeError, r"config\['sizes'\]\[1\] is array\(\[0., 0., 0.\]\)"),
        ({"config": {"x": {1: 2}}}, TypeError, r"names in config that are text. config\['x'\] has 1 \(int\)"),
        ({"config": nested(20)}, ValueError, r"at most 16 levels and 10,000 values"),
        ({"config": {"x": list(range(20_000))}}, ValueError, r"at most 16 levels and 10,000 values"),
        ({"note": 3}, TypeError, r"record needs note"),
        ({"samples": -1}, ValueError, r"record needs samples"),
        ({"samples": 65}, ValueError, r"record needs samples"),
    ],
)
def test_what_cannot_be_recorded_is_named_at_once(folder, options, kind, text):
    with pytest.raises(kind, match=text):
        ms.record(folder, **options)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("command", "masked"),
    [
        (["--token=abc", "--lr=1"], ["--token=***", "--lr=1"]),
        (["--hf-token", "abc", "run"], ["--hf-token", "***", "run"]),
        (["--db.password", "abc"], ["--db.password", "***"]),
        (["wandb_api_key=abc", "optimizer.lr=0.1"], ["wandb_api_key=***", "optimizer.lr=0.1"]),
        (["--apiKey:abc"], ["--apiKey:***"]),
        (["--password", "--verbose"], ["--password", "--verbose"]),
        (["--secret=a=b c"], ["--secret=***"]),
        (["--max-tokens=8", "--pad-token=<pad>", "--tokenizer", "bpe", "--key=3"], None),
        (["--data=s3://user:abc@host/x"], ["--data=s3://user:***@host/x"]),
        (["hf_" + "a" * 30, "x=sk-" + "b" * 40], ["***", "x=***"]),
    ],
)
def test_passwords_and_tokens_of_a_command_line_are_masked(command, masked):
    assert masked_command(command) == (command if masked is None else masked)


def test_a_record_says_how_it_was_started(folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--rate=0.1", "two words", "--token=abc"])
    train(ms.record(folder), stop=1)
    run = described(folder)
    assert run["command"] == ["train.py", "--rate=0.1", "two words", "--token=***"] and run["host"]
    page = write_report(folder).read_text()
    assert "train.py --rate=0.1 &#x27;two words&#x27; &#x27;--token=***&#x27;" in page
    assert lines(folder / "record.jsonl")[-1]["date"] >= run["date"] and ">ended<" in page


def git(folder, *arguments):
    person = ["-c", "user.name=n", "-c", "user.email=e"]
    done = subprocess.run(["git", *person, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_record_has_the_commit_of_the_script_and_whether_files_differ(folder, monkeypatch):
    script = folder / "train.py"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)

    def code_of(name):
        train(ms.record(folder / name), stop=1)
        return [line["code"] for line in lines(folder / name / "record.jsonl") if "code" in line]

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(folder.parent))
    assert code_of("without a repository") == []
    git(folder, "init", "-q")
    assert code_of("without a commit") == []
    script.write_text("one")
    git(folder, "add", "train.py")
    git(folder, "commit", "-qm", "first")
    commit = git(folder, "rev-parse", "HEAD")
    assert code_of("clean") == [{"commit": commit, "dirty": False}]
    script.write_text("two")
    assert code_of("dirty") == [{"commit": commit, "dirty": True}]
    assert f"{commit[:12]}, and files that differ from it" in write_report(folder / "dirty").read_text()
    monkeypatch.setenv("PATH", str(folder))
    assert code_of("without git") == []


def test_git_that_hangs_is_ended(folder, monkeypatch):
    (folder / "git").write_text("#!/bin/sh\nexec sleep 1000\n")
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr("millstream.callbacks._provenance._PATIENCE", 0.05)
    question = GitQuestion()
    question.ask()
    assert question.answer() is None and question.answer(wait=True) is None
    assert question._process is None


# Memory


def test_every_window_has_the_memory_of_the_process(folder):
    train(ms.record(folder), stop=500)
    windows = [line["spent"] for line in lines(folder / "record.jsonl") if "spent" in line]
    assert all(window["host_memory"] > 10_000_000 for window in windows)
    assert not any("device_memory" in window for window in windows)  # the CPU does not say
    times = read_run(folder).times
    assert times is not None and times.memory["host_memory"].tolist() == [window["host_memory"] for window in windows]
    assert next(tile for tile in tiles(read_run(folder)) if tile[0] == "host memory")[1][-2:] in ("MB", "GB")


def test_memory_that_only_some_windows_know_is_handed_on():
    base = {"seconds": 1.0, "steps": 1, "samples": 4, "compiling": 0.0}
    known = {"device_memory": 2e9, "device_memory_peak": 3e9}
    windows = [{"steps": i, "first": i == 1, "spent": base | (known if i > 1 else {})} for i in (1, 2, 3)]
    times = times_of(windows)
    assert times is not None and list(times.memory) == ["device_memory", "device_memory_peak"]
    np.testing.assert_array_equal(times.memory["device_memory"], [np.nan, 2e9, 2e9])
    run = RunData("run", "a record", history_of(loss=[1.0]), times)
    assert ("device memory", "3 GB", "the most of all its devices") in tiles(run)


# Images and samples


def decoded(png):
    return np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(png))))


@pytest.mark.parametrize("options", [{}, {"fuse": 8}], ids=["steps", "fused"])
def test_images_and_histograms_are_in_the_record_and_on_the_page(folder, options):
    train(ms.record(folder), stop=40, tasks={ms.on_train_step: media_step}, **options)
    media = read_run(folder).media
    steps = [*range(1, 33), 34, 36, 38, 40]
    assert [step for step, _ in media.images["squares"]] == steps
    for number, png in media.images["squares"]:
        np.testing.assert_allclose(decoded(png), np.full((4, 4), (number - 1) / 100 * 255), atol=0.51)
    assert [found.step for found in media.histograms["values"]] == steps
    assert all(found.counts.sum() == 4 for found in media.histograms["values"])
    first = media.histograms["values"][0]
    assert (first.low, first.high) == (0.0, 3.0) and first.counts[[0, 21, 42, 63]].tolist() == [1, 1, 1, 1]
    page = write_report(folder).read_text()
    assert page.count('alt="squares at step') == 24 and "squares at step 1" in page and "squares at step 40" in page
    assert '<path class="band c0"' in page and "values at step 40" in page
    assert all(set(line.get("logged", {"loss": 0})) == {"loss"} for line in lines(folder / "record.jsonl"))


def test_a_run_without_images_has_no_file_for_them(folder):
    train(ms.record(folder))
    assert [path.name for path in folder.iterdir()] == ["record.jsonl"]


def test_images_take_a_bounded_number_of_bytes_and_the_page_says_so(folder, monkeypatch):
    monkeypatch.setattr(_media_file, "MOST_BYTES", 3000)
    train(ms.record(folder), stop=40, tasks={ms.on_train_step: media_step})
    assert (folder / "media.jsonl").stat().st_size < 3100
    media = read_run(folder).media
    assert media.full_at is not None and media.full_at <= 40 and media.room == 3000
    assert f"From step {media.full_at:,} on there are no more." in write_report(folder).read_text()


def test_large_images_are_recorded_smaller(folder):
    image = np.random.default_rng(0).integers(0, 256, (1000, 600, 3), np.uint8)
    tasks = [(ms.every(1), lambda state, batch: ms.logs().add_image("x", image)), (ms.every(1), ms.record(folder))]
    ms.loop(0, range(1), tasks)
    ((_, png),) = read_run(folder).media.images["x"]
    np.testing.assert_array_equal(decoded(png), image[::4, ::4])


def test_a_page_of_very_many_images_stays_small(folder):
    noise = np.random.default_rng(0).integers(0, 256, (30, 128, 128, 3), np.uint8)

    def log(state, batch):
        logs = ms.logs()
        for number, image in enumerate(noise):
            logs.add_image(f"image{number}", image).add_histogram(f"histogram{number}", image)
        return logs

    ms.loop(0, range(8), [(ms.every(1), log), (ms.every(1), ms.record(folder))])
    page = write_report(folder).read_text()
    assert (folder / "media.jsonl").stat().st_size > 10_000_000 and len(page) < 8_000_000
    assert page.count('<path class="band c0"') == 24 * 3 and "6 more are in the record." in page
    assert "image0 at step 1" in page and "<h4>image2 " in page


def test_a_resumed_run_has_each_image_once(folder):
    def run(stop):
        tasks = {ms.on_train_step: media_step, ms.every(10): ms.checkpoint(folder)}
        train(ms.record(folder, samples=2), stop=stop, tasks=tasks, resume=folder)

    run(20)
    with (folder / "media.jsonl").open("a") as file:
        file.write('{"steps":25,"image":["squares","not written to its e')
    run(30)
    media = read_run(folder).media
    assert [step for step, _ in media.images["squares"]] == list(range(1, 31))
    assert sum("samples" in line for line in lines(folder / "media.jsonl")) == 1


def test_a_new_run_sets_the_images_of_another_apart_with_its_record(folder):
    train(ms.record(folder), stop=3, tasks={ms.on_train_step: media_step})
    with pytest.warns(UserWarning, match="is now record-1.jsonl"):
        train(ms.record(folder), stop=5)
    assert sorted(path.name for path in folder.iterdir()) == ["media-1.jsonl", "record-1.jsonl", "record.jsonl"]
    assert not read_run(folder).media.images
    assert len(read_run(folder / "record-1.jsonl").media.images["squares"]) == 3
    train(ms.record(folder, overwrite=True), stop=2, tasks={ms.on_train_step: media_step})
    assert len(read_run(folder).media.images["squares"]) == 2


@pytest.mark.parametrize("options", [{}, {"fuse": 8}], ids=["steps", "fused"])
def test_the_first_samples_are_shown_as_images_with_their_labels(folder, options):
    train(ms.record(folder, samples=3), **options)
    samples = read_run(folder).media.samples
    assert samples is not None and samples["words"] == [{"label": "0"}, {"label": "1"}, {"label": "2"}]
    shown = np.stack([decoded(png) for png in samples["images"]["image"]]).astype(int)
    expected = np.arange(3 * 64).reshape(3, 8, 8) / (3 * 64 - 1) * 255  # scaled to what they span
    np.testing.assert_allclose(shown, expected, atol=0.51)
    page = write_report(folder).read_text()
    assert "First samples" in page and "<figcaption>label 2</figcaption>" in page


def test_only_real_samples_are_shown(folder):
    data = {"image": np.zeros((3, 8, 8, 1), np.uint8), "label": np.arange(3)}
    loader = ms.DataLoader([ms.ArraySampleSource(data, ordering="sequential"), ms.BatchTransform(8)])
    train(ms.record(folder, samples=8), loader=loader, stop=1)
    samples = read_run(folder).media.samples
    assert samples is not None and len(samples["images"]["image"]) == len(samples["words"]) == 3


def test_samples_that_are_no_images_are_shown_in_words(folder):
    rng = np.random.default_rng(0)
    batch = {
        "tokens": np.arange(40).reshape(2, 20),
        "text": np.array(["<b>one</b>", "two" * 100]),
        "features": rng.random((2, 30)),
        "price": np.array([1.5, 1 / 3]),
        "key": jax.random.split(jax.random.key(0)),
        "step": 3,
    }
    ms.loop(0, [batch], [(ms.every(1), lambda state: None), (ms.every(1), ms.record(folder, samples=8))])
    samples = read_run(folder).media.samples
    assert samples is not None and not samples["images"] and len(samples["words"]) == 2
    first = samples["words"][0]
    assert first["tokens"] == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, ... (20)"
    assert first["price"] == "1.5" and samples["words"][1]["price"] == "0.3333" and not {"step", "key"} & set(first)
    assert first["features"].startswith("float64 30, from 0.0") and len(samples["words"][1]["text"]) == 200
    page = write_report(folder).read_text()
    assert "&lt;b&gt;one&lt;/b&gt;" in page and "<th scope=col >tokens</th>" in page


def test_samples_of_a_step_that_donates_its_batch_are_said_to_be_gone(folder):
    @jax.jit
    def use(state, batch):
        return state

    def donating(state, batch):
        jax.tree.map(lambda leaf: leaf.delete(), batch)
        return use(state, 0)

    train(ms.record(folder, samples=2), tasks={ms.on_train_step: donating}, stop=2)
    assert "They could not be read: Array has been deleted" in write_report(folder).read_text()


# Advice


def curve(values, label="loss_test"):
    return Curve(label, np.arange(1, len(values) + 1) * 10, np.asarray(values), None)


def healthy(seed):
    """A loss that falls and stays low, with noise of many kinds: relative, absolute, with outliers, and correlated."""
    rng = np.random.default_rng(seed)
    count = int(np.exp(rng.uniform(np.log(6), np.log(400))))
    start = 10 ** rng.uniform(-1, 1.5)
    floor = start * 10 ** rng.uniform(-3, -0.1)
    clean = floor + (start - floor) * np.exp(-np.linspace(0, 1, count) / 10 ** rng.uniform(-2, 0.3))
    kind = rng.integers(4)
    if kind == 0:
        values = clean * np.exp(rng.normal(size=count) * 10 ** rng.uniform(-2.5, -0.3))
    elif kind == 1:
        values = np.abs(clean + rng.normal(size=count) * floor * 10 ** rng.uniform(-2, -0.3))
    elif kind == 2:
        values = np.abs(clean + rng.standard_t(2.5, size=count) * floor * 10 ** rng.uniform(-2, -0.7))
    else:
        noise, memory = rng.normal(size=count) * 10 ** rng.uniform(-2.5, -0.7), rng.uniform(0, 0.8)
        for number in range(1, count):
            noise[number] += memory * noise[number - 1]
        values = clean * np.exp(noise)
    if rng.random() < 0.2:
        values[rng.integers(count)] *= rng.uniform(2, 20)
    return values


def test_noisy_but_healthy_losses_raise_no_alarm():
    alarms = [seed for seed in range(1000) if overfitting(curve(healthy(seed))) or divergence(curve(healthy(seed)))]
    assert alarms == []


def test_a_test_loss_that_rises_again_is_called_overfitted():
    found = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        count = int(np.exp(rng.uniform(np.log(12), np.log(400))))
        time = np.linspace(0, 1, count)
        values = 0.1 + np.exp(-time * rng.uniform(10, 30)) + rng.uniform(0.15, 0.5) * np.maximum(time - 0.3, 0)
        found += bool(overfitting(curve(values * np.exp(rng.normal(size=count) * 0.03))))
    assert found >= 195


def test_a_loss_that_rises_for_good_is_called_diverged():
    found = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        count, begin = int(np.exp(rng.uniform(np.log(60), np.log(4000)))), rng.uniform(0.2, 0.7)
        time = np.linspace(0, 1, count)
        values = 0.2 + 2 * np.exp(-time * 15)
        values += np.where(time > begin, rng.uniform(1.5, 20) * np.minimum(1, (time - begin) * 20), 0)
        found += bool(divergence(curve(values * np.exp(rng.normal(size=count) * 0.2), "loss")))
    assert found >= 195


def test_overfitting_is_said_with_what_to_do():
    test = [*np.linspace(1, 0.1, 10), *np.linspace(0.1, 0.19, 20)]
    run = RunData("run", "a table", history_of(loss=np.linspace(1, 0.01, 30), loss_test=test))
    assert findings(run)[0] == (
        "loss_test was best at step 10 (0.1047) and is 1.8 times that now: ms.callbacks.early_stopping('loss_test', "
        "patience=5) stops there, ms.checkpoint(..., best=1, monitor='loss_test') keeps the best."
    )
    ms.callbacks.early_stopping("loss_test", patience=5)
    ms.checkpoint("run", best=1, monitor="loss_test")


def test_divergence_is_said_with_what_to_do():
    loss = [*np.linspace(2, 0.2, 100), *np.linspace(0.2, 8, 100)]
    assert findings(RunData("run", "a table", history_of(loss=loss)))[0].startswith(
        "loss was lowest around step 100 (0.2818) and has risen to 7.645 for good: a lower learning rate"
    )
    score = RunData("run", "a table", history_of(accuracy=loss))
    assert not findings(score)[0].startswith("accuracy")


def spent(end, seconds=1.0, *, first=False, **uses):
    base = {"seconds": seconds, "steps": 10, "samples": 40, "compiling": 0.0, "data": 0.0, "evaluation": 0.0}
    return {"steps": end, "first": first, "spent": base | uses}


def advised(*windows, **columns):
    return findings(RunData("run", "a record", history_of(**(columns or {"loss": [1.0, 0.5]})), times_of([*windows])))


def test_compiling_in_mid_run_is_said_with_its_steps():
    start = [spent(10, 5.0, first=True, compiling=4.0)]
    again = [spent(100 * number, compiling=0.3 if number % 2 else 0.0) for number in range(1, 13)]
    (said,) = advised(*start, *again)
    assert said.startswith("Programs were compiled again around steps 100, 300, 500 and 3 more, 11 % of the time: ")
    assert "ms.PadTransform" in said and ms.PadTransform is not None
    once = [spent(100 * number, compiling=0.9 if number == 1 else 0.0) for number in range(1, 13)]
    assert not any("compiled again" in said for said in advised(*start, *once))


def test_advice_comes_in_order_of_weight_and_is_three_sentences_at_most():
    windows = [spent(10 * number, data=0.25, evaluation=0.45, callbacks=0.22) for number in range(1, 9)]
    said = advised(*windows)
    assert [text.split(":")[0] for text in said] == [
        "45 % of the time was spent in tests",
        "25 % of the time was spent waiting for data",
        "22 % of the time was spent in callbacks, logging and saving",
    ]
    run = RunData("run", "a record", history_of(loss=[1.0, np.nan]), times_of(windows))
    page = make_page([run])
    assert "loss was not finite once" in page and "22 % of the time" not in page


def test_a_short_run_is_said_to_be_too_short():
    assert advised(spent(10))[-1] == "The run is too short to tell how fast its steps are."
    assert not any("too short" in text for text in advised(*(spent(10 * number) for number in range(1, 9))))


# What differs


def recorded(folder, name, rate, **options):
    target = 1.0 - rate

    @jax.jit
    def step(state, batch):
        return ms.logs().add_metric("loss", target + 1 / (1 + state)), state + 1

    train(
        ms.record(folder / name, config={"rate": rate, "model": {"width": 8}}, **options),
        tasks={ms.on_train_step: step},
    )
    return folder / name


def cells(page, name):
    row = page.split(f"<td >{name}</td>")[1].split("</tr>")[0]
    return [part.split("</td>")[0] for part in row.split("<td >")[1:]]


def test_the_page_of_several_runs_says_what_differs_and_what_does_not(folder):
    paths = [recorded(folder, "a", 0.1), recorded(folder, "b", 0.5), recorded(folder, "c", 0.9, note="<i>last</i>")]
    page = write_report(paths, folder / "page.html").read_text()
    assert cells(page, "config.rate") == ["0.1", "0.5", "0.9"]
    assert cells(page, "best loss") == ["0.95 @20", "0.55 @20", "<b>0.15 @20</b>"]
    assert cells(page, "final loss") == ["0.95", "0.55", "<b>0.15</b>"]
    assert cells(page.split("</section>")[0], "note") == ["", "", "&lt;i&gt;last&lt;/i&gt;"]
    (same,) = [text.split(".</p>")[0] for text in page.split("Identical in all runs: ")[1:]]
    for word in ("config.model.width", "20 steps", "80 samples", f"JAX {jax.__version__}", "pipeline of train", "host"):
        assert word in same.split(", ")
    tables = all_tables(read_runs(paths))
    assert tables.count("<h3>Pipeline: train</h3>") == 1 and tables.count("<h3>Versions</h3>") == 1
    assert tables.count("<h3>Origin</h3>") == 3 and tables.startswith("<h3>All runs</h3>")


def test_of_pipelines_that_differ_the_differences_are_shown(folder):
    for name, loader in (("a", make_loader()), ("b", make_loader(44))):
        train(ms.record(folder / name), loader=loader, stop=5)
    page = write_report([folder / "a", folder / "b"], folder / "page.html").read_text()
    one, other = cells(page, "pipeline: train")
    assert "samples: 40" in one and "samples: 44" in other and "BatchTransform" not in one
    assert all_tables(read_runs([folder / "a", folder / "b"])).count("<h3>Pipeline: train</h3>") == 2


def test_runs_of_which_little_is_known_are_compared_all_the_same():
    runs = [
        RunData(name, "a table", history_of(loss=[1.0, 0.5], accuracy=[0.1, best]))
        for name, best in (("a", 0.5), ("b", 0.75))
    ]
    page = make_page(runs)
    assert cells(page, "best accuracy") == ["0.5 @2", "<b>0.75 @2</b>"]
    assert "best loss" in page.split("Identical in all runs: ")[1].split("</p>")[0]
    assert cells(make_page([runs[0], RunData("none", "a table", History())]), "samples") == ["8", ""]


# Nothing is injected


@pytest.fixture(scope="module")
def hostile(memory):
    """The page of two runs whose every word is hostile."""
    folder = memory / "hostile"

    @jax.jit
    def step(state, batch):
        logs = (
            ms.logs().add_metric("loss", state).add_image(NASTY, jnp.zeros((8, 8))).add_histogram(NASTY, batch[0]["x"])
        )
        return logs, state + 1

    rows = {"x": np.arange(12.0, dtype=np.float32), NASTY: np.zeros((12, 8, 8), np.float32)}
    loader = ms.DataLoader([ms.ArraySampleSource(rows), ms.BatchTransform(4)])
    for name, value in (("a", NASTY), ("b", f"{NASTY}2")):
        record = ms.record(folder / name, config={NASTY: value, "x": {NASTY: [value]}}, note=value, samples=2)
        train(record, tasks={ms.on_train_step: step}, loader=loader, stop=5)
    with (folder / "a" / "media.jsonl").open("a") as file:
        file.write(json.dumps({"steps": 6, "image": ["made up", '"><script>alert(1)</script>']}) + "\n")
        file.write(json.dumps({"steps": 6, "image": ["made up", base64.b64encode(b"<svg>").decode()]}) + "\n")
    return write_report(folder / "a"), write_report([folder / "a", folder / "b"], folder / "both.html")


def test_hostile_names_notes_and_images_are_texts(hostile):
    for page in hostile:
        text = page.read_text()
        assert "<script>alert" not in text and "onerror=alert(1)>" not in text.replace("&gt;", "")
        assert text.count("<script") == 2 and text.count("</script>") == 2
        assert "PHN2Zz" not in text  # base64 that is not a PNG


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING)
def test_in_a_browser_hostile_words_do_nothing_and_images_are_shown(hostile):
    with browser() as window:
        for page in hostile:
            for width in (1200, 390):
                window.size(width, 900)
                window.open(page)
                assert [found for found in window.requests() if not found.startswith("data:")] == [page.as_uri()]
                assert window.messages() == []
                count = "return [...document.querySelectorAll('img')].filter((i) => i.naturalWidth > 0).length"
                assert window.run(count) >= 7
                assert window.run("return document.querySelectorAll('b i, i b, img[onerror], main script').length") == 0
                assert window.run("return document.documentElement.scrollWidth <= window.innerWidth")
                bands = window.run("return [...document.querySelectorAll('.band')].map((p) => p.getBBox().width)")
                assert len(bands) >= 3 and max(bands) > 900
