"""What counts is the mask that leaves the pipeline: in means, counts of samples, schedules and predictions."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millstream as ms

pytestmark = pytest.mark.optimized

SAMPLES, SIZE = 22, 4  # five batches and a half
SEEDS = range(3)  # drawn in a loop, so that all of them share their programs


def drawn(seed):
    """What a test draws for itself: a key, and flags that keep about half of the samples, or nearly none."""
    rng = np.random.default_rng(seed)
    return rng, jax.random.key(seed), rng.random(SAMPLES) < (0.6, 0.1)[seed % 2]


@dataclasses.dataclass(frozen=True)
class Keep(ms.Transform):
    """Leaves out the samples whose flag is False."""

    def apply(self, value, mask, key):
        return value, mask & value["keep"]


@dataclasses.dataclass(frozen=True)
class Unchanged(ms.Transform):
    """Hands on the mask as it is."""

    def apply(self, value, mask, key):
        return jax.tree.map(jnp.copy, value), mask


@dataclasses.dataclass(frozen=True)
class Compiled(ms.Transform):
    """Hands on the mask as it is, out of a program of its own."""

    def apply(self, value, mask, key):
        return jax.jit(lambda value, mask: (value, mask))(value, mask)


BEFORE, AFTER = [Keep(), ms.BatchTransform(SIZE)], [ms.BatchTransform(SIZE), Keep()]


def data_of(flags):
    return {"x": np.arange(SAMPLES, dtype=np.float32), "keep": np.asarray(flags)}


def loader_of(flags, stages, **options):
    return ms.DataLoader([ms.ArraySampleSource(data_of(flags)), *stages], **options)


def real_rows(flags, key, steps, first=0):
    """What is left of each batch of a run, by the batches of a loader that leaves nothing out."""
    plain = loader_of(flags, [ms.BatchTransform(SIZE)])
    batches = plain.iterate(plain.init_state(key, first), steps=steps)
    return [np.asarray(batch["x"])[np.asarray(mask & batch["keep"])].tolist() for batch, mask in batches]


def mean_of(rows):
    values = [value for batch in rows for value in batch]
    return np.mean(values) if values else math.nan


def mean_only(state, batch):
    values, mask = batch
    total, count = jnp.sum(jnp.where(mask, values["x"], 0)), jnp.sum(mask)
    # Of a batch without rows this is NaN, which must not enter any mean.
    return ms.logs().add_metric("mean", total / count.astype(total.dtype)), state + count


def mean_and_rows(state, batch):
    logs, state = mean_only(state, batch)
    return logs.add_output("rows", batch[0]["x"]), state


with_rows, without_rows = jax.jit(mean_and_rows), jax.jit(mean_only)


def logs_only(state, batch):
    return with_rows(state, batch)[0]


WAYS = {
    "one by one": (mean_and_rows, None),
    "compiled": (with_rows, None),
    "bursts": (without_rows, None),
    "fused": (with_rows, 3),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stages", [BEFORE, AFTER], ids=["before the batch", "after it"])
def test_a_loop_counts_the_rows_that_the_mask_counts(stages, way):
    for seed in SEEDS:
        rng, key, flags = drawn(seed)
        steps = int(rng.integers(1, 14))
        step, fuse = WAYS[way]
        expected = real_rows(flags, key, steps)
        counts = [len(rows) for rows in expected]
        output = ms.loop(0, loader_of(flags, stages), {ms.loops.always(): step}, key=key, stop=steps, fuse=fuse)
        assert output.elapsed.samples == int(output.state) == sum(counts)
        assert output.history.collect("samples") == np.cumsum(counts).tolist()
        np.testing.assert_allclose(output.history.mean("mean"), mean_of(expected), rtol=1e-6)
        if "rows" in output.outputs:
            assert output.outputs["rows"].tolist() == [value for rows in expected for value in rows]


@pytest.mark.parametrize("fuse", [None, 4])
def test_schedules_stops_and_epochs_in_samples_follow_the_mask(fuse):
    for seed in SEEDS:
        rng, key, flags = drawn(seed)
        period, stop = rng.integers(1, (9, 30)).tolist()
        longest = 18
        reached = np.cumsum([len(rows) for rows in real_rows(flags, key, longest)]).tolist()
        due, begun = [], []
        elapsed = ms.loop(
            0,
            loader_of(flags, BEFORE),
            [
                (ms.every(samples=period), lambda _, batch, elapsed, begun=begun: begun.append(elapsed)),
                (ms.loops.always(), without_rows),
                (ms.every(samples=period), lambda _, batch, elapsed, due=due: due.append(elapsed)),
            ],
            key=key,
            stop=ms.at(samples=stop, steps=longest),
            epoch_duration=ms.at(samples=7),
            fuse=fuse,
        ).elapsed
        last = next((step for step, samples in enumerate(reached, 1) if samples >= stop), longest)
        assert (elapsed.steps, elapsed.samples) == (last, reached[last - 1])
        before = [0, *reached]
        expected = [step for step in range(1, last + 1) if reached[step - 1] // period > before[step - 1] // period]
        expected = [(step, reached[step - 1], reached[step - 1] // 7) for step in expected]
        for seen in (begun, due):
            assert [(elapsed.steps, elapsed.samples, elapsed.epochs) for elapsed in seen] == expected


@pytest.mark.parametrize("stages", [BEFORE, AFTER], ids=["before the batch", "after it"])
def test_tests_and_predictions_follow_the_mask(stages):
    for seed in SEEDS:
        _, key, flags = drawn(seed)
        expected = real_rows(flags, key, 6)
        loader = loader_of(flags, stages)
        tested = ms.test_loop(0, loader, {ms.on_test_step: logs_only}, key=key)
        np.testing.assert_allclose(tested.history.mean("mean"), mean_of(expected), rtol=1e-6)
        assert tested.elapsed.samples == sum(map(len, expected))
        predicted = ms.predict_loop(0, loader, {ms.on_predict_step: logs_only}, key=key)
        assert predicted.outputs["rows"].tolist() == [value for rows in expected for value in rows]
        trained = ms.train_loop(
            0,
            loader,
            {ms.on_train_step: without_rows, ms.on_test_step: logs_only},
            test_dataset=loader,
            inner_loop_kwargs={"aggregation": {"outputs": "concatenate"}},
            stop=2,
            key=key,
        )
        if any(expected):
            np.testing.assert_allclose(trained.history.collect("mean_test")[0], mean_of(expected), rtol=1e-6)
        assert trained.history.collect("rows_test")[0].tolist() == [value for rows in expected for value in rows]


@pytest.mark.parametrize("fuse", [None, 3])
def test_a_run_that_continues_counts_on_exactly(fuse):
    for seed in SEEDS:
        rng, key, flags = drawn(seed)
        middle = int(rng.integers(1, 9))
        loader = loader_of(flags, BEFORE)
        how = {"key": key, "fuse": fuse}
        first = ms.loop(0, loader, {ms.loops.always(): with_rows}, stop=middle, **how)
        rest = ms.loop(first.state, loader, {ms.loops.always(): with_rows}, elapsed=first.elapsed, stop=9, **how)
        whole = ms.loop(0, loader, {ms.loops.always(): with_rows}, stop=9, **how)
        assert int(rest.state) == rest.elapsed.samples == whole.elapsed.samples
        assert first.history.collect("samples") + rest.history.collect("samples") == whole.history.collect("samples")
        both = np.concatenate([first.outputs["rows"], rest.outputs["rows"]])
        np.testing.assert_array_equal(both, whole.outputs["rows"])


@pytest.mark.parametrize("fuse", [None, 2])
def test_a_checkpoint_in_the_middle_keeps_the_count(tmp_path, key, fuse):
    flags = np.random.default_rng(1).random(SAMPLES) < 0.4

    def run(stop, folder):
        return ms.loop(
            jnp.int32(0),
            loader_of(flags, AFTER),
            [(ms.loops.always(), without_rows), (ms.every(samples=3), ms.checkpoint(folder))],
            key=key,
            stop=stop,
            fuse=fuse,
            resume=True,
        )

    run(5, tmp_path / "a")
    resumed, whole = run(9, tmp_path / "a"), run(9, tmp_path / "b")
    assert resumed.elapsed.samples == whole.elapsed.samples == sum(map(len, real_rows(flags, key, 9)))
    assert resumed.history.collect("steps", "samples") == whole.history.collect("steps", "samples")


@pytest.mark.parametrize("executor", [None, ms.Threads(2)], ids=["as the source wishes", "threads"])
@pytest.mark.parametrize("stages", [[ms.BatchTransform(SIZE)], AFTER], ids=["skipped", "skipped and masked"])
@pytest.mark.parametrize("fuse", [None, 4])
def test_samples_that_are_skipped_in_the_middle_of_a_batch_do_not_count(key, executor, stages, fuse):
    data = data_of(np.arange(SAMPLES) % 7 > 1)

    def read(index):
        if index % 3 == 1:
            raise OSError("torn")
        return {name: values[index] for name, values in data.items()}

    source = ms.DiskSampleSource(SAMPLES, read, ordering="sequential")
    loader = ms.DataLoader([source, *stages], executor=executor, on_error="skip item")
    output = ms.loop(0, loader, {ms.loops.always(): with_rows}, key=key, stop=6, fuse=fuse)
    masked = stages is AFTER
    expected = [float(index) for index in range(SAMPLES) if index % 3 != 1 and (not masked or index % 7 > 1)]
    assert output.outputs["rows"].tolist() == expected
    assert output.elapsed.samples == int(output.state) == len(expected)


def test_a_batch_that_is_skipped_inside_of_a_program_has_no_samples(key):
    def read(index):
        if index == 5:
            raise OSError("torn")
        return {"x": np.float32(index)}

    source = ms.DiskSampleSource(12, read, ordering="sequential")
    loader = ms.DataLoader([source, ms.BatchTransform(SIZE)], on_error="skip batch")
    output = ms.loop(0, loader, {ms.loops.always(): with_rows}, key=key, stop=3, fuse=3)
    assert output.history.collect("samples") == [4, 4, 8]
    assert output.outputs["rows"].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]


def test_mixed_loaders_and_training_streams_count_the_same_rows():
    for seed in SEEDS:
        _, key, flags = drawn(seed)
        masked, plain = loader_of(flags, BEFORE), loader_of(flags, [ms.BatchTransform(SIZE)])
        for loader in (ms.loader.MixedLoader({"masked": masked, "plain": plain}), masked):
            batches = loader.iterate(loader.init_state(key), steps=9)
            counts = [(int(mask.sum()), batches.samples) for _, mask in batches]
            assert [count for count, _ in counts] == [told for _, told in counts]
            output = ms.loop(0, loader, {ms.loops.always(): with_rows}, key=key, stop=9)
            assert (
                output.elapsed.samples == int(output.state) == len(output.outputs["rows"]) == sum(c for c, _ in counts)
            )
        stream = ms.loader.TrainStream(plain, validation=masked, every=("batch", 4))
        items = stream.iterate(stream.init_state(key), end_at=("batch", 8))
        told = [(items.samples, int(item.mask.sum())) for item in items]
        assert len(told) == 20 and all(one == other for one, other in told)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A stream of numbers; those that 3 divides are not real if `masked`."""

    masked: bool
    steps_per_epoch = 10

    def init_state(self, key):
        return jnp.zeros((), np.int32)

    def next(self, state):
        mask = state % 3 != 0 if self.masked else jnp.ones((), bool)
        return {"x": state.astype(np.float32)}, mask, state + 1

    def element_spec(self):
        return {"x": jax.ShapeDtypeStruct((), np.float32)}


