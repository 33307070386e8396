"""What the loader does beyond the contract of every pipeline."""

import copy
import pickle
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_trees_equal
from pipelines import BATCH, SAMPLES, data, halve, jitter, source

import millstream as ms

pytestmark = pytest.mark.optimized


@pytest.fixture(scope="module")
def loader():
    return ms.DataLoader([source(), BATCH])


def labels(batches):
    return [int(label) for batch, mask in batches for label, real in zip(batch["label"], mask, strict=True) if real]


def run_alone(script, **environment):
    """Run a script in an interpreter of its own; it must end well and print nothing on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, env={"PATH": "", **environment}
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_two_iterators_of_one_loader_are_independent(loader, key):
    state = loader.init_state(key)
    alone = labels(loader.iterate(state))
    first, second = loader.iterate(state), loader.iterate(state)
    pairs = list(zip(first, second, strict=True))
    assert labels(pair[0] for pair in pairs) == labels(pair[1] for pair in pairs) == alone


def test_iterating_from_the_middle_ends_with_the_epoch(loader, key):
    begun = loader.iterate(loader.init_state(key), steps=1)
    start = labels(begun)
    rest = loader.iterate(begun.state)
    assert len(rest) == loader.steps_per_epoch - 1
    assert sorted(start + labels(rest)) == list(range(SAMPLES))


def test_epochs_differ_and_keys_differ(loader, key):
    orders = []
    for run in (key, jax.random.key(8)):
        batches = loader.iterate(loader.init_state(run), steps=3 * loader.steps_per_epoch)
        seen = labels(batches)
        orders += [tuple(seen[i : i + SAMPLES]) for i in range(0, 3 * SAMPLES, SAMPLES)]
    assert len(set(orders)) == 6


def test_any_step_can_be_reached_at_once(loader, key):
    steps = 2 * loader.steps_per_epoch + 2
    *_, last = loader.iterate(loader.init_state(key), steps=steps)
    batch, state, mask = loader.next_batch(loader.init_state(key, step=steps - 1))
    assert_trees_equal((batch, mask), last)
    assert int(state.step) == steps


def test_a_closed_iterator_ends_and_keeps_its_state(loader, key):
    with loader.iterate(loader.init_state(key)) as batches:
        next(batches)
    batches.close()
    assert list(batches) == []
    assert int(batches.state.step) == 1


def test_a_composed_source_steps_by_itself_without_compiling_again(loader, key, count_compilations):
    source_ = ms.BatchTransform(4)(source())
    state = source_.init_state(key)
    expected, _, _ = loader.next_batch(loader.init_state(key))
    batch, _, state = source_.next(state)
    assert_trees_equal(batch, expected)
    with count_compilations() as count:
        for _ in range(5):
            batch, _, state = source_.next(state)
    assert count == [0] and int(state.step) == 6


def test_no_steps_is_a_legal_number_of_steps(loader, key):
    assert list(loader.iterate(loader.init_state(key), steps=0)) == []


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_prefetching_changes_nothing_but_the_time(prefetch, loader, key):
    state = loader.init_state(key)
    other = ms.DataLoader([source(), BATCH], prefetch=prefetch)
    for mine, theirs in zip(loader.iterate(state, steps=7), other.iterate(state, steps=7), strict=True):
        assert_trees_equal(mine, theirs)


@pytest.mark.parametrize("make", [jax.random.PRNGKey, jax.random.key, lambda seed: jax.random.key(seed, impl="rbg")])
def test_every_kind_of_key_starts_a_run(make, loader):
    one, other = (labels(loader.iterate(loader.init_state(make(seed)))) for seed in (0, 1))
    assert one != other and sorted(one) == sorted(other)


def test_legacy_and_typed_keys_of_one_seed_are_the_same_run(loader):
    assert_trees_equal(loader.init_state(jax.random.PRNGKey(3)), loader.init_state(jax.random.key(3)))


@pytest.mark.parametrize("offset", [0, 4])  # JAX uses aligned memory as it is
def test_changing_the_users_array_does_not_change_the_stream(offset, key):
    def at_offset(leaf):
        memory = np.zeros(leaf.nbytes + 128, np.uint8)
        start = -memory.ctypes.data % 64 + offset
        moved = memory[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
        moved[...] = leaf
        return moved

    mine = jax.tree.map(at_offset, data())
    loader = ms.DataLoader([ms.ArraySampleSource(mine), BATCH])
    before = loader.next_batch(loader.init_state(key))[0]
    mine["image"][:] = 0
    mine["label"][:] = 0
    assert_trees_equal(loader.next_batch(loader.init_state(key))[0], before)


def test_a_loader_may_be_built_where_a_program_is_traced(key):
    def first_batch(key):
        loader = ms.DataLoader([ms.ArraySampleSource(data()), BATCH])
        return loader.next_batch(loader.init_state(key))[0]

    assert_trees_equal(jax.jit(first_batch)(key), first_batch(key))


def test_no_program_is_compiled_to_place_arrays_or_to_make_a_state(key, count_compilations):
    loader = ms.DataLoader([ms.ArraySampleSource(data()), BATCH])
    loader.init_state(key)
    arrays = {f"{size}": np.arange(size * 17, dtype=np.float32).reshape(17, size) for size in range(1, 20)}
    with count_compilations() as compiled:
        source = ms.ArraySampleSource(arrays)
        jax.block_until_ready(source.arrays)
        ms.DataLoader([source, BATCH]).init_state(key, step=3)
    assert compiled == [0]


def test_reading_on_the_host_gives_the_rows_that_are_gathered_in_the_graph():
    array = source()
    indices = np.array([3, 0, 10])
    rows = array.read(indices)
    assert_trees_equal(rows, jax.tree.map(lambda leaf: leaf[indices], data()))
    out = jax.tree.map(np.zeros_like, rows)
    array.read(indices, out)
    assert_trees_equal(out, rows)


def test_trees_of_any_shape_are_samples(key):
    tree = (np.arange(6, dtype=np.float32), [{"a": np.arange(12, dtype=np.int8).reshape(6, 2)}, jnp.arange(6) > 2])
    loader = ms.DataLoader([ms.ArraySampleSource(tree, ordering="sequential"), ms.BatchTransform(3)])
    batch, _, _ = loader.next_batch(loader.init_state(key))
    assert_trees_equal(batch, jax.tree.map(lambda leaf: jnp.asarray(leaf[:3]), tree))


def test_gradients_flow_around_a_batch(loader, key):
    def loss(weight, state):
        batch, _, mask = loader.next_batch(state)
        return jnp.sum(jnp.where(mask, weight * batch["label"].astype(jnp.float32), 0.0))

    state = loader.init_state(key)
    expected = float(sum(labels(loader.iterate(state, steps=1))))
    assert float(jax.jit(jax.grad(loss))(1.0, state)) == expected


def noises(loader, key, steps):
    """The noise each (epoch, sample) got."""
    found = {}
    for step, (batch, mask) in enumerate(loader.iterate(loader.init_state(key), steps=steps)):
        for label, noise, real in zip(batch["label"], batch["noise"], mask, strict=True):
            if real:
                found[step // loader.steps_per_epoch, int(label)] = tuple(noise.tolist())
    return found


def test_augmentation_depends_on_sample_and_epoch_only(key):
    small = noises(ms.DataLoader([source(), ms.RandomMapTransform(jitter), BATCH]), key, 6)
    large = noises(ms.DataLoader([source("sequential"), ms.RandomMapTransform(jitter), ms.BatchTransform(6)]), key, 4)
    assert small == large
    assert len(set(small.values())) == 2 * SAMPLES


def test_another_stage_does_not_disturb_augmentation(key):
    def keep(value, mask):
        return value

    def other(value, mask, key):
        return {**value, "more": jax.random.normal(key, (2,))}

    plain = ms.DataLoader([source(), ms.RandomMapTransform(jitter), BATCH])
    fuller = ms.DataLoader(
        [source(), ms.MapTransform(keep), ms.RandomMapTransform(other), ms.RandomMapTransform(jitter), BATCH]
    )
    assert noises(plain, key, 3) == noises(fuller, key, 3)


def test_stages_of_one_name_get_keys_of_their_own(key):
    def again(value, mask, key):
        return {**value, "first": value["noise"], "noise": jax.random.normal(key, (2,))}

    again.__name__ = "jitter"
    batch = next(
        ms.DataLoader([source(), ms.RandomMapTransform(jitter), ms.RandomMapTransform(again), BATCH]).iterate(
            ms.DataLoader([source(), ms.RandomMapTransform(jitter), ms.RandomMapTransform(again), BATCH]).init_state(
                key
            )
        )
    )[0]
    assert not np.array_equal(batch["first"], batch["noise"])


def test_a_label_keeps_the_augmentation_when_the_function_is_renamed(key):
    def renamed(value, mask, key):
        return jitter(value, mask, key)

    one = ms.DataLoader([source(), ms.RandomMapTransform(jitter, label="noise"), BATCH])
    two = ms.DataLoader([source(), ms.RandomMapTransform(renamed, label="noise"), BATCH])
    assert noises(one, key, 3) == noises(two, key, 3)


def test_a_map_may_change_keys_and_dtypes_before_the_batch(key):
    loader = ms.DataLoader([source(), ms.MapTransform(halve), BATCH])
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in loader.element_spec().items()} == {
        "half": ((4, 2, 3, 1), np.float32),
        "label": ((4,), np.int32),
    }
    batch, _, _ = loader.next_batch(loader.init_state(key))
    np.testing.assert_array_equal(batch["half"], data()["image"][np.asarray(batch["label"])].astype(np.float32) / 2)


def test_normalizing_and_flattening_do_what_they_say(key):
    stages = [ms.NormalizeImageTransform(scale=2 / 255, offset=-1.0), ms.FlattenImageTransform()]
    for pipeline in ([source(), BATCH, *stages], [source(), *stages, BATCH]):
        loader = ms.DataLoader(pipeline)
        batch, _, _ = loader.next_batch(loader.init_state(key))
        expected = data()["image"][np.asarray(batch["label"])].reshape(4, 6) * (2 / 255) - 1
        np.testing.assert_allclose(batch["image"], expected, atol=1e-6)


def test_half_precision_images(key):
    loader = ms.DataLoader([source(), BATCH, ms.NormalizeImageTransform(dtype=jnp.bfloat16)])
    assert loader.element_spec()["image"].dtype == jnp.bfloat16
    assert loader.next_batch(loader.init_state(key))[0]["image"].dtype == jnp.bfloat16


def test_a_loader_is_a_pytree_that_still_works(loader, key):
    twin = jax.tree.map(lambda leaf: leaf, loader)
    assert twin.element_spec() == loader.element_spec()
    state = loader.init_state(key)
    assert_trees_equal(twin.next_batch(state), loader.next_batch(state))


def test_a_loader_says_what_it_is_made_of_and_how_it_was_built():
    stages = [ms.ArraySampleSource({"x": np.arange(10.0)}), ms.BatchTransform(4)]
    loader = ms.DataLoader(stages, executor=ms.Threads(2), prefetch=3)
    built = {"executor": ms.Threads(2), "prefetch": 3, "on_error": "raise", "cache": None, "sharding": None}
    assert loader.options == built
    loader.options["prefetch"] = 7  # a copy
    assert loader.options == loader.replace().options == built
    assert loader.pipeline.host.executor == ms.Threads(2) and loader.pipeline.plan.axes == (4,)
    assert jax.tree.map(lambda leaf: leaf, loader).options == {"prefetch": 3}


def test_large_data_as_a_constant_are_warned_of(key):
    loader = ms.DataLoader([ms.ArraySampleSource(np.zeros((2**20, 80), np.uint8)), BATCH])
    state = loader.init_state(key)
    with pytest.warns(UserWarning, match=r"80 MiB of data become a constant .* Pass the loader to it as an argument"):
        jax.eval_shape(lambda state: loader.next_batch(state), state)
    jax.eval_shape(lambda loader, state: loader.next_batch(state), loader, state)  # as an argument: no warning


def test_a_body_defined_anew_for_every_epoch_is_warned_of(loader, key):
    state = loader.init_state(key)
    with pytest.warns(UserWarning, match="the function body as a new object for the third time"):
        for _ in range(3):

            def body(carry, batch, mask):
                return carry, None

            state, _, _ = loader.scan_epoch(state, None, body)


def test_outputs_and_carry_of_a_scan_under_jit(loader, key):
    def epoch(loader, state, total):
        def body(total, batch, mask):
            real = jnp.sum(jnp.where(mask, batch["label"], 0))
            return total + real, real

        return loader.scan_epoch(state, total, body, unroll=2)

    state, total, outputs = jax.jit(epoch)(loader, loader.init_state(key), jnp.int32(0))
    assert int(total) == SAMPLES * (SAMPLES - 1) // 2 == int(outputs.sum())
    assert outputs.shape == (loader.steps_per_epoch,)
    assert int(state.step) == loader.steps_per_epoch


def test_batches_reach_the_device_or_sharding_named():
    run_alone(
        """
        import jax, numpy as np, millstream as ms
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
        mesh = jax.make_mesh((8, 1), ("data", "model"))
        spread = NamedSharding(mesh, PartitionSpec("data", "model"))
        source = ms.ArraySampleSource({"x": np.arange(48.0).reshape(24, 2), "y": np.arange(24)})
        plain = ms.DataLoader([source, ms.BatchTransform(16)])
        for target in (None, "cpu:3", jax.devices()[5], spread):
            loader = ms.DataLoader([source, ms.BatchTransform(16), ms.DevicePutTransform(target)])
            state = loader.init_state(jax.random.key(0))
            straight = plain.iterate(plain.init_state(jax.random.key(0)))
            for (batch, mask), (expected, _) in zip(loader.iterate(state), straight):
                for leaf in (batch["x"], batch["y"], mask):
                    if target is spread:
                        assert len(leaf.devices()) == 8 and leaf.sharding.spec[0] == "data"
                    else:
                        assert leaf.devices() == {jax.devices()[{None: 0, "cpu:3": 3}.get(target, 5)]}
                assert np.array_equal(batch["x"], expected["x"]) and np.array_equal(batch["y"], expected["y"])
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )


@pytest.mark.parametrize("leaves", [12, 13])
def test_rows_of_few_and_of_many_arrays_are_those_of_numpy(leaves, key):
    arrays = {f"{number:02}": np.arange(number, number + 40).reshape(20, 2) for number in range(leaves)}
    loader = ms.DataLoader([ms.ArraySampleSource(arrays), ms.BatchTransform(8)])
    for batch, mask, info in loader.iterate(loader.init_state(key), with_info=True):
        for name, rows in batch.items():
            expected = arrays[name][info.indices] * np.asarray(mask)[:, None]
            assert np.array_equal(rows, expected)


def test_flags_of_jax_do_not_change_the_stream(key):
    script = """
        import jax, numpy as np, millstream as ms
        loader = ms.DataLoader([ms.ArraySampleSource(np.arange(50, dtype=np.int32)), ms.BatchTransform(8)])
        state = loader.init_state(np.array([1, 2], np.uint32), step=5)
        print([batch.tolist() for batch, _ in loader.iterate(state, steps=5)])
        """
    plain = run_alone(script)
    assert plain == run_alone(script, JAX_ENABLE_X64="1", JAX_DEFAULT_PRNG_IMPL="rbg", JAX_THREEFRY_PARTITIONABLE="0")


def test_some_steps_as_one_program_are_the_steps_one_by_one(key, count_compilations):
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(10, dtype=np.float32)}), ms.BatchTransform(4)])
    start = loader.init_state(key)
    expected = [np.asarray(batch["x"]) for batch, _ in loader.iterate(start, steps=7)]
    counter = loader.sample_counter(start)
    assert counter is not None and counter(range(7)) == [4, 4, 2, 4, 4, 2, 4]
    state, total, rows = loader.run_steps(start, jnp.float32(0), _sum_rows, 7, width=9)
    np.testing.assert_array_equal(rows[:7], expected)
    assert int(state.step) == 7 and rows.shape == (9, 4)
    with count_compilations() as count:
        state, total, _ = loader.run_steps(start, jnp.float32(0), _sum_rows, 3, width=9)
        state, total, _ = loader.run_steps(state, total, _sum_rows, 0, width=9)
    assert count == [0] and int(state.step) == 3 and float(total) == 45
    with pytest.raises(ValueError, match=r"a count from 0 to its width, 9. Got 10"):
        loader.run_steps(start, jnp.float32(0), _sum_rows, 10, width=9)


