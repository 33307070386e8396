"""Batches that a run leaves out, and steps of saved runs that are made again."""

import dataclasses
import itertools
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import resume_script as script
from conftest import assert_trees_equal
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.checkpoints import CheckpointStore
from millstream.checkpoints.folders import step_name
from millstream.loops._clock import Clock
from millstream.loops.schedules import EpochBegins, EpochEnds
from millstream.loops.skips import Skips
from millstream.report.page import write_report

pytestmark = pytest.mark.optimized

KEY = jax.random.key(script.KEY_SEED)
EPOCH = script.EPOCH
RANGES = [(2, 4), (9, 13)]  # inside of an epoch, and over the end of one
CASES = {
    "two": RANGES,
    "a whole epoch": [(EPOCH, 2 * EPOCH)],
    "the first": [(0, 3), (7, 8)],
    "the first epoch": [(0, EPOCH), (8, 10)],
    "the end of an epoch": [(4, EPOCH), (EPOCH + 2, EPOCH + 3)],
    "touching": [(3, 5), (5, 8)],
}


def kept(ranges, count):
    """The numbers of the first batches that are not in any of these ranges."""
    every = (batch for batch in itertools.count() if not any(first <= batch < last for first, last in ranges))
    return list(itertools.islice(every, count))


# Steps and batches


@st.composite
def some_skips(draw):
    edges = sorted(draw(st.sets(st.integers(0, 60), max_size=8)))
    ranges = tuple(zip(edges[::2], edges[1::2], strict=False))
    steps, batch = draw(st.integers(0, 9)), draw(st.integers(0, 20))
    if draw(st.booleans()) or any(first < batch for first, _ in ranges):
        steps, batch = 0, 0
    return Skips(ranges, (steps, batch))


@given(some_skips())
def test_steps_and_batches_are_those_of_a_list(skips):
    (begun, first), batches = skips.begun, kept(skips.ranges, 120)
    seen = [batch for batch in batches if batch >= first]
    assert [skips.batch_of(begun + 1 + number) for number in range(40)] == seen[:40]
    for batch in range(80):
        assert skips.seek(batch) == next(other for other in batches if other >= batch)
        assert skips.count_kept(batch) == sum(other < batch for other in batches)
        coming = [other for other in range(batch, 200) if other not in batches and other > batch]
        if batch in batches:
            assert skips.until_next(batch) == (coming[0] - batch if coming and coming[0] <= 60 else float("inf"))
    counts = [skips.with_left_out(begun + number) for number in range(60)]
    assert counts == [begun + batch - first for batch in seen[:60]]
    for count in range(begun, 60):
        asked = [step for step in range(begun, 130) if skips.with_left_out(step) >= count]
        assert skips.steps_to(count) == asked[0]
    assert Skips.at_position(skips.plain()) == skips


