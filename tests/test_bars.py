"""Progress bars: what they show, where, and what they cost."""

import fcntl
import io
import itertools
import os
import pathlib
import pty
import re
import signal
import struct
import subprocess
import sys
import termios

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pyte
import pytest
from bar_scenes import GOLDEN, PlayedRun, bar_on, scenes
from bar_scenes import Screen as SceneScreen
from conftest import free_address

import millstream as ms
from millstream.callbacks.bar_progress import BarProgress, duration_text, step_time_text
from millstream.loops.column import Column
from millstream.loops.schedules import Epochs
from millstream.text.bar_line import BarLine, Form, cells_of, fit

SCRIPT = pathlib.Path(__file__).parent / "bar_script.py"
PATIENCE = 300


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


class Screen:
    """What a terminal of some width shows of what was written to it."""

    def __init__(self, text, columns):
        self.rows, self.row, self.column = [""], 0, 0
        for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[^\x1b]", text):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self.row += 1
                self.rows += [""] * (self.row == len(self.rows))
            elif part in ("\x1b[K", "\x1b[2K"):
                self.rows[self.row] = self.rows[self.row][: 0 if "2" in part else self.column]
            elif part[0] != "\x1b":
                self._put(part, columns)
            else:
                assert part[-1] in "mhl", f"a screen that does not know {part!r}"

    def _put(self, char, columns):
        if self.column == columns:
            self.row, self.column = self.row + 1, 0
            self.rows += [""] * (self.row == len(self.rows))
        line = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = line[: self.column] + char + line[self.column + 1 :]
        self.column += 1

    def lines(self):
        return [line.rstrip() for line in self.rows if line.strip()]


def the_line(stream):
    """The only line that is left of what a stream got."""
    (line,) = Screen(stream.getvalue(), 200).lines()
    return line


