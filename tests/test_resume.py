"""A run that was stopped, however and wherever, resumes as if it had never stopped; or it is said why not."""

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import resume_script as script
from conftest import CACHE, assert_trees_equal
from soak import resume_trials

import millstream as ms
from millstream.checkpoints import CheckpointStore
from millstream.checkpoints.folders import step_name
from millstream.errors import DamagedCheckpoint
from millstream.transforms.buffer import BufferTransform

pytestmark = pytest.mark.optimized

KEY = jax.random.key(script.KEY_SEED)
STEPS = script.EPOCHS * script.EPOCH


class Crash(Exception):
    pass


def crash():
    raise Crash


@pytest.fixture(scope="module")
def loader():
    return script.loader()


@pytest.fixture(scope="module")
def whole(memory, loader):
    """The folder of a run that nothing disturbed, with a checkpoint of every step, and what it came to."""
    script.faults.set(None)
    _, found = script.run(memory / "whole", batches=loader, test=script.test_loader(), every=1, keep=None)
    assert not script.differences(found, found)
    return memory / "whole", found


def cut(whole, folder, step):
    """A run as it was left by a process that died behind a step: with one checkpoint, and a log that is ahead of it."""
    (folder / "run").mkdir()
    shutil.copytree(whole[0] / "run" / step_name(step), folder / "run" / step_name(step))
    shutil.copy(whole[0] / "log.csv", folder)


@pytest.mark.parametrize("step", range(1, 2 * script.EPOCH + 1))
def test_a_run_goes_on_from_every_step(whole, folder, loader, step):
    cut(whole, folder, step)
    output, found = script.run(folder, batches=loader, every=1000)
    assert not script.differences(found, whole[1])
    assert output.elapsed.steps == STEPS


def test_a_run_that_is_done_stays_as_it_is(whole, folder, loader):
    cut(whole, folder, STEPS)
    output, found = script.run(folder, batches=loader)
    assert not script.differences(found, whole[1])
    assert output.reason == "it was already finished"
    output, _ = script.run(folder, batches=loader, stop=ms.at(epochs=script.EPOCHS + 1))
    assert output.elapsed.steps == STEPS + script.EPOCH


def test_a_chain_of_twenty_resumes_over_all_executors_and_fused_steps_is_one_run(memory, folder, loader):
    stop, links, done = ms.at(epochs=4), 0, None
    loaders = [loader, *(script.loader(script.EXECUTORS[name]()) for name in ("threads", "processes"))]
    _, expected = script.run(folder / "whole", batches=loader, stop=stop, watched=False)
    while done is None:
        fuse = 3 if links % 4 == 3 else None
        script.faults.set("observed", 2 if fuse is None else 1, action=crash)
        batches = loader if fuse is not None else loaders[links % 3]
        with contextlib.suppress(Crash):
            done = script.run(folder / "chain", batches=batches, stop=stop, watched=False, every=1, fuse=fuse)
        links += 1
    assert links >= 20
    assert not script.differences(done[1], expected)


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_every_executor_comes_to_the_same(whole, folder, executor):
    script.faults.set("evaluation", 5, action=crash)
    batches = script.loader(script.EXECUTORS[executor]())
    with pytest.raises(Crash):
        script.run(folder, batches=batches)
    _, found = script.run(folder, batches=batches)
    assert not script.differences(found, whole[1])


# What differs at resume


def other_samples(leaf, change):
    return {**script.DATA, leaf: change(script.DATA[leaf])}


def changed_state(**changes):
    return {**script.start(), **changes}


def double(batch, mask):
    return batch


def gray(sample, mask, key):
    return sample


CHANGED_DATA = {
    "length": (lambda: script.loader(data=script.arrays(21)), "samples: 22 saved, 21 now"),
    "contents": (lambda: script.loader(data=other_samples("y", np.negative)), "contents: [0-9a-f]{32} saved, "),
    "batch size": (lambda: script.loader(rows=2), r"batches of: 4 \(pad\) saved, 2 \(pad\) now"),
    "ordering": (lambda: script.loader(ordering="sequential"), "ordering: shuffle saved, sequential now"),
    "stage added": (lambda: script.loader(stages=[ms.MapTransform(double)]), r"stages: .* saved, .*double.* now"),
    "random map left out": (lambda: script.loader(jitter=None), r"stages: RandomMapTransform\(jitter\), "),
    "another random map": (lambda: script.loader(jitter=gray), r"RandomMapTransform\(gray\).* now"),
    "dtype": (lambda: script.loader(data=other_samples("x", np.float16)), r"sample: .*x.* float32\[3\].* float16\[3\]"),
    "shape": (lambda: script.loader(data=other_samples("x", lambda x: x[:, :2])), r"float32\[3\].*float32\[2\]"),
    "leaf": (lambda: script.loader(data={**script.DATA, "z": script.DATA["y"]}), r"sample: .*'z'"),
}


