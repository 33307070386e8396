"""Writers of logs: files that stay right whatever happens, servers that may be away, and nobody who waits."""

import csv
import gc
import json
import math
import pathlib
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import masked_crc32c

import millstream as ms
from millstream.callbacks import csv_logger, jsonl_logger, mlflow_logger, tensorboard, wandb_logger
from millstream.callbacks._writer import RowCursor, Sink, Writer, entry_name
from millstream.loops import train_loop
from millstream.loops._clock import StepSpan
from millstream.loops.loop_state import LoopState

UNITS = ["steps", "samples", "epochs", "time", "date"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert threads() == []


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("millstream ")]


@jax.jit
def step(state, batch):
    return ms.logs().add_metric("loss", 1 / (1 + state)).add_metric("count", state.astype(int)), state + 1


def run(writer, stop, **options):
    return ms.loop(jnp.zeros(()), batches(), {ms.every(1): [step, writer]}, stop=stop, **options)


def batches():
    while True:
        yield np.zeros(4)


def read_csv(path):
    """A file as lists by column, None for what is empty."""
    with open(path, newline="") as file:
        header, *rows = csv.reader(file)
    assert all(len(row) == len(header) for row in rows)
    columns = zip(*rows, strict=True) if rows else [()] * len(header)
    return {
        name: [float(field) if field else None for field in column]
        for name, column in zip(header, columns, strict=True)
    }


def read_jsonl(path):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def read_events(folder):
    """All events of a folder, with every checksum looked at."""
    events = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            record, frame = data[12 : 12 + length], data[: 16 + length]
            assert struct.unpack("<I", frame[8:12]) == (masked_crc32c(frame[:8]),)
            assert struct.unpack("<I", frame[-4:]) == (masked_crc32c(record),)
            events.append(Event.FromString(record))
            data = data[16 + length :]
    return events


def scalars(folder):
    return [
        (event.step, value.tag, value.simple_value) for event in read_events(folder) for value in event.summary.value
    ]


class Recording(Sink):
    """A place that keeps what is written to it."""

    caller = "recording"

    def __init__(self, patience=None, before=lambda: None):
        self.patience, self.before = patience, before
        self.rows, self.closed = [], False

    def write(self, rows):
        self.before()
        self.rows += rows

    def close(self):
        self.closed = True


def by_hand(writer, steps):
    for number in steps:
        writer(ms.loops.Elapsed(steps=number, samples=4 * number), {"loss": 1 / number})


def test_a_csv_file_is_the_table_of_the_history(tmp_path):
    _, history, _ = run(csv_logger(tmp_path / "new" / "run.csv"), 600, epoch_duration=100)
    assert read_csv(tmp_path / "new" / "run.csv") == history.to_dict()
    assert (tmp_path / "new" / "run.csv").read_text().startswith("steps,samples,epochs,time,date,count,loss\n1,4,0,")


def test_lines_of_json_hold_the_rows_and_are_read_as_a_history(tmp_path):
    _, history, _ = run(jsonl_logger(tmp_path / "run.jsonl"), 300)
    table = history.to_dict()
    assert read_jsonl(tmp_path / "run.jsonl") == [
        {name: values[row] for name, values in table.items()} for row in range(300)
    ]
    assert ms.loops.History.from_jsonl(tmp_path / "run.jsonl").to_dict() == table


def test_tensorboard_gets_every_scalar_with_step_and_date(tmp_path):
    _, history, _ = run(tensorboard(tmp_path / "run"), 300)
    version, *events = read_events(tmp_path / "run")
    assert version.file_version == "brain.Event:2"
    assert [event.step for event in events] == history.collect("steps")
    assert [event.wall_time for event in events] == history.collect("date")
    for name in ("loss", "count"):
        assert [value for _, tag, value in scalars(tmp_path / "run") if tag == name] == history.collect(name)


def test_columns_that_come_late_get_a_header_and_leave_no_gaps(tmp_path):
    def evaluate(state):
        return ms.logs().add_metric("loss_test", state * 2).add_metric("a, b", 1)

    def once_more(state):
        return ms.logs().add_entry("mine", "rare", True)

    writer = csv_logger(tmp_path / "run.csv")
    tasks = {ms.every(1): [step, writer], ms.every(700): evaluate, ms.at(1500): once_more}
    _, history, _ = ms.loop(jnp.zeros(()), batches(), tasks, stop=3000)
    table = read_csv(tmp_path / "run.csv")
    assert list(table) == [*UNITS, "count", "loss", "loss_test", "a, b", "rare"]
    assert table == history.to_dict()
    assert [path.name for path in tmp_path.iterdir()] == ["run.csv"]