@pytest.mark.parametrize("fuse", [None, 2])
@pytest.mark.parametrize(
    ("masked", "size", "counts"),
    [(True, 4, [2, 3, 1, 3]), (False, 4, [4, 4, 2, 4]), (False, 5, [5, 5, 5, 5])],
    ids=["masked", "padded", "all real"],
)
def test_streams_are_counted_by_their_masks(key, masked, size, counts, fuse):
    loader = ms.DataLoader([Numbers(masked), ms.BatchTransform(size)])
    output = ms.loop(0, loader, {ms.loops.always(): without_rows}, key=key, stop=len(counts), fuse=fuse)
    assert output.history.collect("samples") == np.cumsum(counts).tolist()
    assert (loader.sample_counter(loader.init_state(key)) is None) == (masked or size == 4)


@pytest.mark.parametrize("stages", [[], [Unchanged()], [Compiled()]], ids=["none", "unchanged", "compiled"])
def test_where_no_stage_sets_the_mask_the_plan_says_the_count(key, stages, count_compilations):
    loader = loader_of(np.ones(SAMPLES), [*stages, ms.BatchTransform(SIZE), *stages])

    def run(fuse):
        return ms.loop(
            jnp.int32(0), loader, {ms.loops.always(): without_rows}, key=key, stop=12, fuse=fuse
        ).elapsed.samples

    assert run(None) == run(3) == 2 * SAMPLES
    with count_compilations() as count:
        assert run(None) == run(3) == 2 * SAMPLES
        batches = loader.iterate(loader.init_state(key))
        assert [batches.real for _ in batches] == [4, 4, 4, 4, 4, 2]  # numbers, not masks that would have to be read
    assert count == [0]
    assert loader.sample_counter(loader.init_state(key)) is not None  # so fused programs hand out no masks either