@pytest.mark.parametrize("case", CHANGED_DATA)
def test_other_data_are_refused_with_what_differs(whole, folder, case):
    make, words = CHANGED_DATA[case]
    cut(whole, folder, 4)
    with pytest.raises(
        ValueError, match=f"(?s)train_loop resumes only with the same data in the same order.*{words}"
    ) as raised:
        script.run(folder, batches=make())
    assert "saved = ms.restore(directory, state); loop(saved.state, ..., elapsed=saved.elapsed" in str(raised.value)


def test_another_seed_is_refused_with_both(whole, loader):
    with pytest.raises(ValueError, match=r"key: \[0, 3\] saved, \[0, 4\] now"):
        ms.loop(
            script.start(),
            loader,
            {ms.every(1): script.train_step},
            stop=9,
            key=jax.random.key(4),
            resume=whole[0] / "run",
        )
    with pytest.raises(ValueError, match=r"restore resumes only .*\n  key: "):
        ms.restore(whole[0] / "run", script.start(), loader, key=jax.random.key(4))


CHANGED_STATE = {
    "structure": (
        lambda: changed_state(params={**script.start()["params"], "c": jnp.zeros(2)}),
        r"\['c'\]: none saved",
    ),
    "shape": (
        lambda: changed_state(steps=jnp.zeros(2, np.int32)),
        r"\['steps'\]: shape \(\), int32 saved, shape \(2,\), int32 now",
    ),
    "dtype": (lambda: changed_state(steps=jnp.float32(0)), r"\['steps'\]: .* int32 saved, .* float32 now"),
    "optimizer": (
        lambda: changed_state(momentum=optax.adam(0.1).init(script.start()["params"])),
        r"(?s)\['momentum'\]\['a'\]: shape \(3, 4\), float32 saved, none now.*\['momentum'\]\[0\].mu.*none saved",
    ),
}


@pytest.mark.parametrize("case", CHANGED_STATE)
def test_another_model_or_optimizer_is_refused_with_what_differs(whole, loader, case):
    make, words = CHANGED_STATE[case]
    directory = whole[0] / "run"
    with pytest.raises(ValueError, match=words) as raised:
        ms.loop(make(), loader, {ms.every(1): script.train_step}, stop=9, key=KEY, resume=directory)
    (note,) = raised.value.__notes__
    assert "loop resumes only with a state like the one that was saved" in note
    with CheckpointStore(directory, read_only=True) as store:  # as the note says
        assert store.load().tree["['state']['steps']"] == STEPS


def test_other_kinds_of_data_are_refused(whole):
    run = {"tasks": {ms.every(1): ms.loops.noop}, "stop": 20, "resume": whole[0] / "run"}
    with pytest.raises(ValueError, match=r"a position in a DataLoader, and now there is an iterable\. To continue"):
        ms.loop(script.start(), [1, 2, 3], **run)
    with pytest.raises(ValueError, match=r"a position in a DataLoader, and now there is a stream\. To continue"):
        ms.loop(script.start(), stream_loader(), key=KEY, **run)


def test_going_on_with_other_data_on_purpose(whole, folder):
    longer = script.loader(data=script.arrays(30))
    saved = ms.restore(whole[0] / "run", script.start(), step=4)
    tasks = {ms.every(1): script.train_step, ms.every(3): ms.checkpoint(folder / "run")}
    output = ms.loop(
        saved.state, longer, tasks, stop=10, elapsed=saved.elapsed, history=saved.history, key=jax.random.key(5)
    )
    assert output.elapsed.steps == 10
    assert int(output.state["steps"]) == 10
    assert (
        output.history.collect("loss")[:4] == ms.restore(whole[0] / "run", script.start()).history.collect("loss")[:4]
    )
    assert ms.restore(folder / "run", script.start(), longer, key=jax.random.key(5)).elapsed.steps == 10


# Directories


def count_up(steps=5, *, checkpoint, **options: Any):
    return ms.loop(
        jnp.int32(0), range(steps), {ms.every(1): lambda state: state + 1, ms.every(2): checkpoint}, **options
    )


def test_two_runs_in_one_directory_at_a_time_are_refused_by_name(folder):
    def another_run(state):
        count_up(checkpoint=ms.checkpoint(folder))

    with pytest.raises(RuntimeError, match=f"{folder} is held by process {os.getpid()} on "):
        ms.loop(jnp.int32(0), range(3), {ms.every(1): [lambda state: state + 1, another_run, ms.checkpoint(folder)]})

    def another_resumed_run(state):
        count_up(checkpoint=ms.checkpoint(folder), resume=True)

    with pytest.raises(RuntimeError, match="is held by process"):
        ms.loop(jnp.int32(0), range(3), {ms.every(1): [another_resumed_run, ms.checkpoint(folder)]})


def test_a_new_run_sets_checkpoints_of_an_earlier_one_apart(folder):
    count_up(5, checkpoint=ms.checkpoint(folder))
    with pytest.warns(UserWarning, match="had checkpoints of an earlier run, which are now in .*earlier-1"):
        count_up(3, checkpoint=ms.checkpoint(folder))
    assert ms.restore(folder, jnp.int32(0)).elapsed.steps == 3
    assert ms.restore(folder / "earlier-1", jnp.int32(0)).elapsed.steps == 5
    count_up(2, checkpoint=ms.checkpoint(folder, overwrite=True))
    with CheckpointStore(folder, read_only=True) as store:
        assert store.steps() == [2]