def test_numbers_that_json_does_not_have_are_text(tmp_path):
    values = [math.nan, math.inf, -math.inf, 1.5]
    with jsonl_logger(tmp_path / "a.jsonl") as lines, csv_logger(tmp_path / "a.csv") as table:
        for number, value in enumerate(values, start=1):
            lines(ms.loops.Elapsed(steps=number), {"loss": jnp.float32(value)})
            table(ms.loops.Elapsed(steps=number), {"loss": jnp.float32(value)})
    assert [row["loss"] for row in read_jsonl(tmp_path / "a.jsonl")] == ["NaN", "Infinity", "-Infinity", 1.5]
    np.testing.assert_array_equal(read_csv(tmp_path / "a.csv")["loss"], values)


def test_only_single_numbers_are_written():
    sink = Recording()
    with Writer(sink) as writer:
        writer(ms.loops.Elapsed(steps=1), ms.logs().add_metric("x", 1).add_output("y", 2.0).add_metric("z", np.ones(3)))
        writer(ms.loops.Elapsed(steps=2), {"word": "hello", "complex": 1j, "yes": True, "half": jnp.bfloat16(0.5)})
        writer(ms.loops.Elapsed(steps=3), ms.logs().add_output("y", np.ones(3)))
        writer(ms.loops.Elapsed(steps=4))
    assert [(row.step, row.values) for row in sink.rows] == [(1, {"x": 1}), (2, {"yes": 1, "half": 0.5})]
    assert sink.closed


def test_entries_are_called_by_their_names_while_these_are_free():
    history = ms.loops.history()
    first = ms.logs().add_loss("loss", 1, add_metric=True).add_metric("f1", 2).add_loss("l2", 3).add_metric("time", 4)
    first.add_stateful_metric("f1", 5).add_output("loss", 6)
    history.commit(ms.loops.Elapsed(steps=1), first)
    later = ms.logs().add_metric("l2", 7).add_entry("mine", "loss", 8).add_metric("new", 9)
    history.commit(ms.loops.Elapsed(steps=2), later)
    columns = history.columns()
    names = {path: entry_name(path, columns, separator="/", reserved=frozenset(["time"])) for path in columns}
    assert names == {
        ("losses", "loss"): None,
        ("metrics", "loss"): "loss",
        ("metrics", "f1"): "metrics/f1",
        ("stateful_metrics", "f1"): "stateful_metrics/f1",
        ("losses", "l2"): "l2",
        ("metrics", "time"): "metrics/time",
        ("outputs", "loss"): None,
        ("metrics", "l2"): "metrics/l2",
        ("mine", "loss"): "mine/loss",
        ("metrics", "new"): "new",
    }


def test_what_is_added_to_the_last_row_in_the_end_is_written(tmp_path):
    def final(state):
        return ms.logs().add_metric("final", 7)

    tasks = {ms.every(1): [step, csv_logger(tmp_path / "run.csv")], ms.loops.last(): final}
    ms.loop(jnp.zeros(()), [np.zeros(4)] * 5, tasks, on_end=lambda state: ms.logs().add_metric("end", 8))
    table = read_csv(tmp_path / "run.csv")
    assert table["final"] == [None] * 4 + [7] and table["end"] == [None] * 4 + [8]


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        (7, [7, 14]),
        (ms.every(7) | ms.loops.last(), [7, 14, 20]),
        (ms.every(7) | ms.every(epochs=1), [5, 7, 10, 14, 15, 20]),
        (lambda elapsed: elapsed.steps < 3, [1, 2]),
    ],
)
def test_every_says_which_rows_are_written(every, steps):
    sink = Recording()
    ms.loop(jnp.zeros(()), [np.zeros(4)] * 20, {ms.loops.always(): [step, Writer(sink, every)]}, epoch_duration=5)
    assert [row.step for row in sink.rows] == steps