def test_a_stage_that_sets_the_mask_costs_no_program_more(key, count_compilations):
    loader = loader_of(np.arange(SAMPLES) % 5 > 1, BEFORE)
    assert loader.sample_counter(loader.init_state(key)) is None
    batches = loader.iterate(loader.init_state(key))
    for batch in batches:
        without_rows(jnp.int32(0), batch)
        assert isinstance(batches.real, jax.Array)  # not read, since nobody has asked
    with count_compilations() as count:
        ms.loop(jnp.int32(0), loader, {ms.loops.always(): without_rows}, key=key, stop=12)
    assert count == [0]


def test_what_a_host_callback_makes_twice_is_refused_by_name(key):
    stages = [Keep(), ms.BatchTransform(SIZE), ms.transforms.HostCallbackTransform(lambda batch, mask: None)]
    loader = loader_of(np.ones(SAMPLES, bool), stages)
    tasks = {ms.loops.always(): without_rows}
    assert ms.loop(0, loader, tasks, key=key, stop=6, fuse=3).elapsed.samples == SAMPLES
    with pytest.raises(ValueError, match=r"HostCallbackTransform.* once more .* because of Keep\. With fuse="):
        ms.loop(0, loader, tasks, key=key, stop=ms.at(samples=8), fuse=3)