def test_a_run_from_elsewhere_does_not_mix_with_what_is_in_its_directory(folder):
    count_up(4, checkpoint=ms.checkpoint(folder / "a"))
    count_up(2, checkpoint=ms.checkpoint(folder / "b"))
    with pytest.warns(UserWarning) as told:
        output = count_up(6, checkpoint=ms.checkpoint(folder / "b"), resume=folder / "a")
    assert {str(warning.message).split(" ")[0] for warning in told} == {"checkpoint:", "loop:"}
    assert output.elapsed.steps == 6
    with CheckpointStore(folder / "b", read_only=True) as store:
        assert store.steps() == [6]
    with CheckpointStore(folder / "a", read_only=True) as store:
        assert store.steps() == [2, 4]


def test_a_run_that_goes_on_by_its_elapsed_keeps_its_checkpoints(folder):
    checkpoint = ms.checkpoint(folder)
    first = count_up(3, checkpoint=checkpoint)
    count_up(2, checkpoint=checkpoint, elapsed=first.elapsed, history=first.history)
    with CheckpointStore(folder, read_only=True) as store:
        assert store.steps() == [3, 4, 5]


@pytest.mark.parametrize("resume", [True, "here"])
def test_without_anything_to_resume_a_run_begins(folder, resume):
    resume = folder / "run" if resume == "here" else resume
    output = count_up(3, checkpoint=ms.checkpoint(folder / "run"), resume=resume)
    assert int(output.state) == output.elapsed.steps == 3


def test_resume_that_makes_no_sense_is_refused(folder):
    given: dict[str, Any]
    for given in ({"elapsed": ms.loops.Elapsed()}, {"history": ms.loops.history()}, {"data_state": 3}):
        with pytest.raises(ValueError, match="loop takes elapsed, history and data_state from what it resumes"):
            count_up(checkpoint=ms.checkpoint(folder), resume=True, **given)
    with pytest.raises(TypeError, match=r"loop needs resume as a directory, or True .* Got 3"):
        count_up(checkpoint=ms.checkpoint(folder), resume=3)
    with pytest.raises(ValueError, match=r"loop with resume=True needs an ms\.checkpoint"):
        count_up(checkpoint=ms.loops.noop, resume=True)
    with pytest.raises(FileNotFoundError, match="restore found no checkpoint in"):
        ms.restore(folder, jnp.int32(0))


# Damage


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_named_and_the_checkpoint_before_it_used(whole, folder, loader):
    cut(whole, folder, 5)
    newer = shutil.copytree(whole[0] / "run" / step_name(7), folder / "run" / step_name(7))
    flip_a_bit(max((path for path in newer.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size))
    with pytest.warns(
        RuntimeWarning, match=r"(?s)Checkpoint 7 in .* is damaged:.*SHA-256.*Checkpoint 5 is used instead"
    ):
        _, found = script.run(folder, batches=loader)
    assert not script.differences(found, whole[1])


def test_where_nothing_is_whole_a_run_does_not_begin_anew(whole, folder, loader):
    cut(whole, folder, 5)
    flip_a_bit(folder / "run" / step_name(5) / "run.json")
    with pytest.raises(DamagedCheckpoint, match=r"run\.json: SHA-256"):
        script.run(folder, batches=loader)


# Processes that are ended from outside


@pytest.fixture(scope="module")
def trials(memory):
    folder = memory / "trials"
    folder.mkdir()
    return folder


def test_a_full_disk_is_told_at_once_and_costs_nothing_that_was_saved(trials):
    outcome = resume_trials.outcome_of("full_disk_run", 1, 1, trials, **CACHE)
    assert outcome.failures == []
    assert outcome.ok == 1


def test_runs_that_are_killed_anywhere_come_to_the_same(trials):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(resume_trials.outcome_of, "killed_run", 8, seed, trials, **CACHE) for seed in (1, 2)]
        outcomes = [future.result() for future in futures]
    assert [outcome.failures for outcome in outcomes] == [[], []]
    assert sum(outcome.ok for outcome in outcomes) >= 16


# Data that are no loaders


def stream_loader(add=0):
    buffer = BufferTransform(8, 4, 4, "uniform")
    source = ms.ArraySampleSource({"x": np.arange(12, dtype=np.float32) + add}, ordering="shuffle")
    return ms.DataLoader([source, buffer])


@jax.jit
def add_up(state, batch):
    x = batch["x"] if isinstance(batch, dict) else batch[0]["x"]
    return ms.logs().add_metric("sum", jnp.sum(x)), state + jnp.sum(x)