def on_a_terminal(*arguments, columns=100, **environment):
    """Run the script on a terminal of its own; what was written to it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        command(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, env=variables(**environment)
    )
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 65536):
            written += chunk
    except OSError:  # how the other end of a terminal says that it is gone
        pass
    finally:
        os.close(ours)
        process.wait(PATIENCE)
    return written.decode()


def into_a_pipe(*arguments):
    return subprocess.run(command(*arguments), env=variables(), capture_output=True, text=True, timeout=PATIENCE)


def command(*arguments):
    return [sys.executable, "-W", "error", str(SCRIPT), *map(str, arguments)]


def variables(**changes):
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return kept | {"JAX_PLATFORMS": "cpu", "TERM": "xterm"} | changes


@jax.jit
def train_step(state, batch):
    return ms.logs().add_metric("loss", state), state + 1


def batches_of(*sizes):
    return [np.ones(size, np.float32) for size in sizes]


def run(bar, sizes, **options):
    return ms.loop(jnp.float32(0), batches_of(*sizes), {ms.every(1): [train_step, bar]}, **options)


def at_step(step, seconds=1.0, start=0.0, **more):
    """The elapsed of a step, if each takes so long."""
    time = start + step * seconds
    return ms.loops.Elapsed(step, time=time, time_before=time - seconds, samples=step, samples_before=step - 1, **more)


def test_a_running_bar_shows_what_the_readme_says(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    bar = ms.callbacks.keras_bar(total=100)
    for step in range(1, 81):
        bar(at_step(step, 2.1), {"accuracy": 0.61479, "loss": 1.53712})
    last = out.getvalue().split("\r")[-1].removesuffix("\x1b[K")
    assert last == "80/100 [=====================>.....] - ETA: 42s - loss: 1.5371 - accuracy: 0.6148"


def test_by_hand_it_ends_at_its_total_and_begins_again_with_a_new_run(capsys):
    bar = ms.callbacks.keras_bar(total=4)
    for runs in range(2):
        for elapsed, batch in ms.loops.elapse(batches_of(3, 1, 1, 1, 1, 1), stop=6):
            logs = ms.logs()
            logs.updates, _ = train_step(jnp.float32(elapsed.steps), batch)  # pyright: ignore
            assert not bar(elapsed, logs)
        (line,) = capsys.readouterr().out.splitlines()
        assert re.fullmatch(r"4/4 \[=+\] - \d+s - [0-9.]+[mu]?s/step - loss: 2.0000", line), (runs, line)


def test_a_run_by_hand_that_stops_early_is_finished_by_hand(capsys):
    bar = ms.callbacks.keras_bar(total=4)
    for step in (1, 2, 3):
        bar(at_step(step), {"loss": step})
    assert capsys.readouterr().out == ""
    bar.finish()
    assert capsys.readouterr().out == "3/4 [====================>......] - 3s - 1.0s/step - loss: 2.0000\n"
    bar.finish()
    assert capsys.readouterr().out == ""


def test_the_mean_is_exact_and_every_step_has_its_weight(capsys):
    sizes = [5, 1, 1, 3]
    _, history, _ = run(ms.callbacks.keras_bar(total=4), sizes)
    mean = np.average([0.0, 1.0, 2.0, 3.0], weights=sizes)
    assert mean == history.mean("loss")
    assert f"- loss: {mean:.4f}\n" in capsys.readouterr().out


def test_the_mean_is_that_of_the_current_epoch(capsys):
    run(ms.callbacks.keras_bar(total=6), [1, 1, 1, 1, 2, 1], epoch_duration=3)
    assert "loss: 4.0000" in capsys.readouterr().out
    run(ms.callbacks.keras_bar(total=5), [1, 1, 1, 1, 3], epoch_duration=3)
    assert "loss: 3.7500" in capsys.readouterr().out


@pytest.mark.parametrize("epoch", [None, 4])
def test_many_drawings_come_to_the_same_mean_as_one(epoch, monkeypatch, capsys):
    sizes = [1 + number % 4 for number in range(30)]
    run(ms.callbacks.keras_bar(total=30), sizes, epoch_duration=epoch)
    once = capsys.readouterr().out.split(" - ")[-1]
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    run(ms.callbacks.keras_bar(total=30, interval=0.0), sizes, epoch_duration=epoch)
    assert out.getvalue().count("\r") > 30
    assert out.getvalue().split(" - ")[-1].replace("\x1b[K", "") == once


def test_a_step_without_samples_does_not_count(capsys):
    bar = ms.callbacks.keras_bar(total=2)
    bar(ms.loops.Elapsed(1, samples=0, samples_before=0), {"loss": float("nan")})
    bar(ms.loops.Elapsed(2, samples=3, samples_before=0), {"loss": 2.0})
    assert "loss: 2.0000" in capsys.readouterr().out


def test_it_shows_metrics_and_those_losses_that_are_not_metrics(capsys):
    bar = ms.callbacks.keras_bar(total=2, stateful_metrics=["rate"])
    for step in (1, 2):
        logs = ms.logs().add_loss("loss", 10 * step).add_loss("other", 10.0 * step).add_metric("loss", float(step))
        logs.add_stateful_metric("count", step).add_metric("rate", 1e-5 * step).add_metric("loss_test", float(step))
        logs.add_metric("confusion", np.eye(2)).add_output("out", 1.0).add_entry("mine", "own", 1.0)
        bar(at_step(step), logs.add_metric("word", "hello"))
    shown = capsys.readouterr().out.strip().split(" - ")[3:]
    assert shown == ["loss: 1.5000", "other: 15.0000", "rate: 2.0000e-05", "count: 2", "loss_test: 2.0000"]


def test_a_value_that_is_logged_twice_at_a_step_counts_once_and_the_newer_one(monkeypatch):
    class ReadsAll(ms.Observer):
        def observe(self, loop_state, start, stop):
            loop_state.history.collect("loss")

    monkeypatch.setattr(sys, "stdout", out := Terminal())
    again = lambda: ms.logs().add_metric("loss", 8.0)  # noqa: E731
    tasks = {
        ms.every(1): [train_step, ReadsAll(), ms.callbacks.keras_bar(total=3, interval=0.0)],
        ms.loops.last(): again,
    }
    ms.loop(jnp.float32(0), batches_of(1, 1, 1), tasks)
    before, last = out.getvalue().split("\r")[-2:]
    assert "loss: 1.0000" in before and "loss: 3.0000" in last


@pytest.mark.parametrize(
    ("total", "text"),
    [
        (6, r"6/6 \["),
        (ms.at(samples=12), r"12/12 samples \["),
        (ms.at(epochs=2), r"2/2 epochs \["),
        (ms.at(time=3600), r"\ds/1:00:00 \[>"),
        (None, r"6 steps - \d+s - "),
    ],
    ids=str,
)
def test_a_total_can_be_in_any_unit(total, text, capsys):
    run(ms.callbacks.keras_bar(total), [2] * 6, epoch_duration=3)
    *epochs, line = capsys.readouterr().out.splitlines()
    assert re.match(text, line) and len(epochs) == 2


def test_a_bad_total_is_refused():
    with pytest.raises(ValueError, match=r"keras_bar needs total in one unit.*at\(steps=5, epochs=1\)"):
        ms.callbacks.keras_bar(ms.at(5, epochs=1))
    with pytest.raises(TypeError, match="tqdm_bar needs total as steps"):
        ms.callbacks.tqdm_bar("many")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="rich_bar needs stateful_metrics to be a list of names"):
        ms.callbacks.rich_bar(5, stateful_metrics="loss")
    with pytest.raises(ValueError, match=r"keras_bar is to count epochs.*epoch_duration"):
        run(ms.callbacks.keras_bar(ms.at(epochs=1)), [1, 1])


def test_a_missing_package_is_named(monkeypatch):
    for module, make, package in (
        ("tqdm.std", ms.callbacks.tqdm_bar, "tqdm"),
        ("rich.progress", ms.callbacks.rich_bar, "rich"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ImportError, match=rf"_bar needs {package}. Run: pip install 'rich>=.+' 'tqdm>=.+'"):
            make(5)


def test_a_resumed_run_goes_on_where_it_was_with_its_own_speed(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    bar = ms.callbacks.keras_bar(total=100)
    for step in range(51, 62):
        bar(at_step(step, 1.0, start=1000.0))
    lines = [line.removesuffix("\x1b[K") for line in out.getvalue().split("\r")[1:]]
    assert lines[0] == "51/100 [=============>.............] - ETA: ?"
    assert lines[-1] == "61/100 [================>..........] - ETA: 39s"


def test_epochs_that_are_to_come_take_as_long_as_those_before(monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    bar = ms.callbacks.keras_bar(ms.at(epochs=4), width=4)
    for step in range(1, 26):
        bar(at_step(step, epochs=step // 10, epochs_before=(step - 1) // 10))
    lines = [line.removesuffix("\x1b[K") for line in out.getvalue().split("\r")]
    assert lines[9] == "0/4 epochs [>...] - ETA: ?"
    assert lines[21] == "2/4 epochs [==>.] - ETA: 18s" and lines[25] == "2/4 epochs [==>.] - ETA: 14s"


def test_a_resumed_loop_continues_the_mean_of_its_epoch(capsys):
    output = run(ms.callbacks.keras_bar(total=6, verbose=0), [1, 1, 1], epoch_duration=4)
    ms.loop(
        output.state,
        batches_of(1, 1, 1),
        {ms.every(1): [train_step, ms.callbacks.keras_bar(total=6)]},
        history=output.history,
        elapsed=output.elapsed,
        epoch_duration=6,
    )
    epoch, line = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"epoch 1  3 steps  [0-9.]+s  [0-9.]+[mu]?s/step  loss 2.5000", epoch)
    assert re.match(r"6/6 \[=+\].* - loss: 2.5000$", line)


def test_in_a_file_a_line_comes_every_ten_seconds_and_later_more_rarely(capsys):
    bar = ms.callbacks.keras_bar(total=4000)
    for step in range(1, 4001):
        bar(at_step(step))
    steps = [int(line.split("/")[0]) for line in capsys.readouterr().out.splitlines()]
    assert steps[:5] == [10, 20, 30, 40, 50] and steps[-1] == 4000
    assert all(later - earlier >= max(10, 0.05 * earlier) for earlier, later in itertools.pairwise(steps[:-1]))
    assert 60 < len(steps) < 100


def in_a_file(kind, stream, **options):
    """A bar that writes into a file, or what looks like one."""
    from rich.console import Console

    if kind == "rich":
        return ms.callbacks.rich_bar(console=Console(file=stream, width=40), **options)
    return ms.callbacks.tqdm_bar(file=stream, **options) if kind == "tqdm" else ms.callbacks.keras_bar(**options)


def without_times(line):
    return re.sub(r"  [0-9.]+s  [0-9.]+[mu]?s/step", "", line)


@pytest.mark.parametrize("kind", ["keras", "tqdm", "rich"])
@pytest.mark.parametrize("stop", [ms.at(epochs=3), 12], ids=["epochs", "steps"])
def test_in_a_file_every_epoch_has_a_line_with_what_it_has_logged_and_its_test(kind, stop, monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())

    def test_step(state, batch):
        return ms.logs().add_metric("loss", state * 10)

    ms.train_loop(
        jnp.float32(0),
        batches_of(*[1, 2, 3, 4] * 3),
        {"on_train_step": train_step, "on_test_step": test_step},
        callbacks=[in_a_file(kind, out)],
        test_dataset=batches_of(1, 1),
        epoch_duration=4,
        stop=stop,
    )
    *epochs, last = out.getvalue().splitlines()
    means = [np.average(np.arange(4) + 4 * epoch, weights=[1, 2, 3, 4]) for epoch in range(3)]
    of = "/3" if isinstance(stop, ms.loops.Period) else ""
    assert [without_times(line) for line in epochs if line.startswith("epoch")] == [
        f"epoch {epoch + 1}{of}  4 steps  loss {means[epoch]:.4f}  loss_test {40.0 * (epoch + 1):.4f}"
        for epoch in range(3)
    ]
    assert "\r" not in out.getvalue() and "10.0000" in last and re.search(r"loss_test[=:] ?120", last)


def test_a_line_of_an_epoch_has_only_what_that_epoch_has_logged(capsys):
    tested = lambda: ms.logs().add_metric("loss_test", 7.0)  # noqa: E731
    tasks = {ms.every(1): [train_step], ms.every(epochs=2): tested, ms.loops.always(): ms.callbacks.keras_bar()}
    ms.loop(jnp.float32(0), batches_of(*[1] * 9), tasks, epoch_duration=3)
    lines = [without_times(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [
        "epoch 1  3 steps  loss 1.0000",
        "epoch 2  3 steps  loss 4.0000  loss_test 7.0000",
        "epoch 3  3 steps  loss 7.0000",
    ]


def test_rows_that_are_rare_belong_to_the_epoch_of_their_step(capsys):
    def rare(state, batch, elapsed):
        return ms.logs().add_metric("loss", float(elapsed.steps)) if elapsed.steps % 2 == 0 else None

    ms.loop(0, batches_of(*[1] * 9), {ms.every(1): [rare, ms.callbacks.keras_bar()]}, epoch_duration=3)
    lines = [without_times(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [
        "epoch 1  3 steps  loss 2.0000",
        "epoch 2  3 steps  loss 5.0000",
        "epoch 3  3 steps  loss 8.0000",
    ]


def in_epochs(step, length, pause):
    """The elapsed of a step of one second, if each epoch ends with a test of some seconds."""
    ended = (step - 1) // length
    time = step + pause * ended
    return ms.loops.Elapsed(step, step, step // length, time, 0.0, step - 1, ended, time - 1)


def test_in_a_file_a_long_epoch_has_lines_in_between_and_none_beside_its_own(capsys):
    bar = ms.callbacks.keras_bar(ms.at(epochs=3))
    for step in range(1, 91):
        logs = {"loss": float(step)} | ({"loss_test": step / 10} if step % 30 == 0 else {})
        bar(in_epochs(step, 30, pause=5.0), logs)
    lines = [
        re.sub(r" - ETA: \S+| \[.*?\]|  [0-9.]+s  .*?/step", "", line) for line in capsys.readouterr().out.splitlines()
    ]
    assert lines[:4] == [
        "0/3 epochs - loss: 5.5000",
        "0/3 epochs - loss: 10.5000",
        "epoch 1/3  30 steps  loss 15.5000  loss_test 3.0000",
        "1/3 epochs - loss: 33.0000 - loss_test: 3.0000",
    ]
    assert [line for line in lines if line.startswith("epoch")][1:] == [
        "epoch 2/3  30 steps  loss 45.5000  loss_test 6.0000",
        "epoch 3/3  30 steps  loss 75.5000  loss_test 9.0000",
    ]


@pytest.mark.parametrize("kind", ["keras", "tqdm", "rich"])
def test_in_a_file_a_long_test_has_lines_in_between_and_its_epoch_one_after_it(kind, monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    bar = in_a_file(kind, out)
    played = PlayedRun(bar, stop=ms.at(epochs=2), test_step=2.0)
    for step in range(1, 201):
        played.step({"loss": float(step)})
        if step % 100 == 0:
            assert list(played.test()) == list(range(1, 24))
        played.end_step()
    played.finish("it reached its stop")
    lines = out.getvalue().splitlines()
    epochs = [line for line in lines if line.startswith("epoch") and "steps" in line]
    assert epochs == [
        "epoch 1/2  100 steps  1:56  700ms/step  loss 50.5000  accuracy_test 0.9580  loss_test 0.1130",
        "epoch 2/2  100 steps  1:56  700ms/step  loss 150.5000  accuracy_test 0.9580  loss_test 0.1130",
    ]
    first, second = (lines.index(line) for line in epochs)
    trained = [re.search(r"\b(\d+)/100\b", line) for line in lines[:first]]
    tested = [re.search(r"epoch 1/2 testing.* (\d+)/23\b", line) for line in lines[:first]]
    assert [int(found.group(1)) for found in trained if found] == [15, 30, 45, 60, 75, 90]  # ten seconds each
    assert [int(found.group(1)) for found in tested if found] == [2, 7, 12, 17, 22]
    assert second - first > 3 and lines[second + 1 :] == lines[-1:] and "2/2" in lines[-1]


def test_a_test_that_was_interrupted_leaves_its_epoch_to_the_run_that_resumes(tmp_path, capsys):
    asked = []

    def test_step(state, batch):
        asked.append(batch)
        if len(asked) == 3:  # the first batch of the second test
            signal.raise_signal(signal.SIGINT)
        return ms.logs().add_metric("loss", 7.0)

    def train():
        return ms.train_loop(
            jnp.float32(0),
            ms.DataLoader([ms.ArraySampleSource({"x": np.arange(3.0)}), ms.BatchTransform(1)]),
            {"on_train_step": train_step, "on_test_step": test_step},
            callbacks=[ms.callbacks.keras_bar(), ms.checkpoint(tmp_path / "run")],
            test_dataset=batches_of(1, 1),
            stop=ms.at(epochs=3),
            key=jax.random.key(0),
            resume=True,
        )

    written = []
    for _ in range(2):
        train()
        written.append([without_times(line) for line in capsys.readouterr().out.splitlines()])
    (first, left), (*rest, last) = written
    assert first == "epoch 1/3  3 steps  loss 1.0000  loss_test 7.0000" and left.startswith("2/3 epochs [")
    assert re.sub("  [0-9.]+s", "", rest[0]) == "epoch 2/3  0 steps  loss 4.0000  loss_test 7.0000"
    assert rest[1:] == ["epoch 3/3  3 steps  loss 7.0000  loss_test 7.0000"] and last.startswith("3/3 epochs [")


def test_epochs_that_were_one_program_have_no_time_of_a_step(capsys):
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(4.0)}), ms.BatchTransform(2)])
    step = jax.jit(lambda state, batch: (ms.logs().add_metric("loss", state), state + 1))
    tasks = {ms.on_train_step: step}
    options = {"stop": 8, "key": jax.random.key(0), "fuse": 8, "callbacks": [ms.callbacks.keras_bar()]}
    ms.train_loop(jnp.float32(0), loader, tasks, **options)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert len(lines) == 4 and not any("  0.0us/step" in line for line in lines)


def test_very_many_epochs_get_fewer_lines(capsys):
    bar = ms.callbacks.keras_bar(20_000, interval=1e9)
    for step in range(1, 20_001):
        bar(ms.loops.Elapsed(step, epochs=step, epochs_before=step - 1))
    numbers = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert numbers[:1000] == list(range(1, 1001)) and 3000 < len(numbers) < 5000


def test_a_test_loop_has_no_line_of_an_epoch(capsys):
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(8.0)}), ms.BatchTransform(4)])
    step = lambda state: ms.logs().add_metric("loss", 1.0)  # noqa: E731
    ms.test_loop(0, loader, {"on_test_step": step}, callbacks=[ms.callbacks.keras_bar()], key=jax.random.key(0))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("loss: 1.0000")


def test_on_a_terminal_a_line_of_every_epoch_stays(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    bar = ms.callbacks.keras_bar(ms.at(epochs=3), interval=50)
    for step in range(1, 10):  # the test at the end of an epoch takes so long that only its first step is drawn
        logs = {"loss": jnp.float32(step)} | ({"loss_test": float(step)} if step % 3 == 0 else {})
        bar(in_epochs(step, 3, pause=100.0), logs)
    lines = [re.sub("  [0-9:.]+s?  [0-9.]+s/step", "", line) for line in Screen(out.getvalue(), 100).lines()]
    assert lines[:3] == [f"epoch {n}/3  3 steps  loss {3 * n - 1}.0000  loss_test {3 * n}.0000" for n in (1, 2, 3)]
    assert re.fullmatch(r"3/3 epochs \[=+\] - 3:29 - .*/step - loss: 8.0000 - loss_test: 9.0000", lines[3])


def test_a_stateful_metric_that_was_never_logged_is_named(capsys):
    bar = ms.callbacks.keras_bar(3, stateful_metrics=["los", "loss"])
    with pytest.warns(
        UserWarning, match=r"keras_bar: 'los' of stateful_metrics was never logged\. Did you mean 'loss'\?"
    ):
        run(bar, [1] * 3)
    shared = ms.callbacks.keras_bar(3, stateful_metrics=["metrics.loss"])
    run(shared, [1] * 3)
    ms.test_loop(0, batches_of(1), {"on_test_step": lambda: ms.logs().add_metric("other", 1.0)}, callbacks=[shared])


@pytest.mark.parametrize("columns", [120, 60, 30, 8])
def test_no_line_is_wider_than_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    bar = ms.callbacks.keras_bar(total=20)
    for step in range(1, 21):
        bar(at_step(step), {"損失": 0.5} | {f"metric_{number}": 0.25 for number in range(10)})
    text = out.getvalue()
    screen = Screen(text.replace("損失", "####"), columns)  # these take two cells each
    assert len(screen.lines()) == 1 and text.count("\r") == 21
    assert len(screen.lines()[0]) < columns
    if columns == 120:
        assert "損失 0.5000 metric_0 0.2500" in text and "metric_5 0.2500" in text and "metric_9" not in text


def test_a_shorter_line_leaves_nothing_of_a_longer_one(monkeypatch):
    for term, erases in (("dumb", False), ("xterm", True)):
        monkeypatch.setenv("TERM", term)
        monkeypatch.setattr(sys, "stdout", out := Terminal())
        line = BarLine()
        line.write("a long text")
        line.write("short", end=True)
        assert ("\x1b" in out.getvalue()) == erases
        assert Screen(out.getvalue(), 80).lines() == ["short"]


IN_A_NOTEBOOK = """
import jax, numpy as np
import millstream as ms