def _sum_rows(total, batch, mask):
    return total + jnp.sum(jnp.where(mask, batch["x"], 0)), batch["x"]


@pytest.mark.parametrize("compiled", [False, True], ids=["alone", "in jit"])
def test_a_carry_may_hold_anything_and_keeps_what_is_not_an_array(key, compiled, count_compilations):
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(10, dtype=np.float32)}), ms.BatchTransform(4)])
    carry = {"total": 0.0, "fn": jnp.square, "size": 3, "name": "a", "none": None, "count": 0, "weak": np.float32(2)}

    def run(state, total):
        return loader.scan_epoch(state, {**carry, "total": total}, _use_all)[1:]

    run_arrays = jax.jit(lambda state, total: jax.tree.map(lambda leaf: leaf * 1, _arrays(run(state, total))))
    expected = sum((value**2 + 3 * 0.1) * 2 for value in range(10))
    if compiled:
        count, total = run_arrays(loader.init_state(key), jnp.float32(0))
    else:
        after, outputs = run(loader.init_state(key), 0.0)
        assert after["size"] is carry["size"] and after["fn"] is jnp.square and after["name"] == "a"
        assert outputs.shape == (3,)
        count, total = after["count"], after["total"]
        state, after, _ = loader.run_steps(loader.init_state(key), carry, _use_all, 3, width=4)
        np.testing.assert_allclose(after["total"], total, rtol=1e-6)
        state, after, _ = loader.run_steps(state, after, _use_all, 3, width=4)
        with count_compilations() as compilations:
            state, after, _ = loader.run_steps(state, after, _use_all, 3, width=4)
            run(loader.init_state(key), 0.0)
        assert compilations == [0] and after["size"] == 3 and int(after["count"]) == 9
    assert int(count) == 3
    np.testing.assert_allclose(total, expected, rtol=1e-5)