def halves(folder, make, stop: int | None = 10, at=4, **options):
    """The states and histories of a run, and of one that is stopped and taken up by another process, as it were."""

    def tasks(name, crashing=None):
        def maybe(state, batch, elapsed):
            if elapsed.steps == crashing:
                raise Crash

        return {ms.every(1): [add_up, maybe], ms.every(1): ms.checkpoint(folder / name)}

    expected = ms.loop(jnp.float32(0), make(), tasks("whole"), stop=stop, **options)
    with pytest.raises(Crash):
        ms.loop(jnp.float32(0), make(), tasks("cut", at + 1), stop=stop, **options)
    found = ms.loop(jnp.float32(0), make(), tasks("cut"), stop=stop, resume=True, **options)
    return expected, found


def assert_same_run(expected, found):
    assert_trees_equal(found.state, expected.state)
    assert found.elapsed.steps == expected.elapsed.steps
    assert script.table(found.history) == script.table(expected.history)


BATCHES = [{"x": np.arange(number, number + 4, dtype=np.float32)} for number in range(12)]


@pytest.mark.parametrize("make", [lambda: BATCHES, lambda: iter(BATCHES), lambda: lambda: iter(BATCHES)])
def test_an_iterable_is_gone_through_again_with_a_warning(folder, make):
    with pytest.warns(
        UserWarning, match=r"loop: \w+ cannot be started in the middle, so 4 batches are drawn and thrown away"
    ):
        expected, found = halves(folder, make)
    assert_same_run(expected, found)


def test_an_iterable_that_has_become_too_short_is_refused(folder):
    count_up(5, checkpoint=ms.checkpoint(folder))
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match="loop is at step 5, and the data end after 3 batches"),
    ):
        count_up(3, checkpoint=ms.checkpoint(folder), resume=True)


def test_an_iterable_that_lacks_the_batch_of_a_step_that_was_cut_short_is_refused(folder):
    def run(batches, *actions, **options):
        def step(state, batch):
            for action in actions:
                action()

        tasks = {
            ms.at(3): lambda state: ms.loop(state, range(2), {ms.every(1): step}),
            ms.every(2): ms.checkpoint(folder),
        }
        return ms.loop(jnp.int32(0), range(batches), tasks, **options)

    assert run(5, lambda: os.kill(os.getpid(), signal.SIGINT)).elapsed.steps == 3
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="at step 3, and the data end after 2 batches"):
        run(2, resume=True)


class Seekable:
    """Batches with a state, as Grain's iterators have it; it has its `state` for itself."""

    state = "mine"

    def __init__(self):
        self.position, self.drawn = 0, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == len(BATCHES):
            raise StopIteration
        self.position += 1
        self.drawn += 1
        return BATCHES[self.position - 1]

    def get_state(self):
        return {"position": self.position, "words": b"\x00\xff"}

    def set_state(self, state):
        assert state["words"] == b"\x00\xff"
        self.position = state["position"]


def test_an_iterator_with_a_state_goes_on_at_once(folder):
    made = []

    def make():
        made.append(Seekable())
        return made[-1]

    assert_same_run(*halves(folder, make))
    assert made[-1].drawn == 6
    with pytest.raises(ValueError, match=r"a position in an iterator with a state, and that of .* has no set_state"):
        ms.loop(jnp.float32(0), BATCHES, {ms.every(1): add_up}, stop=20, resume=folder / "cut")


@pytest.mark.parametrize("executor", script.EXECUTORS)
def test_a_loaders_own_iterator_can_be_the_data_and_goes_on(folder, executor):
    source = script.loader(script.EXECUTORS[executor]())
    state = source.init_state(KEY)
    assert_same_run(*halves(folder, lambda: source.iterate(state, steps=9), stop=None))


def test_a_stream_goes_on_from_its_state(folder):
    loader = stream_loader()
    assert_same_run(*halves(folder, lambda: loader, key=KEY))
    with pytest.raises(ValueError, match="restore needs the loader, whose data are a stream"):
        ms.restore(folder / "cut", jnp.float32(0))
    saved = ms.restore(folder / "cut", jnp.float32(0), loader, step=8)
    batch, _, _ = loader.next_batch(saved.data_state)
    assert float(jnp.sum(batch["x"])) == ms.restore(folder / "whole", jnp.float32(0), loader).history.collect("sum")[8]


@pytest.mark.parametrize("executor", script.EXECUTORS)
def test_an_iterators_state_is_plain_and_leads_back_there(executor):
    loader = script.loader(script.EXECUTORS[executor]())
    start = loader.init_state(KEY)
    batches = loader.iterate(start, steps=9)
    saved, seen = [json.dumps(batches.get_state())], []
    for batch, _ in batches:
        seen.append(jax.device_get(batch))
        saved.append(json.dumps(batches.get_state()))
    for position in (0, 4, 8):
        other = loader.iterate(start, steps=2)
        next(other)
        other.set_state(json.loads(saved[position]))
        rest = [jax.device_get(batch) for batch, _ in other]
        assert len(rest) == 9 - position
        for found, expected in zip(rest, seen[position:], strict=True):
            assert_trees_equal(found, expected)