def test_a_schedule_of_the_tasks_says_it_too_and_no_row_comes_twice():
    sink = Recording()
    writer = Writer(sink)
    ms.loop(
        jnp.zeros(()), batches(), [(ms.loops.always(), step), (ms.every(4), writer), (ms.every(6), writer)], stop=12
    )
    assert [row.step for row in sink.rows] == [4, 6, 8, 12]


def test_rows_that_come_in_bulk_are_written_in_order(tmp_path):
    history = ms.loops.history()
    writer, loop_state = csv_logger(tmp_path / "run.csv"), LoopState(None, history, ms.loops.Elapsed())
    writer.start(loop_state)
    for start in range(0, 1000, 100):
        steps = range(start + 1, start + 101)
        logs = ms.logs().add_metric("loss", jnp.arange(100.0) + start)
        samples = [4 * number for number in steps]
        history.commit_block(StepSpan(steps, samples, None, [0.1] * 100, 0.0, 4 * start), logs)
        loop_state.elapsed = history.elapsed()
        writer.observe(loop_state, start, start + 100)
    writer.finish(loop_state)
    assert read_csv(tmp_path / "run.csv") == history.to_dict()


def test_a_fused_loop_writes_every_row(tmp_path, key):
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(32.0, dtype=np.float32)}), ms.BatchTransform(4)])
    tasks = {ms.every(1): [step, csv_logger(tmp_path / "run.csv")]}
    _, history, _ = ms.loop(jnp.zeros(()), loader, tasks, stop=700, fuse=50, key=key)
    assert len(history) == 700
    assert read_csv(tmp_path / "run.csv") == history.to_dict()


def test_reading_leaves_steps_alone_that_may_be_under_way():
    history = ms.loops.history()
    rows = RowCursor(history, None, entry_name)
    for number in range(1, 301):
        loss = jnp.float32(number)
        if number >= 299:
            loss.delete()  # whoever reads it raises
        history.commit(ms.loops.Elapsed(steps=number), {"loss": loss} | ({"rare": 1} if number in (50, 297) else {}))
        rows.add(number - 1, number)
    taken = rows.take_ready(300)
    assert taken is not None
    assert [row.step for row in taken.made()] == list(range(1, 299))
    assert [row.step for row in taken.made() if "rare" in row.values] == [50, 297]
    assert rows.steps() == [299, 300] and rows.take_older() is None
    with pytest.raises(RuntimeError, match="was donated to a later step"):
        rows.take_all()


def test_reading_leaves_blocks_alone_that_may_be_under_way():
    history = ms.loops.history()
    rows = RowCursor(history, None, entry_name)
    for start in range(0, 40, 10):
        steps, block = range(start + 1, start + 11), jnp.arange(10.0)
        if start >= 20:
            block.delete()
        passed = StepSpan(steps, list(steps), None, [0.1] * 10, 0.0, start)
        history.commit_block(passed, ms.logs().add_metric("loss", block))
        rows.add(start, start + 10)
    taken = rows.take_ready(40, 10)
    assert taken is not None and [row.step for row in taken.made()] == list(range(1, 21))
    assert rows.steps() == list(range(21, 41))


def test_a_value_between_two_that_are_not_ready_is_not_lost():
    sink = Recording()
    writer = Writer(sink)
    for number in range(1, 700):
        logs = {"loss": jnp.float32(number)} | ({"odd": jnp.float32(number)} if number % 2 else {})
        writer(ms.loops.Elapsed(steps=number), logs)
    writer.close()
    assert [row.values["loss"] for row in sink.rows] == list(range(1, 700))
    assert [row.step for row in sink.rows if "odd" in row.values] == list(range(1, 700, 2))


def test_a_test_inside_of_a_training_run_adds_columns_and_no_rows(tmp_path):
    def test_step(state, batch):
        return ms.logs().add_metric("loss", state)

    writer = csv_logger(tmp_path / "run.csv")
    tasks = {ms.on_train_step: step, ms.on_test_step: test_step, ms.loops.on_test_batch_end: writer}
    options = {"callbacks": [writer], "test_dataset": [np.zeros(2)] * 7, "epoch_duration": 2}
    _, history, _ = train_loop(jnp.zeros(()), [np.zeros(4)] * 4, tasks, **options)
    table = read_csv(tmp_path / "run.csv")
    assert table["steps"] == [1, 2, 3, 4] and table["loss_test"] == [None, 2, None, 4]
    assert table == history.to_dict()