def test_a_step_may_take_the_mask_for_its_own(key):
    def step(state, batch):
        output = jax.block_until_ready(with_rows(state, batch))
        batch[1].delete()  # as if it had been donated
        return output

    output = ms.loop(0, loader_of(np.arange(SAMPLES) % 2 == 0, BEFORE), {ms.loops.always(): step}, key=key, stop=12)
    assert output.elapsed.samples == int(output.state) == len(output.outputs["rows"]) == SAMPLES


_donating = jax.jit(lambda batch, mask: (jax.tree.map(lambda leaf: leaf + 1, batch), ~mask), donate_argnums=(0, 1))


@pytest.mark.parametrize("kind", ["arrays", "host", "iterable", "mesh"])
def test_a_step_may_donate_batch_and_mask(key, kind):
    data = {"x": np.arange(40, dtype=np.float32)}
    sources = {
        "arrays": ms.ArraySampleSource(data),
        "host": ms.HostArraySource(data),
        "iterable": ms.sources.IterableSource(lambda: ({"x": x} for x in data["x"])),
        "mesh": ms.HostArraySource(data),
    }
    mesh = jax.make_mesh((1,), ("data",)) if kind == "mesh" else None
    loader = ms.DataLoader([sources[kind], ms.BatchTransform(8)], sharding=mesh)
    seen = []
    for _ in range(2):
        for batch, mask in loader.iterate(loader.init_state(key)):
            values, without = _donating(batch, mask)
            assert mask.is_deleted() and not without.any()
            seen += values["x"].tolist()
    assert sorted(seen) == sorted([*range(1, 41)] * 2)


def test_a_test_without_any_real_row_does_not_weigh(key):
    flags = np.arange(SAMPLES) < 5
    loader = ms.DataLoader([ms.ArraySampleSource(data_of(flags), ordering="sequential"), *BEFORE])
    output = ms.test_loop(0, loader, {ms.on_test_step: logs_only}, key=key)
    assert np.isnan(output.history.collect("mean")[2:]).all() and output.history.mean("mean") == 2