# By hand, and what is kept


def test_a_run_by_hand_is_saved_and_restored(folder, loader):
    def train(stop, saved=None):
        state = script.start() if saved is None else saved.state
        history = ms.loops.history() if saved is None else saved.history
        begin = loader.init_state(KEY) if saved is None else saved.data_state
        checkpoint, due = ms.checkpoint(folder), ms.every(3)
        batches = loader.iterate(begin, steps=stop - (0 if saved is None else saved.elapsed.steps))
        for elapsed, batch in ms.loops.elapse(batches, initial=None if saved is None else saved.elapsed):
            logs, state = script.train_step(state, batch)
            history.commit(elapsed, logs)
            if due(elapsed):
                checkpoint(elapsed, state, data_state=batches.state, history=history, metrics={"loss": 0.5})
        checkpoint.close()
        return state, history

    state, history = train(11)
    saved = ms.restore(folder, script.start(), loader, key=KEY)
    assert saved.elapsed.steps == 9
    assert saved.metrics == {"loss": 0.5}
    again, whole = train(11, saved)
    assert script.bits(again) == script.bits(state)
    assert script.table(whole) == script.table(history)
    train(14, saved)
    with CheckpointStore(folder, read_only=True) as store:
        assert store.steps() == [6, 9, 12]
    with pytest.warns(UserWarning, match="earlier-1"):  # another run, whose first checkpoint is not of its first step
        train(4)
    assert ms.restore(folder, script.start()).elapsed.steps == 3


def test_a_state_that_is_donated_is_saved_as_it_was(folder, loader):
    tasks = {ms.every(1): [script.donating_step, ms.checkpoint(folder, keep=None)]}
    plain = ms.loop(script.start(), loader, {ms.every(1): script.train_step}, stop=6, key=KEY)
    output = ms.loop(script.start(), loader, tasks, stop=6, key=KEY)
    assert script.bits(output.state) == script.bits(plain.state)
    half = ms.restore(folder, script.start(), step=3)
    assert half.elapsed.steps == int(half.state["steps"]) == 3
    rest = ms.loop(
        half.state,
        loader,
        {ms.every(1): script.donating_step},
        stop=6,
        elapsed=half.elapsed,
        data_state=half.data_state,
    )
    assert script.bits(rest.state) == script.bits(plain.state)


def test_the_best_and_the_latest_are_kept_and_nan_counts_for_nothing(folder):
    losses = [5.0, 1.0, float("nan"), 3.0, 2.0, float("nan"), 4.0]

    def step(state, batch):
        return ms.logs().add_metric("loss", batch), state + 1

    checkpoint = ms.checkpoint(folder, keep=2, best=2, monitor="loss")
    ms.loop(jnp.int32(0), losses, {ms.every(1): [step, checkpoint]}, batch_size_fn=lambda _: 1)
    with CheckpointStore(folder, read_only=True) as store:
        assert store.steps() == [2, 5, 6, 7]
    assert ms.restore(folder, jnp.int32(0), step=2).metrics == {"loss": 1.0}


def test_a_metric_of_an_earlier_step_says_nothing_of_this_state(folder):
    def step(state, batch):
        return (ms.logs().add_metric("loss", 0.5) if batch == 0 else None), state + 1

    ms.loop(jnp.int32(0), range(3), {ms.every(1): [step, ms.checkpoint(folder, best=1, monitor="loss")]})
    assert [dict(ms.restore(folder, jnp.int32(0), step=step).metrics) for step in (1, 2)] == [{"loss": 0.5}, {}]


def test_a_number_of_python_that_a_step_has_made_an_array_is_resumed(folder):
    """As the step of a TrainState of flax, which begins as 0."""

    @jax.jit
    def step(state, batch):
        return {"step": state["step"] + 1, "rate": state["rate"] * 0.5, "on": state["on"], "name": state["name"]}

    def run(steps, **options):
        state = {"step": 0, "rate": 1.0, "on": True, "name": jnp.int32(3)}
        return ms.loop(state, range(8), {ms.every(1): step, ms.every(2): ms.checkpoint(folder)}, stop=steps, **options)

    whole = ms.loop({"step": 0, "rate": 1.0, "on": True, "name": jnp.int32(3)}, range(8), {ms.every(1): step}).state
    run(4)
    with pytest.warns(UserWarning, match="thrown away"):
        resumed = run(8, resume=True).state
    assert jax.tree.map(lambda leaf: (leaf.weak_type, leaf.dtype), resumed) == jax.tree.map(
        lambda leaf: (leaf.weak_type, leaf.dtype), whole
    )
    assert_trees_equal(resumed, whole)
    with pytest.raises(ValueError, match=r"tree\['state'\]\['step'\]: shape \(\), int32 saved, float"):
        ms.restore(folder, {"step": 0.0, "rate": 1.0, "on": True, "name": jnp.int32(3)})


