"""Runs that change at given steps: batch sizes by step, and loaders that take over from one another."""

import dataclasses
import os
import re
import subprocess
import sys
import textwrap
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CACHE, assert_trees_equal
from hypothesis import given

import millstream as ms
from millstream.plan.phases import EpochLengths, phased_plan
from millstream.plan.plan import Batching, Plan

N, SIZES = 50, {0: 4, 5: 8, 11: 6}
DATA = {"x": np.arange(N, dtype=np.float32), "image": np.arange(N * 16, dtype=np.float32).reshape(N, 4, 4)}


def noisy(value, mask, key):
    return {**value, "noise": jax.random.uniform(key)}


def by_step(sizes: Any = SIZES, ordering: Any = "shuffle", stages: Any = (), **options: Any) -> Any:
    """A loader whose batch size changes."""
    source = ms.ArraySampleSource(DATA, ordering)
    return ms.DataLoader([source, ms.RandomMapTransform(noisy), ms.BatchTransform(sizes), *stages], **options)


def small(**options: Any) -> Any:
    halved = ms.MapTransform(lambda sample, mask: {**sample, "image": sample["image"][::2, ::2]})
    return ms.DataLoader([ms.ArraySampleSource(DATA), halved, ms.BatchTransform(4)], **options)


def large(**options: Any) -> Any:
    return ms.DataLoader([ms.ArraySampleSource(DATA), ms.BatchTransform(6)], **options)


def drawn(loader, key, steps, first=0):
    return [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key, step=first), steps=steps)]


def samples_of(batches):
    return np.concatenate([batch["x"][mask] for batch, mask in batches]).astype(int).tolist()


# The plan


def walked(n, ending, starts, sizes, steps):
    """The (epoch, position) of every row, None for padding, by counting one after the other."""
    batches, epoch, position = [], 0, 0
    for step in range(steps):
        size = sizes[max(number for number, start in enumerate(starts) if start <= step)]
        if ending == "drop" and n - position < size:
            epoch, position = epoch + 1, 0
        rows: list[Any] = []
        for _ in range(size):
            if position == n and ending == "wrap":
                epoch, position = epoch + 1, 0
            rows.append((epoch, position) if position < n else None)
            position += position < n
        if position == n or (ending == "drop" and n - position < size):
            epoch, position = epoch + 1, 0
        batches.append(rows)
    return batches


@given(st.data())
def test_batches_of_changing_sizes_are_what_counting_gives(data):
    n, ending = data.draw(st.integers(1, 30)), data.draw(st.sampled_from(["pad", "drop", "wrap"]))
    gaps = data.draw(st.lists(st.integers(1, 9), max_size=3))
    starts = tuple(np.cumsum([0, *gaps]).tolist())
    sizes = [data.draw(st.integers(1, n if ending == "drop" else 12)) for _ in starts]
    plan = phased_plan([Plan(n, "sequential", (Batching(size, ending, n),)) for size in sizes], starts)
    words, steps = np.zeros(2, np.uint32), 40
    expected, places = walked(n, ending, starts, sizes, steps), []
    for step, rows in enumerate(expected):
        phase, own = plan.phase_at(step)
        part = plan.phases[phase]
        assert isinstance(part, Plan)
        positions, levels = part.at(np, words, np.uint32(own))
        found = zip(levels[-1].epoch, positions, levels[-1].mask, strict=True)
        assert [(int(e), int(p)) if real else None for e, p, real in found] == rows
        places.append((int(levels[0].epoch), int(levels[0].element)))
    assert len(set(places)) == steps  # so no two batches have the same random numbers
    assert plan.real_samples_of(words, range(steps)) == [sum(row is not None for row in rows) for rows in expected]
    if ending == "pad":
        ends = np.cumsum([0, *(any(row and row[1] == n - 1 for row in rows) for rows in expected)]).tolist()
        assert [plan.epochs.completed(step) for step in range(steps + 1)] == ends
        assert plan.epochs.completed_traced(np, np.arange(steps + 1)).tolist() == ends
        for step in range(0, ends.index(ends[-1])):
            epoch = [other for other in range(steps) if ends[other] == ends[step]]
            assert plan.epochs.steps_of(step) == range(epoch[0], epoch[-1] + 1)


