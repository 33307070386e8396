"""The record of a run and the page about it: whole after any end, cheap while it is written, and right in a browser."""

import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from browser import CHROMIUM, DRIVER, MISSING, browser
from conftest import CACHE

import millstream as ms
from millstream.callbacks import record
from millstream.loops._clock import StepSpan
from millstream.report._chart import binned, linear_axis, log_axis, steps_axis
from millstream.report._charts import mixture_charts, time_charts
from millstream.report._reading import read_run, read_runs
from millstream.report._run_data import RunData, times_of
from millstream.report._summary import advice, tiles
from millstream.report.page import make_page, write_report


@jax.jit
def step(state, batch):
    return ms.logs().add_metric("loss", 1 / (1 + state)).add_metric("count", state.astype(int)), state + 1


@jax.jit
def silent_step(state, batch):
    return state + 1


def make_loader(samples=40, **options):
    source = ms.ArraySampleSource({"x": np.arange(samples, dtype=np.float32)}, ordering="sequential")
    return ms.DataLoader([source, ms.BatchTransform(4)], **options)


def train(callbacks, stop=200, tasks=None, **options):
    tasks = {ms.on_train_step: step} if tasks is None else tasks
    return ms.train_loop(
        jnp.zeros(()), make_loader(), tasks, callbacks=callbacks, stop=stop, key=jax.random.key(0), **options
    )


def lines(folder):
    return [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]


def logged(folder):
    return [(line["steps"], line["logged"]) for line in lines(folder) if "logged" in line]


def history_of(**columns):
    history, count = ms.loops.History(), len(next(iter(columns.values())))
    passed = StepSpan(
        range(1, count + 1), list(range(4, 4 * count + 1, 4)), None, (np.arange(count) / 10).tolist(), 0.0, 0
    )
    history.commit_columns(passed, {("metrics", name): list(values) for name, values in columns.items()})
    return history


def window(end, seconds, *, first=False, **uses):
    spent = {"seconds": seconds, "steps": 10, "samples": 40, "compiling": 0.0, "data": 0.0, "evaluation": 0.0}
    return {"steps": end, "first": first, "spent": spent | uses}


# The record


@pytest.mark.parametrize("options", [{}, {"fuse": 16}], ids=["bursts", "fused"])
def test_a_recorded_run_is_the_same_run_and_its_record_is_its_history(folder, options, count_compilations):
    plain = train([], **options).history
    with count_compilations() as compiled:
        recorded = train([record(folder)], **options).history
    assert compiled == [0]
    assert recorded.collect("steps", "loss", "count") == plain.collect("steps", "loss", "count")
    steps, loss, count = recorded.collect("steps", "loss", "count")
    assert logged(folder) == [
        (step, {"count": number, "loss": value}) for step, value, number in zip(steps, loss, count, strict=True)
    ]


def test_a_record_says_what_the_run_is(folder):
    test = make_loader(8)
    train([record(folder, loaders={"test": test}), ms.checkpoint(folder)], tasks={ms.on_train_step: step}, stop=10)
    run = lines(folder)[0]["run"]
    assert run["versions"]["JAX"] == jax.__version__ and run["versions"]["millstream"] == ms.__version__
    assert run["state"]["rows"] == [["(the tree itself)", 1, [], "float32", 1, 4]]
    assert run["loaders"] == {"train": make_loader().explain().as_dict(), "test": test.explain().as_dict()}
    assert run["tasks"] == [["every step", "step"], ["every step", "record"], ["end of an epoch", "checkpoint"]]
    assert run["stop"] == "at(steps=10)" and run["from_step"] == 0
    assert lines(folder)[-1]["ended"] == "it reached its stop"


@pytest.mark.parametrize("options", [{}, {"fuse": 5}], ids=["bursts", "fused"])
def test_a_mixture_is_shown_as_planned_and_as_seen(folder, options):
    one, two = (ms.ArraySampleSource({"x": np.full(n, n, np.float32)}) for n in (30, 10))
    ramp = ms.views.ramp(0.0, 1.0, samples=200)
    view = ms.views.mix({"one": one, "two": two}, {"one": 1.0, "two": ramp}, samples=400, source_field="source")
    loader = ms.DataLoader([view, ms.BatchTransform({0: 4, 20: 8})])

    @jax.jit
    def share(state, batch):
        rows, mask = batch
        return ms.logs().add_metric("twos", jnp.sum((rows["source"] == 1) & mask)), state

    def run(stop):
        tasks = [(ms.every(1), share), (ms.every(1), record(folder)), (ms.every(10), ms.checkpoint(folder))]
        return ms.loop(jnp.float32(0), loader, tasks, stop=stop, key=jax.random.key(0), resume=folder, **options)

    run(30)
    twos = [int(count) for count in run(60).history.collect("twos")]
    mixture = read_run(folder).mixture
    assert mixture is not None and list(mixture.planned) == ["one", "two"]
    steps, planned = mixture.planned["two"]
    assert steps.tolist() == list(range(1, 61))
    sizes = [4] * 20 + [8] * 40
    assert planned.tolist() == [count / size for count, size in zip(twos, sizes, strict=True)]
    steps, seen = mixture.seen["two"]
    samples = np.cumsum(sizes)[steps - 1]
    drawn = np.diff(samples, prepend=0) * seen
    np.testing.assert_allclose(np.cumsum(drawn), np.cumsum(twos)[steps - 1], atol=4)  # batches made ahead count, too
    assert "Mixture" in [chart.title for chart in mixture_charts([read_run(folder)])]
    assert "two, planned" in write_report(folder).read_text()