def monitored(folder, monitor, tasks=None, **options):
    """A run of 12 steps in epochs of 4 that logs loss at every step, and loss_test at the end of an epoch."""
    tested = {ms.every(epochs=1): lambda: ms.logs().add_metric("loss_test", 0.5)}
    tasks = {ms.every(1): lambda state: (ms.logs().add_metric("loss", 1.0), state + 1), **(tested | (tasks or {}))}
    saving = ms.checkpoint(folder, best=1, monitor=monitor, **options)
    return ms.loop(jnp.int32(0), range(12), [*tasks.items(), (ms.every(2), saving)], epoch_duration=4)


@pytest.mark.parametrize(
    ("monitor", "step", "hint"),
    [
        ("accuracy_test", 4, ""),
        ("los_test", 4, r" Did you mean 'loss_test'\?"),
        ("los", 4, r" Did you mean 'loss'\?"),
        ("metric.loss", 4, r" Did you mean 'metrics\.loss'\?"),
    ],
)
def test_a_monitor_that_was_not_logged_in_a_whole_epoch_is_refused(folder, monitor, step, hint):
    logged = r"Logged: metrics\.loss, metrics\.loss_test\. .*monitor_from="
    message = rf"^checkpoint monitors '{monitor}', which was not logged in a whole epoch\.{hint} {logged}"
    with pytest.raises(ValueError, match=message) as raised:
        monitored(folder, monitor)
    assert raised.value.loop_output.elapsed.steps == step  # type: ignore[attr-defined]
    assert ms.restore(folder, jnp.int32(0)).elapsed.steps == step  # what there was to save is saved


def test_a_monitor_beside_other_results_of_the_test_is_refused_at_once(folder):
    with pytest.raises(ValueError, match="which was not logged with other results of the test") as raised:
        monitored(folder, "accuracy_test", {ms.at(2): lambda: ms.logs().add_metric("loss_test", 0.5)})
    assert raised.value.loop_output.elapsed.steps == 2  # type: ignore[attr-defined]


def test_a_monitor_that_was_never_logged_is_refused_at_the_end_of_a_run_without_epochs(folder):
    saving = ms.checkpoint(folder, best=1, monitor="los")
    train = lambda state: (ms.logs().add_metric("loss", 1.0), state + 1)  # noqa: E731
    with pytest.raises(ValueError, match=r"which was never logged\. Did you mean 'loss'\?") as raised:
        ms.loop(jnp.int32(0), range(5), {ms.every(1): train, ms.every(2): saving})
    assert raised.value.loop_output.elapsed.steps == 5  # type: ignore[attr-defined]
    assert ms.restore(folder, jnp.int32(0)).elapsed.steps == 5
    saving = ms.checkpoint(folder, best=1, monitor="loss")
    with pytest.warns(UserWarning, match="5 batches are drawn"):
        output = ms.loop(jnp.int32(0), range(7), {ms.every(1): train, ms.every(2): saving}, resume=folder)
    assert output.elapsed.steps == 7 and ms.restore(folder, jnp.int32(0)).metrics == {"loss": 1.0}


def test_a_monitor_may_be_logged_later(folder):
    late = {ms.at(epochs=3): lambda: ms.logs().add_metric("late", 0.5)}
    monitored(folder / "a", "late", late, monitor_from=ms.at(epochs=3))
    assert ms.restore(folder / "a", jnp.int32(0)).metrics == {"late": 0.5}
    assert monitored(folder / "b", "never", monitor_from=ms.at(epochs=4)).elapsed.steps == 12
    with pytest.raises(ValueError, match=r"'never', which was not logged up to step 8") as raised:
        monitored(folder / "c", "never", monitor_from=ms.at(epochs=2))
    assert raised.value.loop_output.elapsed.steps == 8  # type: ignore[attr-defined]


def test_an_interrupted_run_is_not_asked_for_its_monitor(folder):
    def interrupt():
        raise KeyboardInterrupt

    def fail():
        raise RuntimeError("no")

    assert monitored(folder, "accuracy_test", {ms.at(3): interrupt}).interrupted
    with pytest.raises(RuntimeError) as raised:
        monitored(folder / "b", "accuracy_test", {ms.at(3): fail})
    assert not any("Ending the loop failed" in note for note in raised.value.__notes__)


def test_by_hand_the_metrics_have_the_monitor(folder):
    saving = ms.checkpoint(folder, best=1, monitor="los")
    saving(ms.loops.Elapsed(steps=1), jnp.int32(1))  # nothing was measured here
    with pytest.raises(
        ValueError, match=r"checkpoint monitors 'los', which is not in metrics\. Did you mean 'loss'\? Given: loss\."
    ):
        saving(ms.loops.Elapsed(steps=2), jnp.int32(2), metrics={"loss": 0.5})
    with pytest.warns(UserWarning, match=r"checkpoint monitors 'los', and no save has had it.*metrics="):
        saving.close()
    for wrong in (3, ""):
        with pytest.raises(TypeError, match=r'checkpoint needs monitor as "name" or "collection.name"\. Got '):
            ms.checkpoint(folder, monitor=wrong)  # pyright: ignore[reportArgumentType]