@pytest.mark.parametrize("ending", ["pad", "drop", "wrap"])
def test_a_compiled_program_plans_the_same(ending, key):
    plans = [Plan(37, "shuffle", (Batching(size, ending, 37),)) for size in (4, 7)]
    taken = phased_plan(plans, (0, 13)).phases[1]
    assert isinstance(taken, Plan)
    words, steps = np.asarray(jax.random.key_data(key)), np.arange(30, dtype=np.uint32)
    traced = jax.jit(jax.vmap(lambda step: taken.at(jnp, jnp.asarray(words), step)[0]))(steps)
    np.testing.assert_array_equal(taken.at(np, words, steps)[0], traced)


def test_epochs_of_one_length_are_counted_as_always():
    lengths = phased_plan([Plan(10, "shuffle", (Batching(4, "pad", 10),))], (0,)).epochs
    assert isinstance(lengths, EpochLengths)
    assert [lengths.completed(step) for step in range(8)] == [step // 3 for step in range(8)]


# Batches


def test_samples_come_in_the_order_of_any_batch_size(key):
    """An epoch is complete, whichever sizes its batches have."""
    changing, plain = drawn(by_step(), key, 25), drawn(by_step(1), key, 3 * N)
    assert [mask.shape[0] for _, mask in changing] == [4] * 5 + [8] * 6 + [6] * 14
    seen = samples_of(changing)
    assert seen[: 2 * N] == samples_of(plain)[: 2 * N]
    # The noise of a sample is that of the sample in its epoch, not of the batch it is in.
    noise = [np.concatenate([batch["noise"][mask] for batch, mask in run])[:N] for run in (changing, plain)]
    np.testing.assert_array_equal(noise[0], noise[1])


@pytest.mark.parametrize("executor", [ms.Threads(2), ms.Processes(2)])
@pytest.mark.parametrize("made", [by_step, lambda **options: ms.phases({0: small(**options), 7: large(**options)})])
def test_phases_give_the_same_batches_wherever_they_are_made(made, executor, key):
    expected, other = drawn(made(), key, 20), made(executor=executor)
    assert_trees_equal(drawn(other, key, 20), expected)
    with other:
        for step in range(0, 18, 4):
            assert_trees_equal(drawn(other, key, 2, step), expected[step : step + 2])
            batch, _, mask = other.next_batch(other.init_state(key, step=step))
            assert_trees_equal(jax.device_get((batch, mask)), expected[step])
    assert other.stats().batches > 0


def test_random_stages_over_batches_differ_from_batch_to_batch(key):
    stage = ms.RandomMapTransform(lambda batch, mask, key: {**batch, "one": jax.random.uniform(key)})
    batches = drawn(by_step(stages=[stage]), key, 30)
    assert len({float(batch["one"]) for batch, _ in batches}) == 30


def test_a_run_with_phases_resumes_at_every_step(key):
    loader, steps = by_step(), 16
    expected = drawn(loader, key, steps)
    for stop in range(1, steps):
        batches = loader.iterate(loader.init_state(key), steps=steps)
        for _ in range(stop):
            next(batches)
        saved = batches.get_state()
        batches.close()
        resumed = by_step(executor=ms.Threads(1)).iterate(loader.init_state(key), steps=0)
        resumed.set_state(saved)
        assert_trees_equal([jax.device_get(pair) for pair in resumed], expected[stop:])


def test_what_is_known_of_a_batch_counts_in_the_whole_run(key):
    loader, n = by_step(), 0
    for batch, mask, info in loader.iterate(loader.init_state(key), steps=12, with_info=True):
        assert info.indices[np.asarray(mask)].tolist() == batch["x"][mask].astype(int).tolist()
        assert info.step == n and info.epoch == (n >= 9)
        assert info.step_in_epoch == (n if n < 9 else n - 9)
        n += 1
    assert len(list(loader.iterate(loader.init_state(key)))) == loader.steps_per_epoch == 9
    assert len(list(loader.iterate(loader.init_state(key, step=7)))) == 2
    assert loader.sample_counter(loader.init_state(key))(range(12)) == [4] * 5 + [8] * 3 + [6] + [8] * 2 + [6]


def test_batches_of_phases_are_cached(key, tmp_path):
    expected = drawn(by_step(), key, 14)
    for mode in ("read-write", "cache-only"):
        cached = by_step(cache=ms.BatchCache(tmp_path / "cache", mode=mode))
        assert_trees_equal(drawn(cached, key, 14), expected)
    assert (tmp_path / "cache" / "from-step-5").is_dir()
    assert all(phase.pipeline.host.cache is not None for phase in cached.phases.values())
    apart = ms.phases({0: small(cache=ms.BatchCache(tmp_path / "small")), 7: large()})
    assert apart.phases[0].pipeline.host.cache is not None  # each loader keeps its own
    assert apart.replace(executor=ms.Threads(1)).phases[0].pipeline.host.cache is None  # unless it is told otherwise


def test_samples_that_are_collated_by_size(key):
    def collate(samples):
        return {"x": np.array([sample["x"] for sample in samples], np.float32)}

    source = ms.DatasetSource([{"x": float(i)} for i in range(20)], "sequential")
    loader = ms.DataLoader([source, ms.BatchTransform({0: 2, 3: 5}, collate=collate)])
    batches = drawn(loader, key, 7)
    assert samples_of(batches) == [*range(20), *range(5)]
    assert [len(mask) for _, mask in batches] == [2, 2, 2, 5, 5, 5, 5]


def test_phases_over_eight_devices_give_the_same_batches():
    script = """
        import jax, numpy as np, millstream as ms
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        data = {"x": np.arange(100, dtype=np.float32)}
        for source in (ms.ArraySampleSource(data), ms.HostArraySource(data)):
            stages = [source, ms.MapTransform(lambda b, m: {"x": b["x"] + 1}), ms.BatchTransform({0: 8, 5: 16, 9: 32})]
            plain, over = ms.DataLoader(stages), ms.DataLoader(stages, sharding=mesh)
            runs = [loader.iterate(loader.init_state(jax.random.key(0)), steps=14) for loader in (plain, over)]
            for one, two in zip(*runs, strict=True):
                assert len(two[0]["x"].sharding.device_set) == 8
                jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(two))
            scanned = over.scan_epoch(over.init_state(jax.random.key(0)), 0.0, lambda c, b, m: (c, m.sum()))
            assert scanned[2].sum() == 100
        try:
            ms.DataLoader([source, ms.BatchTransform({0: 8, 5: 12})], sharding=mesh)
        except ValueError as error:
            assert "12" in str(error), error
        else:
            raise AssertionError("12 rows over 8 devices")
    """
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", **CACHE}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env={**os.environ, **environment})


# Loaders that take over


def test_a_loader_goes_on_where_the_one_before_it_ended(key):
    loader = ms.phases({0: small(), 7: large()})
    batches = drawn(loader, key, 12)
    assert [batch["image"].shape for batch, _ in batches] == [(4, 2, 2)] * 7 + [(6, 4, 4)] * 5
    assert samples_of(batches)[:N] == samples_of(drawn(large(), key, 12))[:N]


def test_a_loader_of_other_samples_begins_an_epoch_of_its_own(key):
    other = ms.DataLoader([ms.ArraySampleSource({"x": 100 + np.arange(7.0, dtype=np.float32)}), ms.BatchTransform(3)])
    loader = ms.phases({0: small(), 5: other, 9: small()})
    infos = [info for *_, info in loader.iterate(loader.init_state(key), steps=12, with_info=True)]
    assert [info.epoch for info in infos] == [0] * 5 + [1, 1, 1, 2] + [3] * 3
    assert sorted(samples_of(drawn(loader, key, 12))[20:27]) == list(range(100, 107))
    assert loader.epoch_lengths is not None and loader.epoch_lengths.steps_of(6) == range(5, 8)


def test_batches_that_come_back_and_buckets_can_be_a_phase(key):
    recurring = ms.DataLoader([ms.ArraySampleSource(DATA, ms.Shuffle("repeat")), ms.BatchTransform(10)])
    samples = [{"ids": np.arange(1 + i % 5)} for i in range(20)]
    view = ms.views.buckets(ms.DatasetSource(samples), "ids", (2, 5), batch_size=4)
    buckets = ms.DataLoader([view, ms.PadTransform({"ids": 0})])
    loader = ms.phases({0: large(), 4: recurring, 10: buckets})
    batches = drawn(loader, key, 16)
    assert_trees_equal(batches[4:10], drawn(recurring, key, 6))
    assert_trees_equal(batches[10:], drawn(buckets, key, 6))
    assert loader.epoch_lengths is not None
    ends = [loader.epoch_lengths.completed(step) for step in range(17)]
    assert ends == [0] * 4 + [1] * 5 + [2] + [3] * 5 + [4] * 2 and len(loader.element_specs()) == 4


# Loops


@jax.jit
def step(state, batch):
    rows, mask = batch
    total = state["total"] * 1.5 % 1000 + jnp.sum(jnp.where(mask, rows["x"], 0))
    return ms.logs().add_metric("sum", total), {"total": total}


START = {"total": jnp.float32(0)}
PHASED = {
    "batch sizes": by_step,
    "threads": lambda: by_step(executor=ms.Threads(2)),
    "loaders": lambda: ms.phases({0: small(), 7: large()}),
}


@pytest.mark.parametrize("name", PHASED)
def test_loops_count_steps_samples_and_epochs(name, key):
    due: dict[Any, list[tuple[int, int, int]]] = {}
    runs = []
    for fuse in (None, 4):
        events: list[tuple[int, int, int]] = []

        def note(state, batch, elapsed, events=events):
            events.append((elapsed.steps, elapsed.samples, elapsed.epochs))

        tasks = [(ms.every(1), step), (ms.every(samples=30), note), (ms.every(epochs=1), note)]
        options: Any = {} if fuse is None else {"fuse": fuse}
        output = ms.loop(START, PHASED[name](), tasks, stop=ms.at(epochs=3), key=key, **options)
        assert output.elapsed.samples == 3 * N and output.elapsed.epochs == 3
        due[fuse] = events
        runs.append((output.history.to_dict()["sum"], float(output.state["total"])))
    assert runs[0] == runs[1]
    assert due[None] == due[4] and len(due[None]) > 5
    assert {(samples, epochs) for _, samples, epochs in due[None] if samples % N == 0} == {
        (N, 1),
        (2 * N, 2),
        (3 * N, 3),
    }


def test_a_compiled_step_sees_the_epochs_of_phases(key):
    @jax.jit
    def timed(state, batch, elapsed):
        return ms.logs().add_metric("epoch", jnp.asarray(elapsed.epochs)), state

    given: list[dict[str, Any]] = [{}, {"fuse": 5}]
    seen = [
        ms.loop(START, by_step(), [(ms.every(1), timed)], stop=16, key=key, **options).history.to_dict()["epoch"]
        for options in given
    ]
    lengths = by_step().epoch_lengths
    assert [list(map(int, run)) for run in seen] == [[lengths.completed(step) for step in range(1, 17)]] * 2


def test_each_shape_is_compiled_once(key, count_compilations):
    loader = by_step()
    for _ in loader.iterate(loader.init_state(key), steps=13):
        pass
    with count_compilations() as compiled:
        for _ in loader.iterate(loader.init_state(key), steps=30):
            pass
    assert compiled == [0]


def test_an_epoch_is_scanned_through_all_its_phases(key):
    loader = by_step()

    def body(total, batch, mask):
        return total + jnp.sum(jnp.where(mask, batch["x"], 0)), jnp.sum(mask)

    state, total, counts = loader.scan_epoch(loader.init_state(key), 0.0, body)
    assert float(total) == DATA["x"].sum() and counts.tolist() == [4] * 5 + [8] * 3 + [6]
    state, total, counts = loader.scan_epoch(state, 0.0, body)
    assert int(state.step) == 9 + len(counts) and float(total) == DATA["x"].sum()
    with pytest.raises(ValueError, match="scan_epoch stacks what body_fn gives out, whose shape changes"):
        loader.scan_epoch(loader.init_state(key), 0.0, lambda carry, batch, mask: (carry, mask))
    with pytest.raises(TypeError, match=r"next_batch inside jax\.jit cannot draw them"):
        jax.jit(loader.next_batch)(loader.init_state(key))


@pytest.mark.parametrize("options", [{}, {"fuse": 3}])
def test_a_run_is_saved_and_resumed_in_any_phase(options, key, tmp_path):
    def train(stop, **more):
        tasks = [(ms.every(1), step), *([(ms.every(1), ms.checkpoint(more["resume"]))] if more else [])]
        return ms.loop(START, by_step(), tasks, stop=stop, key=key, **options, **more)

    expected = train(15)
    for stop in (3, 5, 11):
        folder = tmp_path / str(stop)
        train(stop, resume=folder)
        output = train(15, resume=folder)
        assert_trees_equal(output.state, expected.state)
        assert output.history.to_dict()["sum"] == expected.history.to_dict()["sum"]
        assert output.elapsed.samples == expected.elapsed.samples


def test_a_run_is_changed_at_a_step_and_the_change_is_saved(key, tmp_path):
    """What has come before has to be the same; what comes later may be changed."""

    def train(loader, stop):
        tasks = [(ms.every(1), step), (ms.every(1), ms.checkpoint(tmp_path))]
        return ms.loop(START, loader, tasks, stop=stop, key=key, resume=tmp_path)

    train(small(), 6)
    before = samples_of(drawn(small(), key, 6))
    with pytest.raises(ValueError, match=r"differ in\n.*batches of: 4 .*saved, 6"):
        train(large(), 10)
    with pytest.raises(ValueError, match="batches of from step 4: none saved, 6"):
        train(ms.phases({0: small(), 4: large()}), 10)
    changed = ms.phases({0: small(), 6: large()})
    output = train(changed, 10)
    assert samples_of(drawn(changed, key, 10))[:24] == before
    plain = ms.train_loop(START, changed, {ms.on_train_step: step}, stop=10, key=key)
    assert_trees_equal(output.state, plain.state)
    with pytest.raises(ValueError, match=r"batches of from step 6: 6 .* saved, none now"):
        train(small(), 12)  # the run has left it behind
    train(ms.phases({0: small(), 6: large(), 10: small()}), 12)


@pytest.mark.parametrize("options", [{}, {"fuse": 4}])
def test_batches_are_left_out_of_phases(options, key, tmp_path):
    """Phases begin at batches of the data, so a range that is left out leaves them where they are."""
    counts = by_step().sample_counter(by_step().init_state(key))(range(30))
    kept = [number for number in range(30) if not (3 <= number < 7 or 10 <= number < 12)]
    lengths = by_step().epoch_lengths
    assert lengths is not None
    tasks = [(ms.every(1), step), (ms.every(2), ms.checkpoint(tmp_path))]
    skip: Any = {"skip": [(3, 7), (10, 12)]}
    ms.loop(START, by_step(), tasks, stop=4, key=key, resume=tmp_path, **options, **skip)
    history = ms.loop(START, by_step(), tasks, stop=14, key=key, resume=tmp_path, **options).history
    samples, epochs = history.collect("samples", "epochs")
    assert list(samples) == np.cumsum([counts[number] for number in kept])[:14].tolist()
    assert list(epochs) == [lengths.completed(kept[number + 1]) for number in range(14)]
    assert ms.replay(tmp_path, by_step(), 6).data_step == kept[5]


def mixed(*changes: Any, sizes: Any = 4) -> Any:
    """Two sources in one batch, with other weights after some samples."""
    one, two = (ms.ArraySampleSource({"x": first + np.arange(n, dtype=np.float32)}) for first, n in ((0, 30), (100, 7)))
    view = ms.views.mix({"one": one, "two": two}, {"one": 3, "two": 1}, samples=500)
    for after, weights in changes:
        view = ms.views.reweight(view, weights, after=after)
    return ms.DataLoader([view, ms.BatchTransform(sizes)])


@pytest.mark.parametrize("sizes", [4, {0: 2, 3: 6}])
def test_the_weights_of_a_mixture_are_changed_in_a_run_that_is_resumed(sizes, key, tmp_path):
    drawn_before = 24  # samples of six batches, by either sizes

    def train(loader, stop):
        tasks = [(ms.every(1), step), (ms.every(1), ms.checkpoint(tmp_path))]
        return ms.loop(START, loader, tasks, stop=stop, key=key, resume=tmp_path)

    train(mixed(sizes=sizes), 6)
    even = {"one": 1, "two": 1}
    with pytest.raises(ValueError, match="weights from step"):
        train(mixed((drawn_before - 1, even), sizes=sizes), 12)
    changed = mixed((drawn_before, even), sizes=sizes)
    output = train(changed, 12)
    assert_trees_equal(output.state, ms.loop(START, changed, [(ms.every(1), step)], stop=12, key=key).state)
    assert_trees_equal(drawn(changed, key, 6), drawn(mixed(sizes=sizes), key, 6))
    with pytest.raises(ValueError, match=r"weights from step 6: [0-9a-f]{12} saved, none now"):
        train(mixed(sizes=sizes), 14)
    seen = [row >= 100 for row in samples_of(drawn(changed, key, 12))]
    later = seen[drawn_before:]
    assert abs(sum(seen[:drawn_before]) - drawn_before / 4) <= 1 and abs(sum(later) - len(later) / 2) <= 1
    # Every source has come in complete epochs: nothing is lost or repeated at the change.
    twos = [row for row in samples_of(drawn(changed, key, 12)) if row >= 100]
    assert sorted(twos[:7]) == sorted(twos[7:14]) == list(range(100, 107))
    train(mixed((drawn_before, even), (drawn_before + 40, {"one": 0, "two": 1}), sizes=sizes), 14)


# What is said, and what is refused


def test_phases_are_described_explained_and_verified(key):
    loader = by_step()
    assert "-> BatchTransform(4), from step 5 BatchTransform(8), from step 11 BatchTransform(6)" in repr(loader)
    explained = loader.explain()
    assert explained.plan["from step 5: last batch"] == "2 of 8 rows real, the others padding"
    rows = {row.check: row for row in loader.verify(key, executors=[ms.Threads(2)], progress=False).rows}
    assert "50 samples, each once in an epoch" in rows["samples"].evidence
    assert {row.result for row in rows.values()} == {"ok", "left out"} and rows["hosts"].result == "left out"
    other = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(7.0)}), ms.BatchTransform(3)])
    ms.phases({0: small(), 3: other}).verify(key, executors=[], progress=False)
    assert list(loader.phases) == [0, 5, 11] and by_step(4).phases.keys() == {0}
    assert ms.phases({0: other}) is other
    state = loader.init_state(key)
    leaves, tree = jax.tree.flatten(loader)
    again = jax.tree.unflatten(tree, leaves)
    assert_trees_equal(jax.device_get(next(again.iterate(state))), jax.device_get(next(loader.iterate(state))))