@given(some_skips(), st.integers(1, 9), st.integers(1, 3))
def test_epochs_end_where_those_of_the_data_do(skips, length, period):
    clock, batches, moments = Clock(None, ms.at(length), Skips(skips.ranges)), kept(skips.ranges, 81), []
    for _ in range(80):
        moments.append(clock.tick(4))
    assert [elapsed.epochs for elapsed in moments] == [batch // length for batch in batches[1:]]
    schedules = [EpochBegins(), EpochEnds(), ms.every(epochs=period), ms.at(epochs=period), ms.at(7, epochs=period)]
    for schedule in schedules:
        due = [elapsed.steps for elapsed in moments if schedule(elapsed)]
        for steps in range(60):
            told, asked = schedule.next_due(steps, clock.epochs), [step for step in due if step > steps]
            assert told is not None and (told == asked[0] if asked else told > 80)


@given(some_skips(), st.integers(1, 9), st.lists(st.integers(1, 9), max_size=8))
def test_several_steps_at_once_count_as_one_by_one(skips, length, parts):
    one, many = (Clock(None, ms.at(length), Skips(skips.ranges)) for _ in range(2))
    for count in parts:
        epochs = [one.tick(4).epochs for _ in range(count)]
        assert many.skip([4] * count).epochs == epochs
        assert (many.now.epochs, many.now.epochs_before, many.now.starts_epoch) == (
            one.now.epochs,
            one.now.epochs_before,
            one.now.starts_epoch,
        )


@pytest.mark.parametrize(
    "position",
    [
        {"skip": [[1]]},
        {"skip": [[2, 1]]},
        {"skip": [[1, 3], [3, 5]]},
        {"skip": [[-1, 3]]},
        {"skip": [["1", 3]]},
        {"skip": 3},
        {"begun": [1]},
        {"begun": [1, -1]},
    ],
)
def test_what_cannot_have_been_saved_is_no_position(position):
    with pytest.raises((ValueError, TypeError)):
        Skips.at_position(position)


# Runs


@pytest.fixture(scope="module")
def loader():
    return script.loader()


@pytest.fixture(scope="module")
def batches(loader):
    """The first batches of the loader, with what is known of them."""
    return list(jax.device_get([pair[:2] for pair in loader.iterate(loader.init_state(KEY), steps=40)]))


def watched_run(loader, stop, **options):
    """A run, and the elapsed and the batch of each of its steps."""
    seen = []

    def watch(state, batch, elapsed):
        seen.append((elapsed, jax.device_get(batch)))
        return state + 1

    tasks = [(ms.every(1), watch), *options.pop("tasks", [])]
    return ms.loop(0, loader, tasks, stop=stop, key=KEY, **options), seen


@pytest.mark.parametrize("case", CASES)
def test_all_other_batches_are_seen_in_order_and_steps_have_no_gap(loader, batches, case):
    ranges, ends = CASES[case], []
    tasks = [(ms.every(epochs=1), lambda state, batch, elapsed: ends.append(elapsed.steps))]
    output, seen = watched_run(loader, 14, skip=ranges, tasks=tasks)
    numbers = kept(ranges, 15)
    assert_trees_equal([batch for _, batch in seen], [batches[number] for number in numbers[:14]])
    assert [elapsed.steps for elapsed, _ in seen] == list(range(1, 15))
    assert [elapsed.epochs for elapsed, _ in seen] == [number // EPOCH for number in numbers[1:]]
    first = [step for step in range(1, 15) if step == 1 or numbers[step - 1] // EPOCH > numbers[step - 2] // EPOCH]
    assert [elapsed.steps for elapsed, _ in seen if elapsed.starts_epoch] == first
    assert ends == [step for step in range(1, 15) if numbers[step] // EPOCH > numbers[step - 1] // EPOCH]
    assert output.elapsed.samples == sum(int(batches[number][1].sum()) for number in numbers[:14])
    assert int(output.data_state.step) == numbers[13] + 1


def test_a_run_of_epochs_ends_with_those_of_the_data(loader, batches):
    output, seen = watched_run(loader, ms.at(epochs=3), skip=RANGES)
    assert_trees_equal([batch for _, batch in seen], [batches[number] for number in kept(RANGES, 12)])
    assert output.elapsed.epochs == 3 and output.elapsed.steps == 3 * EPOCH - 6
    output, seen = watched_run(loader, ms.at(epochs=1), skip=[(0, EPOCH)])
    assert (output.elapsed.steps, seen, output.reason) == (0, [], "it was already finished")


@pytest.mark.parametrize("case", CASES)
def test_bursts_of_steps_leave_out_the_same(loader, batches, case):
    tasks = {ms.every(1): script.train_step, ms.every(epochs=2): ms.loops.noop}
    history = ms.loop(script.start(), loader, tasks, stop=14, key=KEY, skip=CASES[case]).history
    numbers = kept(CASES[case], 15)
    seen = [np.where(mask, 1 << batch["index"], 0).sum() for batch, mask in (batches[number] for number in numbers)]
    assert history.collect("ids") == seen[:14]
    assert history.collect("epochs") == [number // EPOCH for number in numbers[1:]]


@pytest.mark.parametrize("executor", [ms.Threads(2), ms.Threads(2, ordered=False), ms.Processes(1)], ids=str)
def test_every_executor_leaves_out_the_same(batches, executor):
    _, seen = watched_run(script.loader(executor), 12, skip=RANGES)
    found = [batch for _, batch in seen]
    if not executor.ordered:  # between two ranges
        found.sort(key=lambda pair: next(number for number, each in enumerate(batches) if _equal(pair, each)))
    assert_trees_equal(found, [batches[number] for number in kept(RANGES, 12)])


def _equal(one, other):
    return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))


def test_what_is_left_out_is_never_read():
    read = []

    def sample(index):
        read.append(index)
        return {"x": np.int32(index)}

    source = ms.DiskSampleSource(
        40, sample, sample_spec={"x": jax.ShapeDtypeStruct((), np.int32)}, ordering="sequential"
    )
    loader = ms.DataLoader([source, ms.BatchTransform(4)], executor=ms.Threads(2), prefetch=3)
    read.clear()
    watched_run(loader, 6, skip=[(2, 4)])
    assert sorted(read) == [index for index in range(32) if index // 4 not in (2, 3)]


def test_a_mix_of_loaders_leaves_out_batches_of_the_mix(loader):
    mixed = ms.loader.MixedLoader({"a": loader, "b": script.loader(data=script.arrays(9))})
    every = jax.device_get(list(mixed.iterate(mixed.init_state(KEY), steps=12)))
    _, seen = watched_run(mixed, 8, skip=[(3, 7)])
    assert_trees_equal([batch for _, batch in seen], [every[number] for number in kept([(3, 7)], 8)])


def test_batches_that_cannot_be_read_are_passed_over_besides():
    def sample(index):
        if index == 13:  # of batch 3
            raise ValueError("broken")
        return {"x": np.int32(index)}

    source = ms.DiskSampleSource(
        48, sample, sample_spec={"x": jax.ShapeDtypeStruct((), np.int32)}, ordering="sequential"
    )
    loader = ms.DataLoader([source, ms.BatchTransform(4)], executor=ms.Threads(2), on_error="skip batch")
    _, seen = watched_run(loader, 6, skip=[(5, 7)])
    assert [int(batch["x"][0]) // 4 for _, (batch, _) in seen] == [0, 1, 2, 4, 7, 8]


# Fused steps


@jax.jit
def step(state, batch, elapsed):
    values, mask = batch
    ids = jnp.sum(jnp.where(mask, 1 << values["index"], 0))
    state = 0.5 * state + jnp.sum(jnp.where(mask, values["y"], 0))
    logs = ms.logs().add_metric("ids", ids).add_metric("state", state).add_metric("step", elapsed.steps)
    logs.add_metric("epochs_seen", elapsed.epochs).add_metric("before", elapsed.epochs_before)
    return logs.add_metric("starts", elapsed.starts_epoch).add_metric("samples_seen", elapsed.samples), state


EVERY_EPOCH = ms.every(epochs=1)


def stepped_run(loader, stop, *, every=EVERY_EPOCH, **options):
    """A run of a compiled step that sees the elapsed, as values that can be compared, and where `every` was due."""
    due = []
    tasks = [(ms.every(1), step), (every, lambda state, batch, elapsed: due.append(elapsed.steps))]
    output = ms.loop(jnp.float32(0), loader, [*tasks, *options.pop("tasks", [])], stop=stop, key=KEY, **options)
    return script.table(output.history), script.bits(output.state), due


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fuse", [3, 16])
def test_fused_steps_leave_out_the_same(loader, case, fuse):
    expected = stepped_run(loader, ms.at(epochs=4), skip=CASES[case])
    assert expected[0]["epochs_seen"] == expected[0]["epochs"]
    assert stepped_run(loader, ms.at(epochs=4), skip=CASES[case], fuse=fuse) == expected


@dataclasses.dataclass(frozen=True)
class OddRows(ms.Transform):
    """Sets the mask, so that nobody knows how many samples a batch has before it is made."""

    def apply(self, value, mask, key):
        return value, mask & (value["index"] % 2 == 1)


def test_samples_are_counted_ahead_past_what_is_left_out(loader):
    # Order and jitter take their time to compile.
    masked = script.loader(ordering="sequential", jitter=None, stages=[OddRows()])
    for each, samples in ((loader, 9), (masked, 5)):
        expected = stepped_run(each, 12, skip=RANGES, every=ms.every(samples=samples))
        assert stepped_run(each, 12, skip=RANGES, every=ms.every(samples=samples), fuse=3) == expected


# Resuming


@pytest.fixture(scope="module")
def whole(memory, loader):
    """The folder of a run that nothing disturbed, with a checkpoint of every step, and what it came to."""
    script.faults.set(None)
    _, found = script.run(memory / "whole", batches=loader, test=script.test_loader(), every=1, keep=None, skip=RANGES)
    return memory / "whole", found


def cut(whole, folder, step):
    """The run as it was left by a process that died after a step."""
    (folder / "run").mkdir()
    shutil.copytree(whole[0] / "run" / step_name(step), folder / "run" / step_name(step))
    shutil.copy(whole[0] / "log.csv", folder)


@pytest.mark.parametrize("step", range(1, 3 * EPOCH - 6))
def test_a_run_resumes_at_every_step_with_what_it_left_out(whole, folder, loader, step):
    cut(whole, folder, step)
    # That it leaves them out is part of the run; to say it again does no harm.
    output, found = script.run(folder, batches=loader, every=1000, skip=[None, RANGES, RANGES[1:]][step % 3])
    assert found == whole[1]
    assert output.elapsed.steps == 3 * EPOCH - 6


def test_killed_at_a_gap_and_after_one_a_run_comes_to_the_same(whole, folder, loader):
    arguments = [sys.executable, "-W", "error", script.__file__, str(folder), "place=step", "skip=2-4,9-13"]
    # A checkpoint is whole by the time the next one begins: that of step 2, where the first range comes, and then that
    # of step 4 or a later one; the second range comes after step 7.
    for count, least in ((5, 2), (6, 4)):
        ended = subprocess.run([*arguments, f"count={count}"], capture_output=True, text=True)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert CheckpointStore(folder / "run", read_only=True).steps()[-1] >= least
    _, found = script.run(folder, batches=loader)
    assert found == whole[1]


@pytest.mark.parametrize("fuse", [None, 3])
def test_a_range_may_be_added_at_every_step_before_it(folder, loader, fuse):
    expected = stepped_run(loader, 12, skip=RANGES)
    for first in range(1, 8):  # step 7 has batch 8
        tasks = [(ms.every(1), ms.checkpoint(folder / str(first)))]
        earlier = stepped_run(loader, first, skip=RANGES[:1], tasks=tasks)
        tasks = [(ms.every(5), ms.checkpoint(folder / str(first)))]
        resumed = stepped_run(loader, 12, skip=RANGES[1:], tasks=tasks, resume=folder / str(first), fuse=fuse)
        # What was logged stays as it was: that the range ends an epoch after step 7 was not known there.
        assert resumed[0] == {name: earlier[0][name] + values[first:] for name, values in expected[0].items()}
        assert resumed[1] == expected[1]
        assert ms.restore(folder / str(first), jnp.float32(0)).skip == RANGES


@pytest.mark.parametrize("skip", [[(3, 5)], [(0, 1)], [(6, 12)], [(2, 5), (20, 30)]], ids=str)
def test_a_range_that_the_run_has_been_through_is_refused(folder, loader, skip):
    tasks = [(ms.every(1), ms.checkpoint(folder / "run"))]
    stepped_run(loader, 6, skip=[(2, 4)], tasks=tasks)  # and so is at batch 8
    first, last = skip[0]
    step = first if first < 3 else first - 2 if first > 3 else 2
    words = (
        rf"loop cannot leave out batches that come before where the data are: at batch 8 after 6 steps\. Got "
        rf"\({first}, {last}\) in skip\. Resume from a checkpoint of step {step} or earlier.*discard_after\({step}\)\."
    )
    with pytest.raises(ValueError, match=words):
        stepped_run(loader, 12, skip=skip, tasks=tasks, resume=folder / "run")


def test_an_earlier_checkpoint_is_gone_back_to_as_the_refusal_says(folder, loader):
    tasks = [(ms.every(1), ms.checkpoint(folder / "run", keep=None))]
    stepped_run(loader, 9, tasks=tasks)
    with CheckpointStore(folder / "run") as store:
        store.discard_after(5)
    found = stepped_run(loader, 12, tasks=tasks, resume=folder / "run", skip=[(7, 9)])
    assert found[:2] == stepped_run(loader, 12, skip=[(7, 9)])[:2]


def test_a_run_continues_by_hand_with_what_it_left_out(loader, batches):
    output, _ = watched_run(loader, 6, skip=RANGES)
    numbers = kept(RANGES, 12)
    for more in ({}, {"data_state": output.data_state}):
        _, seen = watched_run(loader, 12, skip=RANGES, elapsed=output.elapsed, **more)
        assert_trees_equal([batch for _, batch in seen], [batches[number] for number in numbers[6:]])
        assert seen[-1][0].epochs == numbers[11] // EPOCH + 1


def test_data_that_begin_elsewhere_are_left_out_by_their_own_numbers(loader, batches):
    state = loader.init_state(KEY, step=5)
    _, seen = watched_run(loader, 4, skip=[(5, 6), (8, 10)], data_state=state)
    assert_trees_equal([batch for _, batch in seen], [batches[number] for number in (6, 7, 10, 11)])
    assert [elapsed.epochs for elapsed, _ in seen] == [0, 0, 1, 1]  # counted from the beginning of the run
    with pytest.raises(
        ValueError, match=r"at batch 5 after 0 steps\. Got \(3, 7\) in skip\. Begin with a data_state at b"
    ):
        watched_run(loader, 4, skip=[(3, 7)], data_state=state)


# Arguments


@pytest.mark.parametrize(
    ("skip", "error", "words"),
    [
        (
            3,
            TypeError,
            r"loop needs skip as a list of ranges of batches, each \(first, last\): skip=\[\(51_200, 51_260",
        ),
        ((3, 5), TypeError, r"needs skip as a list of ranges .* Got \(3, 5\) \(tuple\)\."),
        ([3, 5], TypeError, "needs skip as a list of ranges"),
        ([(3, 5, 6)], TypeError, "needs skip as a list of ranges"),
        ("3-5", TypeError, r"needs skip as a list of ranges .* Got '3-5' \(str\)\."),
        ({3: 5}, TypeError, "needs skip as a list of ranges"),
        (
            [(3, 5.0)],
            ValueError,
            r"loop needs skip\[0\]\[1\] to be an int from 0 to 2,147,483,647\. Got 5\.0 \(float\)",
        ),
        ([(1, 2), (True, 5)], ValueError, r"loop needs skip\[1\]\[0\] to be an int from 0 to"),
        ([(-3, 5)], ValueError, r"loop needs skip\[0\]\[0\] to be an int from 0 to .* Got -3"),
        ([(3, 2**31)], ValueError, r"loop needs skip\[0\]\[1\] to be an int from 0 to"),
        ([(5, 3)], ValueError, r"loop needs skip\[0\] to be \(first, last\).* Got \(5, 3\): write \(3, 5\)\."),
        ([(5, 5)], ValueError, r"Got \(5, 5\): for batch 5 alone write \(5, 6\)\."),
        ([(7, 9), (3, 8)], ValueError, r"do not overlap\. Got \(3, 8\) and \(7, 9\): write \(3, 9\)\."),
        ([(3, 8), (3, 8)], ValueError, r"do not overlap\. Got \(3, 8\) and \(3, 8\): write \(3, 8\)\."),
    ],
)
def test_ranges_that_make_no_sense_are_refused(loader, skip, error, words):
    with pytest.raises(error, match=words):
        watched_run(loader, 4, skip=skip)


def test_ranges_may_be_given_in_any_order_and_of_any_numbers(loader):
    _, seen = watched_run(loader, 12, skip=RANGES)
    for skip in (RANGES[::-1], np.array(RANGES), iter(RANGES)):
        _, again = watched_run(loader, 12, skip=skip)
        assert_trees_equal([batch for _, batch in again], [batch for _, batch in seen])
    assert len(watched_run([np.ones(4)] * 3, 2, skip=[])[1]) == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: [np.ones(4)] * 9, r"The batches of \[array.* have to be drawn in order\. Leave skip out\."),
        (
            lambda: ms.DataLoader([ms.sources.IterableSource([{"x": np.ones(2)}] * 9), ms.BatchTransform(2)]),
            "The batches of an IterableSource have to be drawn in order",
        ),
        (
            lambda: ms.DataLoader([ms.ArraySampleSource({"x": np.ones(9)}), ms.BufferTransform(4, 2, 2)]),
            "The batches of a stream have to be drawn in order",
        ),
    ],
)
def test_data_that_have_to_be_drawn_in_order_are_refused(make, words):
    with pytest.raises(TypeError, match=f"(?s)loop can leave out batches only of a loader that starts at any.*{words}"):
        watched_run(make(), 4, skip=[(1, 2)])


# What is said of it


def test_a_bar_and_tests_follow_the_epochs_of_the_data(loader, capsys):
    def test_step(state, batch):
        return ms.logs().add_metric("loss", 1.0)

    output = ms.train_loop(
        0,
        loader,
        {ms.on_train_step: lambda state: state + 1, ms.on_test_step: test_step},
        test_dataset=[np.ones(2)],
        callbacks=[ms.callbacks.keras_bar()],
        stop=ms.at(epochs=4),
        key=KEY,
        skip=[(4, EPOCH), (2 * EPOCH, 3 * EPOCH)],
    )
    assert output.history.collect("steps", "loss_test") == ([4, 4 + EPOCH, 4 + 2 * EPOCH], [1.0] * 3)
    lines = [line.split("  ")[:2] for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert [line for line in lines if "0 steps" not in line] == [
        ["epoch 1/4", "4 steps"],
        ["epoch 2/4", f"{EPOCH} steps"],
        ["epoch 4/4", f"{EPOCH} steps"],
    ]


def test_terminate_on_nan_names_the_batch_itself(loader):
    def nan_at_six(state, batch, elapsed):
        return ms.logs().add_metric("loss", float("nan") if elapsed.steps == 6 else 1.0)

    tasks = [(ms.every(1), [nan_at_six, ms.callbacks.terminate_on_nan()])]
    with pytest.raises(FloatingPointError, match=r"at step 6 .*init_state\(key, step=7\)\)"):
        watched_run(loader, 9, skip=RANGES, tasks=tasks)


def test_the_report_lists_what_was_left_out(folder, loader):
    for skip, stop in ((RANGES[:1], 4), (RANGES[1:], 12)):
        tasks = [(ms.every(1), [ms.checkpoint(folder), ms.record(folder)])]
        watched_run(loader, stop, skip=skip, tasks=tasks, resume=folder)
    page = write_report(folder).read_text()
    assert "<h3>Batches left out</h3>" in page
    assert '<td >2 to 3</td><td class="number">2</td><td >after step 2</td>' in page
    assert '<td >9 to 12</td><td class="number">4</td><td >after step 7</td>' in page
    assert "<span>batches left out</span><strong>6</strong><small>in 2 ranges</small>" in page
    assert repr(ms.restore(folder, 0)).endswith(", skip=[(2, 4), (9, 13)])")


# Replaying


@pytest.mark.parametrize("executor", [None, ms.Threads(2)], ids=str)
def test_every_step_of_a_saved_run_can_be_had_again(folder, loader, executor):
    tasks = [(ms.every(5), ms.checkpoint(folder / "run", keep=1))]
    _, seen = watched_run(loader, 12, skip=RANGES, tasks=tasks)
    again = loader.replace(executor=executor)
    shown = repr(ms.replay(folder / "run", again, 12))
    assert shown.startswith("ReplayedStep(step=12, batch={index: i32[4], x: f32[4,3], y: f32[4]}, mask=bool[4], info=")
    for elapsed, batch in seen:
        replayed = ms.replay(folder / "run", again, elapsed.steps)
        assert_trees_equal(jax.device_get((replayed.batch, replayed.mask)), batch)
        assert replayed.indices.tolist() == np.where(batch[1], batch[0]["index"], -1).tolist()
        assert (replayed.step, replayed.data_step) == (elapsed.steps, kept(RANGES, 12)[elapsed.steps - 1])
        assert replayed.info.epoch == elapsed.epochs_before


def test_steps_after_the_newest_checkpoint_can_be_had_too(folder, loader, batches):
    watched_run(loader, 5, skip=RANGES, tasks=[(ms.every(1), ms.checkpoint(folder))])
    for step, number in ((6, 7), (8, 13), (np.int64(20), 25)):
        replayed = ms.replay(folder, loader, step)
        assert replayed.data_step == number
        assert_trees_equal(jax.device_get((replayed.batch, replayed.mask)), batches[number])


def test_a_mix_of_loaders_says_whose_batch_it_was(folder, loader):
    mixed = ms.loader.MixedLoader({"a": loader, "b": script.loader(data=script.arrays(9))})
    _, seen = watched_run(mixed, 6, skip=[(1, 3)], tasks=[(ms.every(1), ms.checkpoint(folder))])
    replayed = [ms.replay(folder, mixed, step) for step in range(1, 7)]
    assert_trees_equal(jax.device_get([(each.batch, each.mask) for each in replayed]), [batch for _, batch in seen])
    assert {each.info.group for each in replayed} == {"a", "b"}


def test_data_that_began_elsewhere_are_replayed_from_there_on(folder, loader):
    output, _ = watched_run(loader, 3)
    tasks, state = [(ms.every(1), ms.checkpoint(folder))], loader.init_state(KEY, step=20)
    _, seen = watched_run(loader, 7, elapsed=output.elapsed, data_state=state, skip=[(21, 23)], tasks=tasks)
    replayed = [ms.replay(folder, loader, step) for step in range(4, 8)]
    assert [each.data_step for each in replayed] == [20, 23, 24, 25]
    assert_trees_equal(jax.device_get([(each.batch, each.mask) for each in replayed]), [batch for _, batch in seen])
    with pytest.raises(ValueError, match=r"from step 4 on: until then it went through other data\. Got step 3"):
        ms.replay(folder, loader, 3)


def test_what_cannot_be_replayed_is_refused_by_name(folder, loader):
    watched_run(loader, 3, tasks=[(ms.every(1), ms.checkpoint(folder / "run"))])
    watched_run([np.ones(4)] * 3, 3, tasks=[(ms.every(1), ms.checkpoint(folder / "list"))])
    stream = ms.DataLoader([ms.ArraySampleSource({"x": np.ones(9)}), ms.BufferTransform(4, 2, 2)])
    for run, other, words in (
        (folder / "list", loader, "replay needs a run over a loader that starts at any step"),
        (folder / "run", stream, "or of the loader that was given, have to be drawn in order"),
        (
            folder / "run",
            script.loader(rows=2),
            r"(?s)replay needs the loader of the run in .*batches of: 4 \(pad\) saved",
        ),
        (folder / "run", script.loader(data=script.arrays(seed=5)), r"(?s)differ in\n  contents: \w+ saved, \w+ now"),
    ):
        with pytest.raises(ValueError, match=words):
            ms.replay(run, other, 1)
    with pytest.raises(ms.errors.NoCheckpoint, match=r"replay found no checkpoint in .*nowhere"):
        ms.replay(folder / "nowhere", loader, 1)
    with pytest.raises(ValueError, match=r"replay needs step to be an int from 1 to .* Got 0"):
        ms.replay(folder / "run", loader, 0)
    with pytest.raises(TypeError, match=r"replay needs loader to be the DataLoader of the run\. Got \[1\] \(list\)"):
        ms.replay(folder / "run", [1], 1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="replay needs directory to be a path"):
        ms.replay(3, loader, 1)  # pyright: ignore[reportArgumentType]


def test_a_run_that_was_without_batches_is_not_replayed(folder):
    def sample(index):
        if index == 5:
            raise ValueError("broken")
        return {"x": np.int32(index)}

    source = ms.DiskSampleSource(
        40, sample, sample_spec={"x": jax.ShapeDtypeStruct((), np.int32)}, ordering="sequential"
    )
    loader = ms.DataLoader([source, ms.BatchTransform(4)], executor=ms.Threads(1), on_error="skip batch")
    watched_run(loader, 3, tasks=[(ms.every(1), ms.checkpoint(folder / "after"))])
    with pytest.raises(ValueError, match=r"cannot tell which batch step 2 had: .* at batch 4 after 3 steps"):
        ms.replay(folder / "after", loader, 2)
    watched_run(loader, 1, tasks=[(ms.every(1), ms.checkpoint(folder / "before"))])
    with pytest.raises(RuntimeError, match=r'replay cannot make batch 1 of step 2: .*replace\(on_error="raise"\)'):
        ms.replay(folder / "before", loader, 2)
    with pytest.raises(ValueError, match="broken"):
        ms.replay(folder / "before", loader.replace(on_error="raise"), 2)