def test_the_final_state_is_always_saved(folder):
    output = count_up(5, checkpoint=ms.checkpoint(folder))
    assert ms.restore(folder, jnp.int32(0)).elapsed.steps == output.elapsed.steps == 5


def test_a_checkpoint_may_be_asked_for_at_the_end(folder):
    ms.loop(jnp.int32(0), range(3), {ms.every(1): lambda state: state + 1}, on_end=ms.checkpoint(folder))
    assert int(ms.restore(folder, jnp.int32(0)).state) == 3


def test_a_step_that_fails_is_not_saved_and_earlier_ones_stay(folder):
    def fail(state, batch, elapsed):
        if elapsed.steps == 4:
            raise Crash

    with pytest.raises(Crash) as raised:
        ms.loop(
            jnp.int32(0), range(9), {ms.every(1): [lambda state: state + 1, fail], ms.every(2): ms.checkpoint(folder)}
        )
    assert raised.value.loop_output.elapsed.steps == 4  # pyright: ignore[reportAttributeAccessIssue]
    with CheckpointStore(folder, read_only=True) as store:
        assert store.steps() == [2]


# The end of a run


def epochs_and_ends(folder, stop, crashing=None, callback=None, **options):
    """A run with a test at the end of each epoch and of the run, which may break off in one of them."""
    tests = []

    def test(state):
        tests.append(int(state))
        if len(tests) == crashing:
            raise Crash
        return ms.logs().add_metric("tested", int(state))

    tasks = [
        (ms.every(1), lambda state: (ms.logs().add_metric("step", int(state)), state + 1)),
        (ms.every(4) | ms.loops.last(), test),
        *([] if callback is None else [(ms.every(1), callback)]),
        (ms.every(1), ms.checkpoint(folder)),
    ]
    return ms.loop(jnp.int32(0), range(10), tasks, stop=stop, resume=True, **options), tests


def stop_at_six(state, batch, elapsed, loop_state):
    if elapsed.steps == 6:
        loop_state.stop("six are enough")