def _arrays(output):
    return output[0]["count"], output[0]["total"]


def _use_all(carry, batch, mask):
    assert carry["name"] == "a"
    made = carry["fn"](batch["x"]) + jnp.sum(jnp.full(carry["size"], 0.1))
    total = carry["total"] + jnp.sum(jnp.where(mask, made * carry["weak"], 0))
    return {**carry, "total": total, "count": carry["count"] + 1}, carry["size"]


@pytest.mark.parametrize("number", [1, 1.0, True, -1.0, 0.0, -0.0], ids=repr)
def test_numbers_that_are_equal_and_of_different_types_have_programs_of_their_own(key, number):
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(4, dtype=np.int32)}), ms.BatchTransform(4)])
    carry, output = loader.scan_epoch(loader.init_state(key), {"number": number}, _show)[1:]
    assert repr(carry["number"]) == repr(number)
    assert output.dtype == jnp.asarray(number).dtype and np.signbit(output[0]) == np.signbit(number)


def _show(carry, batch, mask):
    return carry, jnp.asarray(carry["number"])


def test_a_carry_that_changes_its_static_part_is_refused(key):
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(4)}), ms.BatchTransform(4)])
    with pytest.raises(
        TypeError, match=r"scan_epoch.* nothing else\. The step changed:\n  carry\['f'\]: 'a' \(str\) became"
    ):
        loader.scan_epoch(loader.init_state(key), {"f": "a"}, lambda carry, batch, mask: ({"f": "b"}, None))