def run(bar):
    step = jax.jit(lambda state, batch: (ms.logs().add_metric("loss", state), state + 1))
    tasks = {"on_train_step": step, "on_test_step": lambda state: ms.logs().add_metric("loss", 1.0)}
    data, test, stop = [np.ones(2, np.float32)] * 6, [1.0, 2.0], ms.at(epochs=2)
    ms.train_loop(np.float32(0), data, tasks, callbacks=[bar], test_dataset=test, epoch_duration=3, stop=stop)
"""


def test_a_saved_notebook_has_the_lines_of_epochs_and_the_final_state_of_the_bar():
    import nbclient
    import nbformat

    bars = ["keras_bar(interval=0.0)", "rich_bar(interval=0.0)", "tqdm_bar(mininterval=0.0)"]
    cells = [nbformat.v4.new_code_cell(IN_A_NOTEBOOK), *(f"run(ms.callbacks.{bar})" for bar in bars)]
    cells = [cell if not isinstance(cell, str) else nbformat.v4.new_code_cell(cell) for cell in cells]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=PATIENCE).execute()
    finals = []
    for cell in notebook.cells[1:]:
        bar, *streams = cell.outputs
        assert {stream.name for stream in streams} == {"stdout"}
        lines = [without_times(line) for stream in streams for line in stream.text.splitlines()]
        assert lines == [f"epoch {n}/2  3 steps  loss {3 * n - 2}.0000  loss_test 1.0000" for n in (1, 2)]
        finals.append(re.sub(r"\x1b\[[0-9;]*m", "", bar.data["text/plain"]))
    assert "2/2 epochs" in notebook.cells[2].outputs[0].data["text/html"]
    ends = [
        r"2/2 epochs \[=+\] - .*loss: 4.0000 - loss_test: 1.0000",
        r"2/2 epochs ━+ .*loss: 4.0000 - loss_test: 1.0000",
    ]
    ends.append(r"100%\|█+\| 2/2 \[.*, loss=4.0000, loss_test=1.0000\]")
    assert all(re.fullmatch(end, final.strip()) for end, final in zip(ends, finals, strict=True)), finals


def test_what_cannot_be_written_does_not_end_a_run(monkeypatch):
    class Gone(Terminal):
        def write(self, text):
            raise BrokenPipeError

    for stream in (Gone(), None):
        monkeypatch.setattr(sys, "stdout", stream)
        assert run(ms.callbacks.keras_bar(total=3, interval=0.0), [1] * 3).elapsed.steps == 3


def test_names_that_cannot_be_shown_are_spelled_out(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    ms.callbacks.keras_bar(total=1)(at_step(1), {"größe": 1.0, "two\nlines": 2.0})
    assert raw.getvalue().endswith(b" - gr??e: 1.0000 - two\\nlines: 2.0000\n")


def test_a_silent_bar_shows_nothing(capsys):
    for bar in (
        ms.callbacks.keras_bar(5, verbose=0),
        ms.callbacks.tqdm_bar(5, disable=True),
        ms.callbacks.rich_bar(5, disable=True),
    ):
        run(bar, [1] * 5)
        bar(at_step(5), {"loss": 1.0})
    run(ms.callbacks.keras_bar(5), [1] * 5, stop=0)
    assert capsys.readouterr() == ("", "")


def test_nothing_is_read_from_the_device_between_drawings(monkeypatch, capsys):
    reads, during = [], []
    read = Column.read
    monkeypatch.setattr(Column, "read", lambda self, keep=0: (reads.append(keep), read(self, keep))[1])
    bar = ms.callbacks.keras_bar(total=20, interval=3600)
    ms.loop(jnp.float32(0), batches_of(*[1] * 20), {ms.every(1): [train_step, lambda: during.append(len(reads)), bar]})
    assert during == [0] * 20 and reads == [0]
    assert "loss: 9.5000" in capsys.readouterr().out


def test_a_drawing_reads_no_step_that_may_be_under_way(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    waiting = []

    def look(state, batch, elapsed, loop_state):
        waiting.extend(len(column._waiting) for column in loop_state.history.columns().values())

    ms.loop(
        jnp.float32(0), batches_of(*[1] * 6), {ms.every(1): [train_step, look, ms.callbacks.keras_bar(6, interval=0.0)]}
    )
    assert waiting == [1, 2, 2, 2, 2]


def test_a_test_result_is_shown_as_soon_as_its_step_is_over(monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    tested = lambda: ms.logs().add_metric("loss_test", jnp.float32(7))  # noqa: E731
    bar = ms.callbacks.keras_bar(6, interval=0.0)
    ms.loop(jnp.float32(0), batches_of(*[1] * 6), {ms.every(1): train_step, ms.at(2): tested, ms.loops.always(): bar})
    assert ["loss_test: 7.0000" in line for line in out.getvalue().split("\r")[1:]] == [False] * 4 + [True] * 4


def test_a_failing_loop_leaves_the_line_and_does_not_count_the_failed_step(monkeypatch):
    def fail(state, batch, elapsed):
        if elapsed.steps == 4:
            raise RuntimeError("no")

    for every in (1, 2):
        monkeypatch.setattr(sys, "stdout", out := Terminal())
        tasks = [(ms.every(1), [train_step, fail]), (ms.every(every), ms.callbacks.keras_bar(4, interval=0.0))]
        with pytest.raises(RuntimeError):
            ms.loop(jnp.float32(0), batches_of(1, 1, 1, 1), tasks)
        assert re.fullmatch(r"[23]/4 \[.*loss: 1.0000", the_line(out))
        assert out.getvalue().endswith("\n")


def test_a_bar_that_looks_now_and_then_still_shows_the_last_step(capsys):
    ms.loop(jnp.float32(0), batches_of(*[1] * 7), {ms.every(1): train_step, ms.every(3): ms.callbacks.keras_bar(7)})
    assert re.match(r"7/7 \[=+\].*loss: 3.0000", capsys.readouterr().out)


def test_bars_register_themselves_and_are_silent_inside_of_training(capsys):
    bar = ms.callbacks.keras_bar(total=6)
    tasks = {ms.on_train_step: train_step, ms.on_test_step: lambda state: ms.logs().add_metric("loss", state * 10)}
    ms.train_loop(
        jnp.float32(0),
        batches_of(*[1] * 6),
        {**tasks, ms.loops.on_test_batch_end: [ms.callbacks.keras_bar(total=2)]},
        callbacks=[bar],
        test_dataset=batches_of(1, 1),
        epoch_duration=2,
    )
    assert re.fullmatch(r"6/6 \[=+\] .* - loss: 4.5000 - loss_test: 60.0000", capsys.readouterr().out.splitlines()[-1])
    ms.test_loop(jnp.float32(1), batches_of(1, 1), {"on_test_step": tasks[ms.on_test_step]}, callbacks=[bar])
    assert re.fullmatch(r"2/6 \[=+>\.+\] .* - loss: 10.0000\n", capsys.readouterr().out)


def test_a_bar_shared_with_an_inner_loop_shows_the_outer_one(capsys):
    bar = ms.callbacks.keras_bar(total=3)
    inner = {ms.every(1): [train_step, bar]}

    def run_inner(state):
        ms.loop(jnp.float32(0), batches_of(1), inner)

    ms.loop(jnp.float32(0), batches_of(1, 1, 1), {ms.every(1): [train_step, run_inner, bar]})
    assert re.fullmatch(r"3/3 .* - loss: 1.0000\n", capsys.readouterr().out)


def test_a_fused_loop_shows_the_same(capsys):
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(10.0)}), ms.BatchTransform(4)])
    lines = []
    for fuse in (None, 4):
        bar = ms.callbacks.keras_bar(total=6, interval=600)  # however slow the machine is
        ms.loop(jnp.float32(0), loader, {ms.every(1): [train_step, bar]}, stop=6, key=jax.random.key(0), fuse=fuse)
        lines.append(re.sub(r" (- )?[0-9.]+s (- )?.*?/step", "", capsys.readouterr().out).splitlines())
    epochs = ["epoch 1  3 steps   loss 0.8000", "epoch 2  3 steps   loss 3.8000"]
    assert lines[0] == lines[1] == [*epochs, "6/6 [===========================] - loss: 3.8000"]


def test_bars_look_as_they_did_on_terminals_of_three_widths():
    """If they are meant to look different: python tests/bar_scenes.py."""
    drawn = scenes()
    assert drawn == GOLDEN.read_text()
    blocks = [block.splitlines() for block in drawn.split("=== ")[1:]]
    for title, *lines in blocks:
        columns = int(title.split()[-2])
        assert all(cells_of(line) <= columns for line in lines), title
    training = [line for title, *lines in blocks if title.startswith("training") for line in lines]
    later = [line for line in training if not line.startswith("---") and not re.search(r"\b0/100", line)]
    assert len(later) == 90 and all("loss" in line for line in later)


names = st.text("abcdefgh損失", min_size=1, max_size=40)


@hypothesis.given(
    width=st.integers(1, 150),
    values=st.lists(st.tuples(names, st.sampled_from(["0.1291", "nan", "3.0000e-05"])), max_size=8),
    texts=st.lists(st.integers(0, 60), min_size=1, max_size=3),
)
def test_a_line_fits_and_its_bar_and_texts_make_room_for_values(width, values, texts):
    texts = sorted(texts, reverse=True)
    forms = [Form(cells, least=5 * (number == 0)) for number, cells in enumerate(texts)]
    forms.append(Form(0, " ", " ", spare=True))
    number, bar, shown = fit(forms, values, width, bar=20)
    used = forms[number].cells + bar + cells_of(shown)
    complete = {index for index, form in enumerate(forms[:-1]) if form.takes(form.text(values), width)}
    assert used <= width and bar <= 20 and (bar == 0) == (number != 0)
    if complete:  # then nothing is left out, and no text is shortened without need
        assert number == min(complete) and shown == forms[number].text(values)
        assert bar == (min(20, width - texts[0] - cells_of(shown)) if number == 0 else 0)
    elif values and width >= 20:  # the first value is there, whatever its name
        assert values[0][1] in shown


def test_what_is_monitored_comes_after_the_loss_and_results_of_tests_come_last(capsys):
    logs = {"b": 1.0, "a": 2.0, "loss": 3.0, "loss_a": 4.0, "a_test": 5.0, "loss_test": 6.0, "b_valid": 7.0}
    stopping, bar = ms.callbacks.early_stopping("metrics.a_test", patience=9), ms.callbacks.keras_bar()
    ms.loop(0, range(2), {ms.every(1): [lambda: ms.logs().add_metrics(logs), stopping, bar]})
    shown = [part.split(":")[0] for part in capsys.readouterr().out.strip().split(" - ")[3:]]
    assert shown == ["loss", "a_test", "b", "a", "loss_a", "loss_test", "b_valid"]
    bar = ms.callbacks.keras_bar()
    for step in (1, 2):
        bar(at_step(step), {"accuracy": 1.0, "train_loss": 2.0, "loss_test": 3.0})
    bar.finish()
    assert [part.split(":")[0] for part in capsys.readouterr().out.strip().split(" - ")[3:]] == [
        "train_loss",
        "accuracy",
        "loss_test",
    ]


def test_a_checkpoint_says_what_it_monitors(tmp_path):
    assert ms.checkpoint(tmp_path / "run", best=1, monitor="loss_test").monitored == "loss_test"
    assert ms.checkpoint(tmp_path / "run").monitored is None


def drawn_by(stream):
    """All that was drawn on a terminal, one line over the other."""
    return [line.replace("\x1b[K", "").rstrip() for line in stream.getvalue().split("\r")[1:]]


@pytest.mark.parametrize("fuse", [None, 5])
def test_a_run_of_epochs_shows_the_steps_of_each_and_of_its_tests(fuse, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(20.0)}), ms.BatchTransform(2)])
    ms.train_loop(
        jnp.float32(0),
        loader,
        {"on_train_step": train_step, "on_test_step": lambda state: ms.logs().add_metric("loss", 7.0)},
        callbacks=[ms.callbacks.keras_bar(interval=0.0)],
        test_dataset=loader,
        stop=ms.at(epochs=2),
        key=jax.random.key(0),
        fuse=fuse,
    )
    drawn = drawn_by(out)
    places = [re.match(r"(epoch \d/2(?: testing)?) \[.*\] (\d+/\d+) - ", line) for line in drawn]
    shown = [place.groups() for place in places if place is not None]
    steps = range(1, 11) if fuse is None else (5, 10)
    expected = [("epoch 1/2", "0/10")]
    for epoch in ("epoch 1/2", "epoch 2/2"):
        expected += [(epoch, f"{step}/10") for step in steps if step < 10]
        expected += [(f"{epoch} testing", f"{step}/10") for step in range(1, 11)]
        expected += [(epoch, "10/10")]
    assert [*dict.fromkeys(shown)] == expected
    etas = [re.search(r"ETA: (\S+)", line) for line in drawn if "testing" not in line]
    assert [eta.group(1) == "?" for eta in etas if eta is not None] == [True, True, *[False] * (len(shown) - 22)]


def test_the_time_that_is_left_counts_tests_to_come_and_no_time_of_a_test_as_that_of_steps():
    progress = BarProgress(ms.at(epochs=4), ms.loops.Elapsed(epochs=0, epochs_before=0), Epochs(10))
    for step in range(1, 11):
        progress.move(ms.loops.Elapsed(step, epochs=step // 10, epochs_before=0, time=float(step)))
        assert progress.seconds_left == (None if step == 1 else 40 - step)
    progress.move(ms.loops.Elapsed(10, epochs=1, epochs_before=0, time=15.0), 5.0)
    assert progress.seconds_left == 30 + 3 * 5
    for step in range(11, 20):
        progress.move(ms.loops.Elapsed(step, epochs=1, epochs_before=1, time=step + 5.0), 5.0)
        assert progress.seconds_left == pytest.approx(40 - step + 3 * 5)
    assert progress.seconds_per_step == 1.0


def test_an_inner_loop_that_has_no_bar_is_shown_by_that_of_the_loop_around_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stdout", out := Terminal())

    def test(state):
        return ms.test_loop(state, batches_of(1, 1), {"on_test_step": lambda: ms.logs().add_metric("loss", 7.0)})

    def other(state):
        return ms.loop(state, batches_of(1, 1, 1), {ms.every(1): lambda: None}, stop=2)

    inner = [ms.inner_loop("test", test), ms.inner_loop("other", other)]
    tasks = {ms.every(1): train_step, ms.every(2): inner, ms.loops.always(): ms.callbacks.keras_bar(interval=0.0)}
    ms.loop(jnp.float32(0), batches_of(*[1] * 4), tasks, stop=4)
    heads = [re.split(r" \[| - ", line)[0] for line in drawn_by(out)]
    tested = lambda step: [f"{step}/4 testing 1 step", f"{step}/4 testing 2 steps", *[f"{step}/4 inner loop"] * 2]  # noqa: E731
    assert heads == ["0/4", "1/4", *tested(2), "2/4", "3/4", *tested(4), "4/4", "4/4"]
    assert "loss_test: 7.0000" in drawn_by(out)[-1]


def test_data_of_unknown_length_show_steps_and_pace(monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    source = ms.sources.IterableSource(lambda: iter({"x": np.float32(i)} for i in range(6)))
    loader = ms.DataLoader([source, ms.BatchTransform(2)])
    tasks = {ms.every(1): [train_step, ms.callbacks.keras_bar(interval=0.0)]}
    ms.loop(jnp.float32(0), loader, tasks, key=jax.random.key(0), stop=ms.at(time=3600) | ms.at(3))
    assert [re.split(" - ", line)[0] for line in drawn_by(out)] == [
        "0 steps",
        "1 step",
        "2 steps",
        "3 steps",
        "3 steps",
    ]


def test_a_step_between_drawings_costs_a_bar_no_call(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    called = []

    def profile(frame, event, arg):
        if event in ("call", "c_call"):
            called.append(frame.f_code.co_name if event == "call" else arg.__name__)

    for kind in ("keras", "rich", "tqdm"):
        bar = on_a_screen(kind, {"keras": "interval", "rich": "interval", "tqdm": "mininterval"}[kind])
        run_of = PlayedRun(bar, stop=ms.at(epochs=2))
        for step in range(1, 50):
            run_of.step({"loss": 1.0})
            called.clear()
            sys.setprofile(profile)
            bar.observe(run_of.state, step, step)
            sys.setprofile(None)
            assert called == ["observe", "setprofile"] or step == 1, (kind, step, called)
        run_of.finish("interrupted")


def on_a_screen(kind, interval):
    """A bar that draws once in a million seconds."""
    return bar_on(kind, SceneScreen(80), 80, **{interval: 1e6})


def test_times_are_written_as_people_write_them():
    seconds = [0.4, 42, 59.6, 187, 7509, 86400 * 3 + 14 * 3600 + 5 * 60]
    assert [*map(duration_text, seconds)] == ["0s", "42s", "1:00", "3:07", "2:05:09", "3d 14:05"]
    assert [*map(step_time_text, [63, 1.25, 0.034, 1.2e-4])] == ["63s/step", "1.2s/step", "34ms/step", "120us/step"]


def test_a_tqdm_bar_counts_in_any_unit_and_is_closed():
    for total, text in ((6, "6/6 "), (ms.at(samples=12), "12/12 "), (ms.at(epochs=2), "2/2 "), (None, "6step ")):
        out = io.StringIO()
        run(ms.callbacks.tqdm_bar(total, desc="digits", file=out, mininterval=0.0), [2] * 6, epoch_duration=3)
        lines = out.getvalue().splitlines()
        assert all(line.startswith("digits: ") for line in lines) and "\r" not in out.getvalue()
        assert text in lines[-1] and re.search(r"loss=4.0000\]$", lines[-1])
        assert "digits: epoch 1:  67%|######6   | 2/3 [" in out.getvalue() or total not in (None, ms.at(epochs=2))
    out = io.StringIO()
    run(ms.callbacks.tqdm_bar(ms.at(time=100), file=out), [2] * 6)
    assert re.search(r"\d/100s \[00:0\d<", out.getvalue())


def test_a_tqdm_bar_takes_all_that_tqdm_takes():
    run(ms.callbacks.tqdm_bar(5, file=(out := Terminal()), miniters=2, initial=1, mininterval=0.0), [1] * 5)
    assert "1/5 [" in out.getvalue().split("\r")[1] and "5/5 [" in out.getvalue().split("\r")[-1]
    for stream, is_silent in ((io.StringIO(), True), (Terminal(), False)):
        run(ms.callbacks.tqdm_bar(5, file=stream, disable=None), [1] * 5)
        assert (stream.getvalue() == "") == is_silent
    with pytest.raises(TypeError, match="tqdm_bar takes the options of tqdm, which has no colours"):
        ms.callbacks.tqdm_bar(5, colours="red")
    with pytest.raises(TypeError, match="colours") as caught:
        run(ms.callbacks.rich_bar(5, colours="red"), [1] * 5)
    assert not any("Ending the loop failed" in note for note in caught.value.__notes__)


def test_a_tqdm_bar_of_a_resumed_run_begins_where_it_was():
    out = Terminal()
    run(ms.callbacks.tqdm_bar(6, file=out), [2] * 3, elapsed=ms.loops.Elapsed(steps=3, samples=6))
    assert "3/6 [" in out.getvalue().split("\r")[1] and "6/6 [" in out.getvalue().split("\r")[-1]


def test_a_rich_bar_counts_in_any_unit():
    from rich.console import Console

    for total, text in ((6, "6/6"), (ms.at(samples=12), "12/12 samples"), (ms.at(epochs=2), "2/2 epochs")):
        console = Console(file=(out := io.StringIO()), width=90)
        run(ms.callbacks.rich_bar(total, desc="digits [1]", console=console), [2] * 6, epoch_duration=3)
        first, *_, line = out.getvalue().splitlines()
        assert line.startswith(f"digits [1] {text} ━━━") and line.rstrip().endswith("loss: 4.0000")
        assert first.startswith("digits [1] epoch 1")


def test_on_a_real_terminal_lines_of_epochs_stay_with_their_loss_at_any_width():
    written = on_a_terminal("train", columns=120)
    screen = pyte.Screen(120, 60)
    pyte.Stream(screen).feed(written)
    lines = [line.rstrip() for line in screen.display if line.strip()]
    assert lines.pop() == "and so on" and len(lines) == 4 * 12 and written.count("testing") >= 4 * 9
    for number, columns in enumerate([*[120] * 3, *[80] * 3, *[40] * 3, *[50] * 3]):
        *epochs, last = lines[4 * number : 4 * number + 4]
        assert [re.sub("  [0-9.]+s", "", line)[:23] for line in epochs] == [
            f"epoch {epoch}/3  loss {20 * epoch - 9.5:.4f}" for epoch in (1, 2, 3)
        ]
        assert re.match(r"3/3 .*loss[ =]50.5000", last)
        # The first epoch of the last three runs was on a terminal of 120.
        assert all(len(line) <= columns for line in [*epochs[columns == 50 :], last]), (number, lines)


def test_the_log_of_a_killed_job_has_all_finished_epochs():
    done = into_a_pipe("kill")
    assert done.returncode == -signal.SIGKILL and done.stderr == ""
    lines = [without_times(line) for line in done.stdout.splitlines()]
    assert [line[:11] for line in lines] == ["epoch 1/4  ", "epoch 2/4  ", "epoch 3/4  "]
    tests = [re.sub(r"20 steps  (loss \S+)  .*(  loss_test \S+)", r"\1\2", line[11:]) for line in lines]
    assert tests == [f"loss {20 * n - 9.5:.4f}  loss_test {200 * n + 10:.4f}" for n in (1, 2, 3)]


@pytest.mark.parametrize("bar", ["keras", "tqdm", "rich"])
def test_on_a_real_terminal_one_line_is_left_and_the_program_goes_on_below(bar):
    written = on_a_terminal(bar, 12, 12)
    assert written.count("\r") > 12
    line, after = Screen(written, 100).lines()
    assert "12/12" in line and len(line) <= 100 and after == "and so on"


def test_on_a_real_terminal_a_traceback_begins_on_a_new_line():
    lines = Screen(on_a_terminal("keras", 5, 9, "fail", columns=200, TERM="dumb"), 200).lines()
    assert re.match(r"4/9 \[=+>\.+\] \d+s loss ", lines[0]) and lines[1] == "Traceback (most recent call last):"
    assert "the last step fails" in "".join(lines)


def test_into_a_pipe_go_whole_lines():
    done = into_a_pipe("keras", 7, 7)
    line, after = done.stdout.splitlines()
    assert "\r" not in done.stdout and after == "and so on" and done.stderr == ""
    assert " - loss: 3.0769 - another_long_name_0: 0.0000 - " in line and line.endswith(" - newest: 6.0000")


def test_of_several_processes_only_the_first_draws():
    address = free_address()
    processes = [
        subprocess.Popen(
            command("keras", 3, 3, "hosts", address, number), env=variables(), stdout=subprocess.PIPE, text=True
        )
        for number in range(2)
    ]
    first, second = (process.communicate(timeout=PATIENCE)[0] for process in processes)
    assert first.startswith("3/3 [") and second == "and so on\n"