def test_a_trial_run_leaves_no_file(tmp_path):
    writers = [csv_logger(tmp_path / "a.csv"), jsonl_logger(tmp_path / "a.jsonl"), tensorboard(tmp_path / "runs")]
    train_loop(jnp.zeros(()), batches(), {"on_train_step": step}, callbacks=writers, fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    _, history, _ = run(csv_logger(tmp_path / "run.csv"), 10)
    with csv_logger(tmp_path / "hand.csv") as writer:
        by_hand(writer, [1, 2])
        assert threads() == [] and writer.get_state() == {"unwritten": []}
    assert len(history) == 10 and list(tmp_path.iterdir()) == []


def test_by_hand_rows_are_written_by_whatever_ends_the_writing(tmp_path):
    with csv_logger(tmp_path / "block.csv") as writer:
        by_hand(writer, range(1, 600))
        assert threads() == ["millstream csv_logger"]
    assert read_csv(tmp_path / "block.csv")["steps"] == list(range(1, 600))
    writer = csv_logger(tmp_path / "dropped.csv")
    by_hand(writer, [1, 2])
    del writer
    gc.collect()
    assert read_csv(tmp_path / "dropped.csv")["loss"] == [1, 0.5]
    with pytest.raises(ZeroDivisionError), csv_logger(tmp_path / "error.csv") as writer:
        by_hand(writer, [2, 1, 0])
    assert read_csv(tmp_path / "error.csv")["loss"] == [0.5, 1]


EXITS = """
import sys, jax.numpy as jnp, millstream as ms
from millstream.callbacks import csv_logger
writer = csv_logger(sys.argv[1])
for number in range(1, 301):
    writer(ms.loops.Elapsed(steps=number), {"loss": jnp.float32(number)})
"""


def test_rows_are_written_at_the_end_of_the_process(tmp_path):
    done = subprocess.run([sys.executable, "-c", EXITS, tmp_path / "run.csv"], capture_output=True, check=True)
    assert done.stdout == b"" and done.stderr == b""
    assert read_csv(tmp_path / "run.csv")["loss"] == list(range(1, 301))


def test_an_exception_in_a_step_does_not_lose_the_rows_before_it(tmp_path):
    def fail(state, batch, elapsed):
        if elapsed.steps == 40:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        tasks = {ms.loops.always(): [step, fail, csv_logger(tmp_path / "run.csv")]}
        ms.loop(jnp.zeros(()), batches(), tasks, stop=100)
    assert read_csv(tmp_path / "run.csv")["steps"] == list(range(1, 40))
    assert not any("Ending the loop failed" in note for note in caught.value.__notes__)


def make(kind, folder, **options):
    maker = {"csv": csv_logger, "jsonl": jsonl_logger, "tensorboard": tensorboard}[kind]
    return maker(folder / f"run.{kind}", **options)


def steps_in(kind, folder):
    path = folder / f"run.{kind}"
    if kind == "csv":
        return read_csv(path)["steps"]
    if kind == "jsonl":
        return [row["steps"] for row in read_jsonl(path)]
    return [event_step for event_step, tag, _ in visible(path) if tag == "loss"]


def visible(folder):
    """What TensorBoard shows of a folder: a restart hides earlier events from its step on."""
    shown = []
    for event in read_events(folder):
        if event.session_log.status == SessionLog.START:
            shown = [point for point in shown if point[0] < event.step]
        shown += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return shown


KINDS = ["csv", "jsonl", "tensorboard"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_cuts_later_rows_and_goes_on(kind, tmp_path):
    output = run(make(kind, tmp_path), 20)
    run(make(kind, tmp_path), 30, history=output.history, elapsed=output.elapsed)  # what happens to be lost later
    writer = make(kind, tmp_path, overwrite=True)  # only of interest to a new run
    run(writer, 25, elapsed=output.elapsed)
    assert steps_in(kind, tmp_path) == list(range(1, 26))
    run(writer, 27, elapsed=ms.loops.Elapsed(steps=25))
    assert steps_in(kind, tmp_path) == list(range(1, 28))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_came_to_be_written_after_all_are_not_written_twice(kind, tmp_path):
    output = run(make(kind, tmp_path), 8)
    writer = make(kind, tmp_path)
    writer.set_state({"unwritten": [4, 5]})  # when it was saved at step 5; until it was killed, more was written
    run(writer, 7, history=output.history, elapsed=ms.loops.Elapsed(steps=5, samples=20))
    assert steps_in(kind, tmp_path) == list(range(1, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_run_refuses_the_place_of_another_unless_told(kind, tmp_path):
    run(make(kind, tmp_path), 20)
    with pytest.raises(FileExistsError, match=rf"begins a new run, and .*run\.{kind} has .*overwrite=True"):
        run(make(kind, tmp_path), 20)
    assert steps_in(kind, tmp_path) == list(range(1, 21))
    run(make(kind, tmp_path, overwrite=True), 3)
    assert steps_in(kind, tmp_path) == [1, 2, 3]


def test_going_on_by_hand_is_asked_for(tmp_path):
    with csv_logger(tmp_path / "run.csv") as writer:
        by_hand(writer, range(1, 10))
    with pytest.raises(FileExistsError), csv_logger(tmp_path / "run.csv") as writer:
        by_hand(writer, [10])
    with csv_logger(tmp_path / "run.csv").open(5) as writer:
        by_hand(writer, [6, 7])
    assert read_csv(tmp_path / "run.csv")["steps"] == list(range(1, 8))


def test_a_loop_ends_what_was_begun_by_hand(tmp_path):
    writer = csv_logger(tmp_path / "run.csv")
    by_hand(writer, [1, 2, 3])
    with pytest.raises(FileExistsError):
        run(writer, 5)
    run(writer, 5, elapsed=ms.loops.Elapsed(steps=3))
    assert read_csv(tmp_path / "run.csv")["steps"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_line_that_was_torn_is_cut_wherever_it_was_torn(kind, tmp_path):
    run(make(kind, tmp_path), 3)
    path = tmp_path / f"run.{kind}"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with make(kind, tmp_path).open(3) as writer:
            writer(ms.loops.Elapsed(steps=4), {"loss": 0.5, "count": 7})
        kept = whole[:length].count(b"\n") - (kind == "csv")
        assert steps_in(kind, tmp_path) == [*range(1, kept + 1), 4], length


def test_files_of_others_are_not_touched(tmp_path):
    table, lines = tmp_path / "a.csv", tmp_path / "a.jsonl"
    table.write_text("name,size\nx,1\n")
    lines.write_text('{"steps": 1}\n{"name": 3}\n')
    with pytest.raises(ValueError, match=r"header begins with steps,samples.*begins with 'name,size'"):
        csv_logger(table).open(5)
    table.write_text("steps,samples,epochs,time,date\n1,1,,0.0,0.0\nhello\n")
    with pytest.raises(ValueError, match=r"Line 3 of .*a.csv is not a row of it: b'hello"):
        csv_logger(table).open(5)
    with pytest.raises(ValueError, match=r"Line 2 of .*a.jsonl is not a row of it"):
        jsonl_logger(lines).open(5)
    assert table.read_text().endswith("hello\n") and lines.read_text().endswith('{"name": 3}\n')


KILLED = """
import os, pathlib, pickle, sys, time
import jax, jax.numpy as jnp, numpy as np, millstream as ms
sys.path.insert(0, sys.argv[2])
from test_writers import KINDS, batches, make, step
folder = pathlib.Path(sys.argv[1])
writers = [make(kind, folder) for kind in KINDS]

def save(state, batch, elapsed, loop_state):
    saved = float(state), loop_state.history.to_state(), elapsed, [writer.get_state() for writer in writers]
    (folder / "part").write_bytes(pickle.dumps(saved))
    os.replace(folder / "part", folder / "saved")

def sleep():
    time.sleep(0.0005)

tasks = {ms.loops.always(): [step, *writers, sleep], ms.every(75): save}
ms.loop(jnp.zeros(()), batches(), tasks, stop=10**6)
"""


def test_rows_are_all_there_once_after_a_kill_and_a_resume(tmp_path):
    here = str(pathlib.Path(__file__).parent)
    child = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path, here], stderr=subprocess.PIPE)
    # Rows are handed over 256 at a time, so at step 675 many rows of the past are still in memory.
    while child.poll() is None and saved_steps(tmp_path) < 675:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, child.stderr and child.stderr.read().decode()
    assert child.stderr is not None
    child.stderr.close()
    state, history, elapsed, states = pickle.loads((tmp_path / "saved").read_bytes())
    history, writers = ms.loops.History.from_state(history), [make(kind, tmp_path) for kind in KINDS]
    for writer, writer_state in zip(writers, states, strict=True):
        assert writer_state["unwritten"]
        writer.set_state(writer_state)
    stop = elapsed.steps + 50
    tasks = {ms.loops.always(): [step, *writers]}
    ms.loop(jnp.float32(state), batches(), tasks, stop=stop, history=history, elapsed=elapsed)
    expected = list(range(1, stop + 1))
    # The row of the step in which it was saved is not in the saved history, and comes from nowhere.
    expected.remove(elapsed.steps)
    for kind in KINDS:
        assert [number for number in steps_in(kind, tmp_path) if number != elapsed.steps] == expected, kind
    points = {number: value for number, tag, value in visible(tmp_path / "run.tensorboard") if tag == "count"}
    assert all(points[number] == number - 1 for number in expected)


def saved_steps(folder):
    try:
        return pickle.loads((folder / "saved").read_bytes())[2].steps
    except FileNotFoundError:
        return 0


FULL = """
import pathlib, resource, sys, threading
import millstream as ms
sys.path.insert(0, sys.argv[2])
from test_writers import KINDS, make, run, threads
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for kind in KINDS:
    try:
        run(make(kind, pathlib.Path(sys.argv[1])), 10_000)
    except OSError as error:
        print(kind, error.errno, error.loop_output.elapsed.steps < 10_000, threads(), error.__notes__)
"""


def test_a_full_disk_ends_the_run_and_keeps_what_is_written(tmp_path):
    here = str(pathlib.Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", FULL, tmp_path, here], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert done.stderr == "" and len(lines) == 3
    for kind, line in zip(KINDS, lines, strict=True):
        maker = kind if kind == "tensorboard" else f"{kind}_logger"
        assert line.startswith(
            f"{kind} 27 True [] ['Raised in the thread of {maker}, while it wrote the rows of steps "
        )
        assert "Ending the loop failed" not in line
    with csv_logger(tmp_path / "run.csv").open(10_000):
        pass
    steps = read_csv(tmp_path / "run.csv")["steps"]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 100


def test_an_error_of_the_thread_is_raised_once_and_no_more_is_written():
    def fail():
        raise OSError("no space")

    sink = Recording(before=fail)
    writer = Writer(sink)
    with pytest.raises(OSError, match="no space") as caught:
        by_hand(writer, range(1, 10_000))
    (note,) = caught.value.__notes__
    assert note.startswith("Raised in the thread of recording, while it wrote the rows of steps 1 to ")
    writer.close()
    assert sink.closed and sink.rows == []


def test_places_that_must_not_lose_anything_are_waited_for():
    sink = Recording(before=lambda: time.sleep(0.002))
    with Writer(sink) as writer:
        by_hand(writer, range(1, 30_001))  # more than the queue holds
    assert [row.step for row in sink.rows] == list(range(1, 30_001))


class Server:
    """What `wandb.init` returns, as far as it is used."""

    def __init__(self, before=lambda: None):
        self.before, self.calls = before, []

    def log(self, values, step):
        self.before()
        self.calls.append((step, values))


def test_a_run_of_wandb_gets_rows_with_steps_and_units():
    server = Server()
    _, history, _ = run(wandb_logger(server), 5, epoch_duration=2)
    losses, times = history.collect("loss", "time")
    assert server.calls == [
        (n, {"loss": losses[n - 1], "count": n - 1, "samples": 4 * n, "epochs": n // 2, "time": times[n - 1]})
        for n in range(1, 6)
    ]
    with wandb_logger(server) as writer:
        by_hand(writer, [6])
    assert server.calls[-1] == (6, {"loss": 1 / 6, "samples": 24, "time": 0.0})


def test_a_server_that_fails_does_not_end_a_run():
    def fail():
        raise ConnectionError("nobody there")

    with pytest.warns(RuntimeWarning) as warned:
        _, _, elapsed = run(wandb_logger(Server(fail)), 1000)
    assert elapsed.steps == 1000
    first, last = (str(warning.message) for warning in warned)
    assert first == "wandb_logger could not write some rows; the run continues. ConnectionError: nobody there"
    assert last.startswith(
        "wandb_logger left out 1000 rows: 0 came faster than they could be written, 1000 were refused"
    )


def test_a_server_that_is_slow_loses_the_oldest_rows_and_is_not_waited_for():
    release = threading.Event()
    server = Server(before=lambda: release.wait(60))
    writer = wandb_logger(server, timeout=0)
    by_hand(writer, range(1, 20_001))
    with pytest.warns(RuntimeWarning) as warned:
        writer.close()
    missing, dropped = (str(warning.message) for warning in warned)
    assert missing.startswith("wandb_logger was given 0 seconds to write what was left, and did not get done:")
    assert "rows are missing. A larger timeout= gives it more time." in missing
    assert "came faster than they could be written, 0 were refused" in dropped
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("millstream "):
            thread.join()
    sent = [number for number, _ in server.calls]  # the rows that were on their way, and no more
    assert sent == list(range(1, len(sent) + 1)) and 0 < len(sent) <= 256


def test_mlflow_gets_batches_of_metrics(monkeypatch):
    class Metric(types.SimpleNamespace):
        def __init__(self, key, value, timestamp, step):
            super().__init__(key=key, value=value, timestamp=timestamp, step=step)

    batches_of_metrics = []
    client = types.SimpleNamespace(log_batch=lambda run_id, metrics: batches_of_metrics.append((run_id, metrics)))
    entities, mlflow = types.ModuleType("mlflow.entities"), types.ModuleType("mlflow")
    entities.__dict__["Metric"] = Metric
    active: list[object] = [None]
    mlflow.__dict__.update(entities=entities, active_run=lambda: active[0], MlflowClient=lambda: client)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    with pytest.raises(ValueError, match=r"mlflow_logger needs a run, and none is active"):
        mlflow_logger()
    with pytest.raises(TypeError, match=r"mlflow_logger needs a run of MLflow, or its id. Got 3"):
        mlflow_logger(3)
    active[0] = types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))
    _, history, _ = run(mlflow_logger(), 1200)
    assert {run_id for run_id, _ in batches_of_metrics} == {"abc"}
    assert all(len(metrics) <= 1000 for _, metrics in batches_of_metrics)
    dates = [int(1000 * date) for date in history.collect("date")]
    for name in ("loss", "count"):
        metrics = [metric for _, some in batches_of_metrics for metric in some if metric.key == name]
        assert [metric.value for metric in metrics] == history.collect(name)
        assert [metric.step for metric in metrics] == list(range(1, 1201))
        assert [metric.timestamp for metric in metrics] == dates
    with mlflow_logger("def", client=client) as writer:  # pyright: ignore[reportArgumentType]
        writer(ms.loops.Elapsed(steps=1), {"top@5": 0.5})
    assert batches_of_metrics[-1][0] == "def" and batches_of_metrics[-1][1][0].key == "top_5"


def test_packages_that_are_missing_are_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    command = r"pip install 'crc32c>=.+' 'tensorboardx>=.+'"
    with pytest.raises(ImportError, match=rf"tensorboard needs tensorboardX. Run: {command}"):
        tensorboard(tmp_path)
    with pytest.raises(ImportError, match=r"mlflow_logger needs mlflow. Run: pip install 'mlflow-skinny>=3'"):
        mlflow_logger()


def test_bad_arguments_are_refused_at_once(tmp_path):
    with pytest.raises(TypeError, match=r"csv_logger needs the path of a file. Got 3 \(int\)"):
        csv_logger(3)  # type: ignore[arg-type]
    with pytest.raises(IsADirectoryError, match=r"jsonl_logger needs the path of a file. .* is a folder"):
        jsonl_logger(tmp_path)
    with pytest.raises(TypeError, match=r"tensorboard needs directory to be a folder. Got None"):
        tensorboard(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"csv_logger needs a schedule such as every\(10\)"):
        csv_logger(tmp_path / "a", every="epoch")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="csv_logger needs every to be an int of at least 1"):
        csv_logger(tmp_path / "a", every=0)
    with pytest.raises(TypeError, match=r"wandb_logger needs a run: wandb.init\(...\). Got 'project'"):
        wandb_logger("project")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="wandb_logger needs time in seconds"):
        wandb_logger(Server(), timeout=-1)
    with pytest.raises(ValueError, match=r"csv_logger needs step to be an int of at least 0. Got -1"):
        csv_logger(tmp_path / "a").open(-1)
    assert list(tmp_path.iterdir()) == []