def test_iterators_say_how_many_samples_a_batch_has(key):
    batchwise = ms.ArraySampleSource({"x": np.arange(10)}, ordering=ms.Shuffle("batchwise"))
    plain = ms.ArraySampleSource({"x": np.arange(10)})
    for pipeline in ([batchwise, ms.BatchTransform(4)], [plain, ms.BatchTransform(2), ms.BatchTransform(3)]):
        loader = ms.DataLoader(pipeline)
        batches = loader.iterate(loader.init_state(key), steps=5)
        for _, mask in batches:
            assert batches.samples == int(np.sum(mask))


def test_data_that_have_been_put_somewhere_compile_one_program(key, count_compilations):
    data = jax.device_put({"x": np.arange(20.0, dtype=np.float32)}, jax.devices()[0])
    loader = ms.DataLoader([ms.ArraySampleSource(data), ms.BatchTransform(4)])
    state = loader.init_state(key)
    _, state, _ = loader.next_batch(state)
    with count_compilations() as count:
        for _ in range(3):
            _, state, _ = loader.next_batch(state)
    assert count == [0]


def test_a_loader_of_a_users_own_kind_can_be_an_argument_of_a_program(key):
    class Mine(ms.DataLoader):
        pass

    loader = Mine([ms.ArraySampleSource({"x": np.arange(20.0, dtype=np.float32)}), ms.BatchTransform(4)])
    batch, _, _ = jax.jit(lambda loader, state: loader.next_batch(state))(loader, loader.init_state(key))
    assert_trees_equal(batch, loader.next_batch(loader.init_state(key))[0])