@pytest.mark.parametrize(
    "stop",
    [6, ms.at(samples=6), lambda elapsed: elapsed.steps >= 6, None],
    ids=["steps", "samples", "function", "data"],
)
def test_a_run_that_dies_in_its_last_test_has_it_done_by_the_next(folder, stop):
    last = 10 if stop is None else 6
    expected, _ = epochs_and_ends(folder / "whole", stop)
    with pytest.raises(Crash):
        epochs_and_ends(folder / "cut", stop, crashing=-(-last // 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that batches are drawn again
        found, tests = epochs_and_ends(folder / "cut", stop)
        again, none = epochs_and_ends(folder / "cut", stop)
    assert script.table(found.history) == script.table(expected.history) == script.table(again.history)
    assert found.history.collect("tested")[-1] == last
    assert tests == [last]
    assert none == []


def interrupt():
    raise KeyboardInterrupt


def test_a_run_that_is_interrupted_in_its_last_task_has_it_done_by_the_next(folder):
    done = []

    def run(last):
        tasks = [(ms.every(1), lambda state: state + 1), (ms.loops.last(), last), (ms.every(2), ms.checkpoint(folder))]
        return ms.loop(jnp.int32(0), range(5), tasks, resume=True)

    assert run(interrupt).interrupted
    with pytest.warns(UserWarning, match="4 batches are drawn"):
        assert run(lambda state: done.append(int(state))).elapsed.steps == 5
    assert done == [5]


class InterruptedBehindBatch:
    """A loader in whose run an interrupt comes when a batch has been handed out, before its samples are counted."""

    def __init__(self, loader, step):
        self._loader, self._step = loader, step
        self.steps_per_epoch, self.init_state = loader.steps_per_epoch, loader.init_state
        self.contents = loader.contents

    def iterate(self, state, *, steps=None):
        batches, step = self._loader.iterate(state, steps=steps), self._step

        class Iterator(type(batches)):
            @property
            def samples(self):
                if int(self.state.step) == step:
                    interrupt()
                return 4

            @samples.setter
            def samples(self, count):
                pass

        batches.__class__ = Iterator
        return batches


@pytest.mark.parametrize("step", [script.train_step, lambda state, batch: script.train_step(state, batch)])
def test_a_batch_that_an_interrupt_follows_at_once_is_not_lost(folder, loader, step):
    tasks = {ms.every(1): step, ms.every(2): ms.checkpoint(folder)}
    whole = ms.loop(script.start(), loader, {ms.every(1): step}, stop=9, key=KEY)
    cut = ms.loop(script.start(), InterruptedBehindBatch(loader, 6), tasks, stop=9, key=KEY)
    assert cut.interrupted and int(cut.state["steps"]) == 5
    saved = ms.restore(folder, script.start(), loader)
    assert saved.elapsed.steps == int(saved.data_state.step) == int(saved.state["steps"])
    rest = ms.loop(script.start(), loader, tasks, stop=9, key=KEY, resume=True)
    assert script.bits(rest.state) == script.bits(whole.state)


def test_what_was_done_before_a_fused_step_is_not_done_twice(folder, loader):
    left = [lambda: os.kill(os.getpid(), signal.SIGINT)]

    def evaluate(state):
        def step(state, batch):
            if batch == 1 and left:
                left.pop()()

        return ms.loop(state, range(3), {ms.every(1): step})

    def run(name):
        tasks = [
            (ms.every(3), [lambda state: {**state, "steps": state["steps"] + 100}, ms.inner_loop("test", evaluate)]),
            (ms.every(1), script.train_step),
            (ms.every(50), ms.checkpoint(folder / name)),
        ]
        return ms.loop(script.start(), loader, tasks, stop=8, key=KEY, fuse=3, resume=True)

    assert run("cut").elapsed.steps == 2
    found = run("cut")
    assert script.bits(found.state) == script.bits(run("whole").state)
    assert int(found.state["steps"]) == 208


def test_a_run_that_only_had_its_last_test_left_knows_where_its_data_are(folder):
    def run(stop, test):
        data = Seekable()
        tasks = [(ms.every(1), add_up), (ms.loops.last(), test), (ms.every(1), ms.checkpoint(folder))]
        return ms.loop(jnp.float32(0), data, tasks, stop=stop, resume=True), data.drawn

    with pytest.raises(Crash):
        run(ms.at(samples=20), crash)
    assert run(ms.at(samples=20), ms.loops.noop)[1] == 0
    output, drawn = run(8, ms.loops.noop)
    assert output.elapsed.steps == 8
    assert drawn == 3
    assert output.history.collect("sum") == [float(batch["x"].sum()) for batch in BATCHES[:8]]


def test_a_run_that_a_callback_has_ended_is_over(folder):
    expected, _ = epochs_and_ends(folder / "whole", 9, callback=stop_at_six)
    with pytest.raises(Crash):
        epochs_and_ends(folder / "cut", 9, crashing=2, callback=stop_at_six)
    found, tests = epochs_and_ends(folder / "cut", 9, callback=stop_at_six)
    assert found.reason == expected.reason == "six are enough"
    assert tests == [6]
    assert script.table(found.history) == script.table(expected.history)


# What callbacks remember


class Keeper(ms.Callback):
    def __init__(self, memory):
        self.memory = memory

    def __loop_callback__(self, loop_state):
        return None

    def get_state(self):
        return {"memory": self.memory}

    def set_state(self, state):
        self.memory = state["memory"]


@pytest.mark.parametrize(
    "kept",
    [
        None,
        (1, "two", [3.0, {"four": b"4"}]),
        jnp.arange(3, dtype=jnp.bfloat16),
        np.arange(3.0),
        {"mixed": [np.arange(2), jnp.float32(3)], "more": (jnp.zeros((0, 2)), "x")},
        jax.random.key(3),
        {"w": jnp.ones(2)},
    ],
    ids=lambda kept: type(kept).__name__,
)
def test_what_callbacks_remember_comes_back_as_it_was(folder, kept):
    found = remembered(folder, kept)
    assert jax.tree.structure(found) == jax.tree.structure(kept)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(kept), strict=True):
        assert type(a) is type(b) or isinstance(b, jax.Array)
        assert isinstance(a, jax.Array) == isinstance(b, jax.Array)
        assert script.bits(a) == script.bits(b) if hasattr(a, "dtype") else a == b


def remembered(folder, kept):
    """What a callback knows in a run that continues with one in which it was given something to keep."""

    def run(kept, **options):
        keeper = Keeper(kept)
        tasks = {ms.every(1): [lambda state: {"w": state["w"] + 1}, keeper, ms.checkpoint(folder)]}
        ms.loop({"w": jnp.zeros(2)}, lambda: range(3), tasks, **options)
        return keeper.memory

    run(kept)
    with pytest.warns(UserWarning, match="3 batches are drawn"):
        return run("nothing", resume=True, stop=4)


def test_dicts_that_callbacks_remember_may_have_any_keys(folder):
    found = remembered(folder, {4: jnp.float32(3), "x": 5})
    assert list(found) == [4, "x"]
    assert float(found[4]) == 3


def test_what_cannot_be_remembered_is_refused_by_name(folder):
    with pytest.raises(
        TypeError, match=r"(?s)checkpoint keeps of what a callback remembers.*Keeper.get_state\(\)\['memory'\]\[1\]"
    ):
        ms.loop(jnp.int32(0), range(3), {ms.every(1): [Keeper([jnp.ones(2), object()]), ms.checkpoint(folder)]})


def test_two_callbacks_of_a_kind_are_told_apart(folder):
    def run(first, second, **options):
        keepers = [Keeper(first), Keeper(second)]
        ms.loop(jnp.int32(0), lambda: range(3), {ms.every(1): [*keepers, ms.checkpoint(folder)]}, **options)
        return [keeper.memory for keeper in keepers]

    run("a", "b")
    with pytest.warns(UserWarning):
        assert run(None, None, resume=True, stop=4) == ["a", "b"]