def _any(value: Any) -> Any:
    return value


SOURCE = ms.ArraySampleSource(DATA)
REFUSED: dict[str, tuple[Any, str]] = {
    "no step 0": (
        lambda: ms.BatchTransform({5: 4}),
        "BatchTransform needs batch_size from step 0 on, .* Got steps [5]",
    ),
    "a size of 0": (lambda: ms.BatchTransform({0: 4, 9: 0}), "BatchTransform needs batch_size .*at least 1. Got 0"),
    "a step that is none": (lambda: ms.BatchTransform(_any({0: 4, "a": 1})), "the steps of batch_size .* Got 'a'"),
    "a list": (lambda: ms.BatchTransform(_any([4, 8])), "BatchTransform needs batch_size"),
    "everything dropped": (
        lambda: ms.DataLoader([SOURCE, ms.BatchTransform({0: 4, 9: 99}, drop_last=True)]),
        "BatchTransform(batch_size=99, drop_last=True) would drop everything",
    ),
    "batches of batches": (
        lambda: ms.DataLoader([SOURCE, ms.BatchTransform(2), ms.BatchTransform({0: 2, 1: 3})]),
        "is the only BatchTransform",
    ),
    "batched again": (
        lambda: ms.DataLoader([SOURCE, ms.BatchTransform({0: 2, 1: 3}), ms.BatchTransform(2)]),
        "Batches whose size changes by step cannot be batched again. Leave out BatchTransform(2).",
    ),
    "batches that come back": (
        lambda: ms.DataLoader([ms.ArraySampleSource(DATA, ms.Shuffle("batchwise")), ms.BatchTransform({0: 2, 1: 3})]),
        "needs a source whose samples are shuffled, or in sequence",
    ),
    "an iterable": (
        lambda: ms.DataLoader([ms.sources.IterableSource(lambda: iter([{"x": 1}])), ms.BatchTransform({0: 2, 1: 3})]),
        "comes after an indexed source",
    ),
    "not by step": (lambda: ms.phases(_any([small(), large()])), "phases needs loaders to be a dict by step"),
    "no loader": (lambda: ms.phases(_any({0: small(), 5: SOURCE})), "phases needs loaders[5] to be a DataLoader"),
    "phases of phases": (lambda: ms.phases({0: by_step(), 50: small()}), "loaders[0] to have epochs of one length"),
    "one of several": (lambda: ms.loader.MixedLoader([by_step(), small()]), "the batches of this one change at step 5"),
    "tuned": (lambda: by_step().tune(), "tune compares batches of one shape, and those of this loader change by step"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_phases_that_cannot_work_are_refused_by_name(name):
    make, words = REFUSED[name]
    pattern = ".*".join(re.escape(part) for part in words.split(".*"))
    with pytest.raises((TypeError, ValueError), match=pattern):
        make()


def test_a_function_before_each_batch_is_called_in_every_phase(key):
    """It was left out over phases, without a word."""
    loader = by_step()

    def add(total, batch, mask):
        return total + jnp.sum(jnp.where(mask, batch["x"], 0)), None

    def before(state, total):
        return dataclasses.replace(state, step=jnp.zeros_like(state.step))  # the first batch of the phase, every time

    _, total, _ = loader.run_steps(loader.init_state(key), jnp.float32(0), add, 7, width=7, before_fn=before)
    first, second = (float(batch["x"].sum()) for batch, _ in (drawn(loader, key, 1, step)[0] for step in (0, 5)))
    assert float(total) == 5 * first + 2 * second