def streams():
    plain = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(40)}), ms.BatchTransform(4)])
    slow = ms.DiskSampleSource(40, lambda index: {"x": np.int32(index)}, readers=1)
    mixed, train = ms.loader.MixedLoader({"a": plain, "b": plain}), ms.loader.TrainStream(plain)
    return {
        "in memory": plain.iterate(plain.init_state(jax.random.key(0)), steps=1000),
        "threads": (read := ms.DataLoader([slow, ms.BatchTransform(4)], executor=ms.Threads(2))).iterate(
            read.init_state(jax.random.key(0)), steps=1000
        ),
        "mixed": mixed.iterate(mixed.init_state(jax.random.key(0)), steps=1000),
        "train stream": train.iterate(train.init_state(jax.random.key(0))),
    }


@pytest.mark.parametrize("name", ["in memory", "threads", "mixed", "train stream"])
def test_an_iterator_refuses_a_second_thread_while_one_is_inside(name):
    batches = streams()[name]
    inside, go_on = threading.Event(), threading.Event()
    draw = batches._cursor.draw

    def slow_draw(state):
        inside.set()
        go_on.wait(60)
        return draw(state)

    batches._cursor.draw = slow_draw
    first = threading.Thread(target=lambda: next(batches))
    first.start()
    inside.wait(60)
    calls = [lambda: next(batches)] if name == "train stream" else [lambda: next(batches), batches.get_state]
    for call in calls:
        with pytest.raises(ValueError, match="Iterator is already executing in another thread, and is for one thread"):
            call()
    go_on.set()
    first.join()
    next(batches)  # one thread after the other is fine
    batches.close()


def test_threads_that_share_an_iterator_lose_and_repeat_nothing():
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(400)}), ms.BatchTransform(4)])
    batches, found = loader.iterate(loader.init_state(jax.random.key(0))), []

    def draw():
        while True:
            try:
                found.append(np.asarray(next(batches)[0]["x"]))
            except ValueError:
                time.sleep(0.001)
            except StopIteration:
                return

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(np.concatenate(found).tolist()) == list(range(400))


@pytest.mark.parametrize("copying", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda copying: copying.__name__)
def test_an_iterator_that_is_pickled_or_copied_says_what_to_keep_instead(copying):
    batches = streams()["in memory"]
    with pytest.raises(
        TypeError, match=r"A BatchIterator cannot be pickled or copied: it reads ahead\. Keep its `state`"
    ):
        copying(batches)


def test_run_steps_waits_for_no_program_before_it(key, monkeypatch):
    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.ones((10, 1), np.float32)}), ms.BatchTransform(4)])
    state, total = loader.init_state(key), jnp.float32(0)
    state, total, _ = loader.run_steps(state, total, _count_real, 1, width=2)  # which compiles
    with monkeypatch.context() as patch:
        for name in ("__int__", "__array__", "__index__", "item", "tolist", "block_until_ready"):
            patch.setattr(type(total), name, _refuse_to_wait)
        for _ in range(20):
            state, total, _ = loader.run_steps(state, total, _count_real, 2, width=2)
    assert int(state.step) == 41
    expected = sum([4, 4, 2][step % 3] for step in range(41))
    assert (loader.stats().batches, loader.stats().samples, int(total)) == (41, expected, expected)


def _count_real(total, batch, mask):
    return total + jnp.sum(mask, dtype=jnp.float32), None


def _refuse_to_wait(array, *_, **__):
    pytest.fail("a program that may still run was waited for")