def test_the_time_of_a_run_is_accounted_for_whole(folder):
    started = time.perf_counter()
    train([record(folder)], stop=3000)
    most, run = time.perf_counter() - started, read_run(folder)
    assert run.times is not None
    assert 0 < run.times.seconds.sum() <= most
    assert run.times.samples.sum() == 12_000 and run.times.ends[-1] == 3000
    np.testing.assert_allclose(sum(run.times.uses.values()), run.times.seconds, rtol=1e-9)


def test_waiting_for_workers_is_counted_as_waiting_for_data(folder):
    def read(index):
        time.sleep(0.01)
        return {"x": np.float32(index)}

    loader = ms.DataLoader([ms.DiskSampleSource(400, read), ms.BatchTransform(4)], executor=ms.Processes(1), prefetch=1)
    ms.train_loop(
        jnp.zeros(()), loader, {ms.on_train_step: step}, callbacks=[record(folder)], stop=60, key=jax.random.key(0)
    )
    run = read_run(folder)
    assert run.times is not None
    assert run.times.uses["data"].sum() > run.times.uses["steps"].sum()
    assert run.beginnings[0]["loaders"]["train"] == loader.explain().as_dict()


def test_tests_inside_of_a_run_are_told_from_its_steps(folder):
    def slow_test(state, batch):
        time.sleep(0.01)
        return ms.logs().add_metric("loss", 0.5)

    tasks = {ms.on_train_step: step, ms.on_test_step: slow_test}
    train([record(folder)], tasks=tasks, test_dataset=make_loader(40), stop=30)
    run = read_run(folder)
    assert run.times is not None and run.times.uses["evaluation"].sum() >= 3 * 10 * 0.01
    assert run.history.collect("steps", "loss_test")[0] == [10, 20, 30]


def test_time_in_other_callbacks_is_told_from_the_steps(folder):
    class Slow(ms.Observer):
        def observe(self, loop_state, start, stop):
            time.sleep(0.01)

    train([record(folder)], tasks={ms.on_train_step: step, ms.every(10): Slow()}, stop=100)
    run = read_run(folder)
    assert run.times is not None and run.times.uses["callbacks"].sum() >= 10 * 0.01


def test_a_run_that_logs_nothing_has_times_all_the_same(folder):
    train([record(folder)], tasks={ms.on_train_step: silent_step}, stop=500)
    run = read_run(folder)
    assert len(run.history) == 0 and run.times is not None and run.times.samples.sum() == 2000
    assert "Nothing was logged." in make_page([run])


def test_a_loop_by_hand_is_recorded_without_what_nobody_knows(folder):
    with record(folder) as writer:
        for elapsed, _ in ms.loops.elapse([np.ones(4)] * 5):
            writer(elapsed, {"loss": 1 / elapsed.steps})
    assert logged(folder) == [(number, {"loss": 1 / number}) for number in range(1, 6)]
    assert all("data" not in line["spent"] for line in lines(folder) if "spent" in line)


def test_values_that_are_no_numbers_come_back_as_they_were(folder):
    with record(folder) as writer:
        for number, value in enumerate([1.0, np.nan, np.inf, -np.inf], start=1):
            writer(ms.loops.Elapsed(steps=number), {"loss": value})
    np.testing.assert_array_equal(read_run(folder).history.collect("loss"), [1.0, np.nan, np.inf, -np.inf])


def test_a_resumed_run_goes_on_in_its_record(folder):
    train([record(folder), ms.checkpoint(folder)], stop=35)
    train([record(folder), ms.checkpoint(folder)], stop=60, resume=folder)
    assert [number for number, _ in logged(folder)] == list(range(1, 61))
    run = read_run(folder)
    assert [beginning["from_step"] for beginning in run.beginnings] == [0, 35]
    assert run.ended == "it reached its stop"


def test_steps_that_are_done_again_stand_in_the_record_once(folder):
    train([record(folder), ms.checkpoint(folder / "saved")], stop=20)
    train([record(folder)], stop=50, resume=folder / "saved")  # and nothing of it was saved
    with (folder / "record.jsonl").open("ab") as file:
        file.write(b'{"steps":51,"samples":204,"ep')
    assert read_run(folder).history.elapsed().steps == 50  # a line that was not written to its end is not there
    train([record(folder)], stop=40, resume=folder / "saved")
    assert [number for number, _ in logged(folder)] == list(range(1, 41))
    assert [beginning["from_step"] for beginning in read_run(folder).beginnings] == [0, 20, 20]


PROGRAM = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
import millstream as ms

@jax.jit
def step(state, batch):
    return ms.logs().add_metric("loss", 1 / (1 + state)), state + 1

def pause(state):
    print("step", flush=True)
    time.sleep(0.002)

folder, stop = sys.argv[1], int(sys.argv[2])
loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(40.0)}), ms.BatchTransform(4)])
ms.train_loop(
    jnp.zeros(()),
    loader,
    {ms.on_train_step: step, ms.loops.on_train_batch_end: pause, ms.every(100): ms.checkpoint(folder)},
    callbacks=[ms.record(folder)],
    stop=stop,
    key=jax.random.key(0),
    resume=folder,
)
"""


def test_a_killed_run_can_be_looked_at_and_goes_on_without_a_gap(folder):
    for steps_done in (400, 500):
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), "1000000"], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process:
            for _ in range(steps_done):
                assert process.stdout.readline()
            os.kill(process.pid, signal.SIGKILL)
        run = read_run(folder)
        steps = run.history.collect("steps")
        assert steps == list(range(1, len(steps) + 1)) and len(steps) > 100 and run.ended is None
        assert "it is running, or was killed" in make_page([run])
    saved = max(int(path.name) for path in folder.iterdir() if path.name.isdigit())  # may be ahead of what is written
    stop = max(saved, run.history.elapsed().steps) + 50
    subprocess.run([sys.executable, "-c", PROGRAM, str(folder), str(stop)], check=True, stdout=subprocess.PIPE)
    steps, loss = read_run(folder).history.collect("steps", "loss")
    assert steps == list(range(1, stop + 1))
    np.testing.assert_allclose(loss, 1 / np.arange(1, stop + 1), rtol=1e-6)


SELDOM = """
import sys, time
import numpy as np
import millstream as ms

def step(state, batch):
    print("step", flush=True)
    time.sleep(0.01)
    return ms.logs().add_metric("loss", 0.5), state + 1

ms.loop(0, [np.ones(4)] * 100_000, {ms.every(1): [step, ms.record(sys.argv[1], every=10**6)]})
"""


def test_a_killed_run_has_its_times_also_where_rows_are_seldom_written(folder):
    process = subprocess.Popen([sys.executable, "-c", SELDOM, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process:
        for _ in range(300):
            assert process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    run = read_run(folder)
    assert len(run.history) == 0 and run.times is not None
    assert run.times.ends.tolist() == sorted(run.times.ends) and run.times.ends[-1] > 100
    assert run.times.samples.sum() == 4 * run.times.ends[-1]


FULL = """
import resource, sys
import jax.numpy as jnp, numpy as np
import millstream as ms

class TidyUp(ms.Callback):
    def __loop_callback__(self, loop_state):
        return None

    def finish(self, loop_state):
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

def step(state, batch):
    return ms.logs().add_metric("loss", 1 / (1 + state)), state + 1

resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
try:
    ms.loop(0, [np.ones(4)] * 10_000, {ms.every(1): [TidyUp(), step, ms.record(sys.argv[1])]})
except OSError as error:
    print(error.errno)
"""


def test_a_record_stays_readable_if_a_full_disk_has_room_again_before_its_end(folder):
    done = subprocess.run([sys.executable, "-c", FULL, str(folder)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("27\n", "")
    run = read_run(folder)
    steps = run.history.collect("steps")
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 100
    train([record(folder)], stop=300, elapsed=run.history.elapsed())
    assert [number for number, _ in logged(folder)] == list(range(1, 301))


def test_data_that_explain_themselves_to_others_are_named_only(folder):
    class Frame(list):
        def explain(self):
            raise AssertionError("a query of its own")

    ms.loop(0, Frame([np.ones(4)] * 2), {ms.every(1): [lambda state: state + 1, record(folder)]})
    assert lines(folder)[0]["run"]["loaders"] == {"loop": {"stages": [], "plan": {"data": "Frame"}}}


def test_a_new_run_sets_the_record_of_another_apart(folder):
    train([record(folder)], stop=5)
    with pytest.warns(UserWarning, match="record of an earlier run, which is now record-1.jsonl"):
        train([record(folder)], stop=6)
    assert len(logged(folder)) == 6
    assert read_run(folder / "record-1.jsonl").history.elapsed().steps == 5
    train([record(folder, overwrite=True)], stop=7)
    assert len(logged(folder)) == 7 and not (folder / "record-2.jsonl").exists()


def test_only_the_rows_that_are_asked_for_are_written(folder):
    train([record(folder, every=50)])
    assert [number for number, _ in logged(folder)] == [50, 100, 150, 200]


def test_a_large_state_is_shown_by_its_branches(folder):
    state = {"layers": {str(i): {"w": jnp.zeros(1), "b": jnp.zeros(1)} for i in range(150)}, "head": jnp.zeros(2)}
    ms.loop(state, range(2), {ms.every(1): [lambda state: None, record(folder)]})
    table = lines(folder)[0]["run"]["state"]
    assert (len(table["rows"]), table["arrays"], table["count"]) == (151, 301, 302)


def test_wrong_arguments_of_a_record_are_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="record needs the path of a folder"):
        record(tmp_path / "file")
    with pytest.raises(TypeError, match=r"record needs the path of a folder\. Got 3"):
        record(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="record needs loaders as a dict"):
        record(tmp_path, loaders=[make_loader()])  # pyright: ignore[reportArgumentType]


# What is read


def test_logs_and_checkpoints_give_the_same_curves_as_a_record(folder):
    writers = [ms.callbacks.csv_logger(folder / "a.csv"), ms.callbacks.jsonl_logger(folder / "b.jsonl")]
    train([record(folder / "c"), ms.checkpoint(folder / "d"), *writers], stop=30)
    expected = read_run(folder / "c").history.collect("steps", "samples", "epochs", "loss")
    for name in ("a.csv", "b.jsonl", "d"):
        run = read_run(folder / name)
        assert run.history.collect("steps", "samples", "epochs", "loss") == expected
        assert "does not say what the time was used for" in advice(run)
        assert run.kind in advice(run)
    page = write_report([folder / name for name in ("a.csv", "b.jsonl", "c", "d")], folder / "all.html")
    assert all(f"{name}: loss" in page.read_text() for name in "abcd")


def test_a_table_whose_last_line_was_torn_is_read_up_to_it(folder):
    with ms.callbacks.csv_logger(folder / "run.csv") as writer:
        for number in range(1, 4):
            writer(ms.loops.Elapsed(steps=number), {"loss": 1.0, "accuracy": 0.625})
    text = (folder / "run.csv").read_text()
    for length in (text.rindex(","), len(text) - 3):  # before a number, and in the middle of it
        (folder / "run.csv").write_text(text[:length])
        assert read_run(folder / "run.csv").history.collect("steps", "accuracy") == ([1, 2], [0.625] * 2)


def test_names_of_a_table_may_have_any_characters(folder):
    names = ["a\rb", "c\nd", "e\r\nf", "g\u2028h", 'i,"j"', "k\x85l"]
    shown = ["a b", "c d", "e f", "g h", 'i,"j"', "k l"]
    values = {name: float(number) for number, name in enumerate(names)}
    path = folder / "run.csv"
    with ms.callbacks.csv_logger(path) as writer:
        for number in (1, 2):
            writer(ms.loops.Elapsed(steps=number), values)
    with ms.callbacks.csv_logger(path).open(2) as writer:  # what is there is known again
        writer(ms.loops.Elapsed(steps=3, time=1.0), values)
    history = read_run(path).history
    assert history.names() == [f"metrics.{name}" for name in shown] and len(history) == 3
    assert [history.collect(f"metrics.{name}") for name in shown] == [[float(number)] * 3 for number in range(6)]
    history = ms.loops.history()
    history.commit(ms.loops.Elapsed(steps=1), values)
    history.to_csv(path)
    assert read_run(path).history.names() == [f"metrics.{name}" for name in names]


def test_a_line_that_is_no_row_of_a_table_is_named(folder):
    path, header = folder / "run.csv", "steps,samples,epochs,time,date,loss\n1,4,,0.0,0.0,0.5\n"
    for line in ("2,8\n", "two,8,,0.0,0.0,0.5\n"):
        path.write_text(f"{header}{line}3,12,,0.0,0.0,0.5\n")
        with pytest.raises(ValueError, match=rf"Line 3 of .*run.csv is not a row of one: '{line.strip()}'"):
            read_run(path)
    path.write_bytes(b"Gr\xf6\xdfe,Zahl\n1,2\n")
    with pytest.raises(ValueError, match=r"millstream report reads tables .* whose header begins with steps"):
        read_run(path)


def test_a_history_written_as_a_table_is_read_with_what_of_it_are_numbers(folder):
    history = ms.loops.history()
    for number in (1, 2):
        history.commit(ms.loops.Elapsed(steps=number), {"loss": 0.5, "converged": number == 2, "phase": "warm up"})
    history.to_csv(folder / "run.csv")
    found = read_run(folder / "run.csv").history
    assert found.collect("loss", "converged") == ([0.5, 0.5], [0.0, 1.0])
    assert found.names() == ["metrics.loss", "metrics.converged"]


def test_a_metric_may_be_called_run(folder):
    with ms.callbacks.jsonl_logger(folder / "a.jsonl") as writer:
        writer(ms.loops.Elapsed(steps=1), {"run": 7.0})
    history = ms.loops.history()
    history.commit(ms.loops.Elapsed(steps=1), ms.logs().add_entry("run", "loss", 7.0))
    history.to_jsonl(folder / "b.jsonl")
    assert read_run(folder / "a.jsonl").history.collect("run") == [7.0]
    assert read_run(folder / "b.jsonl").history.collect("loss") == [7.0]


def test_runs_of_one_name_are_told_apart_by_their_folders(folder):
    for name in ("wide/seed-0/run", "wide/seed-1/run", "deep/seed-0/run", "other"):
        with record(folder / name) as writer:
            writer(ms.loops.Elapsed(steps=1), {"loss": 0.5})
    runs = read_runs([folder / name for name in ("wide/seed-0/run", "wide/seed-1/run", "deep/seed-0/run", "other")])
    assert [run.name for run in runs] == ["wide/seed-0/run", "seed-1/run", "deep/seed-0/run", "other"]
    assert [run.name for run in read_runs([folder / "other"] * 2)] == [(folder / "other").resolve().as_posix()] * 2


def test_wrong_arguments_of_a_report_are_named(folder):
    with pytest.raises(TypeError, match=r"write_report needs the path of a run, or those of several. Got 5 \(int\)"):
        write_report(5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="write_report needs at least one run"):
        write_report([])
    with pytest.raises(IsADirectoryError, match=r"is a folder; .*report.html would do"):
        write_report(folder / "run.csv", folder)


def test_a_checkpoint_with_a_flipped_bit_is_passed_over(folder):
    train([ms.checkpoint(folder)], stop=30)
    newest = max((folder / "0000000030" / "files").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1] + b"\xff")
    assert read_run(folder).kind == "the checkpoint of step 20"
    for path in folder.glob("*/files/history-*"):
        path.unlink()
    with pytest.raises(RuntimeError, match=r"no checkpoint in .* whose history is whole"):
        read_run(folder)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("nowhere", "found nothing at .*nowhere"),
        ("", "found no run in .*, which has: notes.txt, other.csv"),
        ("notes.txt", "cannot tell what .*notes.txt is"),
    ],
)
def test_a_path_without_a_run_is_answered_with_what_is_looked_for(tmp_path, path, text):
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        (OSError, ValueError), match=f"(?s){text}.*It looks for:.*record.jsonl.*0000000100.*.jsonl.*.csv"
    ):
        read_run(tmp_path / path)
    with pytest.raises(ValueError, match="header begins with steps,samples"):
        read_run(tmp_path / "other.csv")


# What is made of it


def test_time_in_two_uses_at_once_is_counted_once():
    times = times_of(
        [
            window(1, 5.0, first=True, compiling=3.0, data=3.0),
            window(11, 2.0, compiling=1.5, evaluation=1.9),
            window(21, 1.0, data=0.25),
        ]
    )
    assert times is not None
    np.testing.assert_allclose(times.uses["compiling"], [5.0, 1.5, 0.0])
    np.testing.assert_allclose(times.uses["data"], [0.0, 0.0, 0.25])
    np.testing.assert_allclose(times.uses["evaluation"], [0.0, 0.5, 0.0])
    np.testing.assert_allclose(times.uses["steps"], [0.0, 0.0, 0.75])


def speed_tile(run):
    return next(tile[1:] for tile in tiles(run) if tile[0] == "samples per second")


def test_the_speed_is_that_of_the_steady_part_of_a_run():
    windows = [window(1, 10.0, first=True, compiling=2.0)]  # the rest of it are imports and tracing
    windows += [window(10 * number, 0.1) for number in range(1, 6)]
    windows += [window(60, 5.0, compiling=1.0), window(70, 0.5, evaluation=0.4), window(80, 3.0, evaluation=2.99)]
    run = RunData("run", "a record", history_of(loss=[1.0]), times_of(windows))
    assert speed_tile(run) == ("400", "median, without compiling and tests")
    (speed,) = [chart for chart in time_charts([run]) if chart.title == "Throughput"]
    np.testing.assert_allclose(speed.series[0].points.mean, [np.nan, *[400] * 5, np.nan, 400, np.nan])
    assert speed.series[0].last == "400" and speed.y.high < 500


def test_a_run_that_compiles_a_little_all_the_time_has_a_speed():
    windows = [window(10 * number, 10.0, compiling=0.01) for number in range(1, 9)]
    assert speed_tile(RunData("run", "a record", history_of(loss=[1.0]), times_of(windows)))[0] == "4.004"


def test_a_short_run_does_not_say_how_fast_it_was():
    windows = [window(1, 10.0, first=True, compiling=2.0), *[window(10 * number, 0.1) for number in range(1, 5)]]
    run = RunData("run", "a record", history_of(loss=[1.0]), times_of(windows))
    assert speed_tile(run) == ("unknown", "too short to tell")
    only = RunData("run", "a record", history_of(loss=[1.0]), times_of(windows[:1]))
    assert speed_tile(only) == ("unknown", "too short to tell")
    assert not [chart for chart in time_charts([only]) if chart.title == "Throughput"]
    assert make_page([only, run])


def test_the_speed_of_a_table_says_what_is_in_it():
    run = RunData("run", "a table", history_of(loss=[1.0, 0.5, 0.25]))
    assert speed_tile(run) == ("60", "of the whole time, with compiling and tests")


def test_a_use_of_time_has_one_color_whatever_else_a_run_knows():
    known, unknown = window(10, 10.0, data=1.0, evaluation=2.0), window(10, 10.0, evaluation=2.0)
    del unknown["spent"]["data"]
    runs = [
        RunData(str(name), "a record", history_of(loss=[1.0]), times_of([one]))
        for name, one in enumerate((known, unknown))
    ]
    colors = re.findall(r'<span class="swatch (u\d) s0"></span>tests ', make_page(runs))
    assert len(colors) == 2 and colors[0] == colors[1]


@pytest.mark.parametrize(
    ("uses", "text"),
    [
        ({"data": 3.8}, "38 % of the time was spent waiting for data: loader.tune()"),
        ({"compiling": 9.0}, "90 % of the time was spent compiling"),
        ({"evaluation": 5.0}, "50 % of the time was spent in tests: test_duration="),
        ({"callbacks": 2.5}, "25 % of the time was spent in callbacks"),
        ({"data": 0.5}, "95 % of the time was spent in the steps themselves"),
    ],
)
def test_the_advice_is_drawn_from_the_figures(uses, text):
    run = RunData("run", "a record", history_of(loss=[1.0, 0.5]), times_of([window(10, 10.0, **uses)]))
    assert advice(run).startswith(text)


def test_tiles_say_where_the_best_values_were():
    run = RunData("run", "a table", history_of(loss=[1.0, 0.25, 0.5], accuracy_test=[0.1, 0.2, 0.9]))
    shown = {name: (value, note) for name, value, note in tiles(run)}
    assert shown["best loss"] == ("0.25", "at step 2")
    assert shown["best accuracy_test"] == ("0.9", "at step 3")
    assert shown["samples"] == ("12", "")


def test_values_that_are_not_finite_are_gaps_and_are_named():
    run = RunData("run", "a table", history_of(loss=[1.0, np.nan, 0.5, np.inf, 0.25]))
    page = make_page([run])
    assert "loss: 2 not finite, first at step 2" in page
    assert "loss was not finite 2 times, first at step 2: ms.callbacks.terminate_on_nan()" in page
    assert len(re.findall(r'<text class="odd', page)) == 2
    raw = re.search(r'class="raw c0 s0 wide" d="([^"]+)"', page)
    assert raw is not None and raw[1].count("M") == 3


def test_a_long_run_makes_a_small_page_that_keeps_its_spikes():
    count = 1_000_000
    loss = (1 / np.sqrt(np.arange(1, count + 1))).tolist()
    loss[700_003] = 77.0
    run = RunData("run", "a table", history_of(loss=loss, accuracy=np.linspace(0, 1, count).tolist()))
    page = make_page([run])
    assert len(page) < 300_000
    assert "77.0" in page
    points = binned(np.arange(count), np.array(loss))
    assert points.high.max() == 77.0 and points.low.min() == min(loss)
    np.testing.assert_allclose(points.mean.mean(), np.mean(loss), rtol=1e-3)


def test_a_page_of_very_many_metrics_names_those_it_leaves_out():
    run = RunData("run", "a table", history_of(**{f"value{i}": [1.0, 2.0] for i in range(60)}))
    page = make_page([run])
    assert page.count("<figure") == 40
    assert "Not drawn, because there are so many: value40, value41" in page


@pytest.mark.parametrize(
    "values",
    [
        *([0.0], [5.0, 5.0], [-1e-9, 1e-9], [1e-30, 1e30], [np.nan], [1e15, 2e15]),
        *([-1e308, 1e308], [1.0, 1e269], [1.0, 1e300], [5e-324, 1e-323]),
    ],
)
def test_every_axis_has_ticks_within_its_ends(values):
    values = np.array(values)
    for axis in (linear_axis(values), log_axis(values)):
        if axis is not None:
            assert axis.low < axis.high and axis.ticks
            assert all(axis.low <= value <= axis.high for value, _ in axis.ticks)
            assert len({text for _, text in axis.ticks}) == len(axis.ticks)
    assert [text for _, text in steps_axis(0, 40_000).ticks] == ["0", "10k", "20k", "30k", "40k"]


NASTY = '</script><script>alert("x")</script> <b title=\'&amp;\'>größe λ "'


def test_texts_of_the_run_are_escaped():
    run = RunData(NASTY, "a table", history_of(**{NASTY: [1.0, 2.0]}))
    page = make_page([run])
    assert "<script>alert" not in page and "größe λ" in page
    assert page.count("<script") == 2 and page.count("</script>") == 2


def test_the_command_writes_a_page_and_says_where(folder):
    train([record(folder)], stop=10)
    done = subprocess.run([sys.executable, "-m", "millstream", "report", str(folder)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert pathlib.Path(done.stdout.strip()) == folder.resolve() / "report.html"
    done = subprocess.run(
        [sys.executable, "-m", "millstream", "report", str(folder / "no")], capture_output=True, text=True
    )
    assert done.returncode == 2 and "It looks for:" in done.stderr and "Traceback" not in done.stderr


def test_the_demo_ends_with_a_report(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "millstream", "demo", "--epochs", "2", "--folder", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | CACHE,
    )
    assert (done.returncode, done.stderr) == (0, "")
    place = (tmp_path / "demo" / "report.html").resolve()
    assert f"\n{place}\n" in done.stdout
    page = place.read_text()
    assert "NormalizeImageTransform" in page and "Where the time goes" in page


# In a browser

in_browser = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING)


@pytest.fixture(scope="module")
def window_of_browser():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def page(memory):
    """A report of a run with all there is to show."""
    folder = memory / "run with <b>"
    tasks = {ms.on_train_step: step, ms.on_test_step: lambda state, batch: ms.logs().add_metric("loss", 0.5)}
    train([record(folder)], tasks=tasks, test_dataset=make_loader(8), stop=200)
    with (folder / "record.jsonl").open("a") as file:
        elapsed = {"steps": 201, "samples": 804, "epochs": 20, "time": 1e3}
        # A window without compiling, from which its speed is known: fast machines are done before there is one.
        spent = {"seconds": 0.5, "steps": 1, "samples": 4, "data": 0.1, "compiling": 0.0, "evaluation": 0.1}
        file.write(json.dumps(elapsed | {"spent": spent | {"callbacks": 0.0, "host_memory": 2e8}}) + "\n")
        file.write(json.dumps(elapsed | {"logged": {"loss": float("nan"), NASTY: 1.0}}) + "\n")
    return write_report(folder)


@pytest.fixture
def shown(window_of_browser, page):
    window_of_browser.size(1200, 900)
    window_of_browser.scheme("light")
    window_of_browser.open(page)
    return window_of_browser


@in_browser
def test_the_page_loads_alone_and_without_a_complaint(shown, page):
    assert shown.requests() == [page.as_uri()]
    assert shown.messages() == []
    assert shown.run("return document.title") == "run with <b> · Millstream"
    assert shown.run("return document.querySelectorAll('figure').length") == 7  # one of them the memory
    sizes = shown.run("return [...document.querySelectorAll('.raw, .block')].map((p) => p.getBBox().width)")
    assert len(sizes) >= 7 and max(sizes) > 900


@in_browser
def test_the_page_may_load_nothing(shown):
    loads = "const i = new Image(); i.src = 'https://example.invalid/x.png'; document.body.append(i); return 1"
    shown.run(loads)
    deadline = time.monotonic() + 20
    found = shown.messages()
    while not found and time.monotonic() < deadline:
        found = shown.messages()
    assert any("Content Security Policy" in message for message in found)


@in_browser
def test_values_are_shown_under_the_pointer_and_by_keys(shown):
    left, top, width, height = shown.run(
        "const box = document.querySelector('.area').getBoundingClientRect();"
        "return [box.left, box.top, box.width, box.height]"
    )
    readout = "return document.querySelector('.readout').innerText"
    shown.run("document.querySelector('figure').focus()")
    shown.press("ArrowLeft")
    assert shown.run(readout).split() == ["step", "201", "loss", "not", "finite", "loss_test", "0.5"]
    shown.press("ArrowLeft")
    assert shown.run(readout).split() == ["step", "200", "loss", "0.005", "loss_test", "0.5"]
    shown.run("document.activeElement.blur()")
    assert shown.run(readout) == ""
    shown.move(left + width / 2, top + height / 2)
    found = re.fullmatch(r"step (\d+) loss (0\.\d+) loss_test 0\.5", " ".join(shown.run(readout).split()))
    assert found is not None and abs(int(found[1]) - 101) <= 1
    assert float(found[2]) == pytest.approx(1 / int(found[1]), rel=1e-3)
    assert shown.run("return document.querySelectorAll('.point').length") == 2
    shown.move(5, 5)
    assert shown.run(readout) == ""


@in_browser
def test_times_and_large_values_are_shown_in_few_digits(shown, folder):
    times = times_of([window(10, 59.8), window(20, 59.9), window(30, 3600.0)])
    (folder / "page.html").write_text(make_page([RunData("run", "a record", history_of(loss=[1.0, 1e30]), times)]))
    shown.open(folder / "page.html")

    def readout_behind(number, presses):
        shown.run("document.querySelectorAll('figure')[arguments[0]].focus()", number)
        for _ in range(presses):
            shown.press("ArrowLeft")
        return shown.run("return document.querySelectorAll('.readout')[arguments[0]].innerText", number).split()

    assert readout_behind(0, 1) == ["step", "2", "loss", "1.000e+30"]
    assert readout_behind(1, 2)[:7] == ["2", "min", "0", "s", "samples", "per", "second"]


@in_browser
def test_smoothing_and_scale_redraw_the_curves(shown):
    def state():
        return shown.run(
            "return ['.smooth', '.raw', '.y-axis'].map((name) => document.querySelector(name))"
            ".map((each) => each.getAttribute('d') ?? each.textContent)"
        )

    def choose(name, value):
        shown.run(
            "const control = document.getElementById(arguments[0]);"
            "control.value = arguments[1]; control.dispatchEvent(new Event('input'))",
            name,
            value,
        )

    first = state()
    choose("smooth", "20")
    smoothed = state()
    assert smoothed[0] != first[0] and smoothed[2] == first[2]
    choose("smooth", "0")
    assert state()[0] == ""
    choose("scale", "linear")
    linear = state()
    choose("scale", "logarithmic")
    assert state()[1] != linear[1] and state()[2] != linear[2]
    choose("scale", "")
    assert state()[2] == first[2]  # the texts of the script are those that were there before
    assert shown.messages() == []


def luminance(color):
    parts = np.array([int(number) for number in re.findall(r"\d+", color)[:3]]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ np.array([0.2126, 0.7152, 0.0722]))


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_in_light_and_in_the_dark(shown, scheme):
    shown.scheme(scheme)
    paper = luminance(shown.run("return getComputedStyle(document.body).backgroundColor"))
    assert (paper > 0.5) == (scheme == "light")
    for name in (".advice", ".tiles span", ".legend", ".caption", ".alarm", ".mark", "th"):
        ink = luminance(shown.run("return getComputedStyle(document.querySelector(arguments[0])).color", name))
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5, name


@in_browser
@pytest.mark.parametrize("width", [320, 360, 1200])
def test_nothing_but_tables_scrolls_sideways(shown, width):
    shown.size(width, 800)
    assert shown.run("return document.documentElement.scrollWidth") == width
    shown.run("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert shown.run("return document.documentElement.scrollWidth") == width
    wide = shown.run(
        "return [...document.querySelectorAll('body *')].filter((each) => !each.closest('.scroll, svg'))"
        ".filter((each) => each.getBoundingClientRect().right > innerWidth + 1)"
        ".map((each) => each.outerHTML.slice(0, 80))"
    )
    assert wide == []


@in_browser
def test_names_of_metrics_are_texts_whatever_is_in_them(shown):
    assert NASTY in shown.run("return [...document.querySelectorAll('h3')].map((each) => each.textContent)")
    assert shown.run("return document.scripts.length") == 2


@in_browser
def test_charts_are_there_without_scripts(shown, page):
    shown.command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        shown.open(page)
        elements = shown.elements()
        picture = shown.screenshot()
    finally:
        shown.command("Emulation.setScriptExecutionDisabled", value=False)
    assert [("hidden" in each) for each in elements if each.get("class") in ("controls", "note hint")] == [True] * 2
    curves = [each for each in elements if re.match(r"raw c\d s\d", each.get("class", ""))]
    assert len([each for each in curves if each["d"].startswith("M")]) >= 4
    assert len(picture) > 20_000


def test_reports_of_equal_runs_are_equal(folder):
    make = functools.partial(RunData, "run", "a table", history_of(loss=[3.0, 2.0, 1.0]))
    assert make_page([make()]) == make_page([make()])
