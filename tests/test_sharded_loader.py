"""A loader with a sharding in one process with eight devices: the batches of a loader without one."""

import os
import subprocess
import sys
import textwrap

from conftest import CACHE

SCRIPT = """
    import contextlib, dataclasses
    import jax, numpy as np, jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    import millstream as ms

    DATA = {"x": np.arange(50 * 4, dtype=np.float32).reshape(50, 4), "y": np.arange(50, dtype=np.int32)}

    def jitter(value, mask, key):
        return {**value, "n": jax.random.normal(key, (2,))}

    def total(carry, batch, mask):
        return carry + (batch["x"].sum(1) * mask).sum(), None

    stages = [ms.ArraySampleSource(DATA), ms.RandomMapTransform(jitter), ms.BatchTransform(16)]
    plain = ms.DataLoader(stages)
    expected = [jax.device_get(pair) for pair in plain.iterate(plain.init_state(jax.random.key(0)), steps=5)]

    def check(mesh, **how):
        key = jax.random.key(0)
        loader = ms.DataLoader(stages, sharding=mesh, **how)
        seen = []
        for batch, mask in loader.iterate(loader.init_state(key), steps=5):
            assert batch["x"].sharding == NamedSharding(mesh, PartitionSpec("data")), batch["x"].sharding
            assert mask.sharding == NamedSharding(mesh, PartitionSpec("data")), mask.sharding
            jax.jit(lambda batch: jax.tree.map(lambda leaf: leaf * 2, batch))(batch)
            seen.append(jax.device_get((batch, mask)))
        jax.tree.map(np.testing.assert_array_equal, seen, expected)
        state = loader.init_state(key)
        for pair in expected[:2]:
            batch, state, mask = loader.next_batch(state)
            jax.tree.map(np.testing.assert_array_equal, jax.device_get((batch, mask)), pair)
        if mesh is auto:
            _, summed, _ = loader.scan_epoch(loader.init_state(key), jnp.float32(0), total)
            assert float(summed) == 19900
        else:
            try:
                loader.scan_epoch(loader.init_state(key), jnp.float32(0), total)
            except TypeError as error:
                assert "AxisType.Auto" in str(error)
            else:
                raise AssertionError("explicit axes were not refused")

    @dataclasses.dataclass(frozen=True)
    class EveryThird(ms.Transform):
        def apply(self, value, mask, key):
            return value, mask & (value["y"] % 3 == 0)

    @jax.jit
    def rows(state, batch):
        values, mask = batch
        return ms.logs().add_output("y", values["y"]), state + jnp.sum(mask.astype(np.int32))

    def check_counts(mesh, **how):
        loader = ms.DataLoader([ms.ArraySampleSource(DATA), ms.BatchTransform(16), EveryThird()], sharding=mesh, **how)
        start = jax.device_put(np.int32(0), NamedSharding(mesh, PartitionSpec()))
        for fuse in (None, 3) if mesh is auto else (None,):
            output = ms.loop(start, loader, {ms.loops.always(): rows}, key=jax.random.key(0), stop=4, fuse=fuse)
            assert output.elapsed.samples == int(output.state) == 17
            assert sorted(output.outputs["y"].tolist()) == list(range(0, 50, 3))

    def check_skips(mesh):
        loader = ms.DataLoader(stages, sharding=mesh)
        start = jax.device_put(np.int32(0), NamedSharding(mesh, PartitionSpec()))
        seen = np.concatenate([expected[number][0]["y"][expected[number][1]] for number in (0, 3, 4)])
        for fuse in (None, 2):
            how = {"key": jax.random.key(0), "stop": 3, "fuse": fuse, "skip": [(1, 3)]}
            output = ms.loop(start, loader, {ms.loops.always(): rows}, **how)
            np.testing.assert_array_equal(output.outputs["y"], seen)

    def check_iterable(mesh):
        samples = [{"x": x, "y": y} for x, y in zip(DATA["x"], DATA["y"])]
        drawn = [ms.sources.IterableSource(samples, shuffle_buffer=9), *stages[1:]]
        loaders = ms.DataLoader(drawn), ms.DataLoader(drawn, sharding=mesh)
        one, many = (list(loader.iterate(loader.init_state(jax.random.key(0)), steps=6)) for loader in loaders)
        assert all(mask.sharding == NamedSharding(mesh, PartitionSpec("data")) for _, mask in many)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(many), jax.device_get(one))

    TEXT = {"tokens": np.arange(40 * 16, dtype=np.int32).reshape(40, 16), "label": np.arange(40, dtype=np.int32)}

    def double(value, mask):
        return {**value, "tokens": value["tokens"] * 2}

    def check_leaves(axis_type):
        mesh = jax.make_mesh((2, 4), ("data", "sequence"), axis_types=(axis_type,) * 2)
        rows, both = (NamedSharding(mesh, PartitionSpec(*names)) for names in (("data",), ("data", "sequence")))
        ways = {
            "all alike": both,
            "one leaf": {"tokens": both},
            "each leaf": {"tokens": both, "label": rows},
        }
        host, arrays = ms.HostArraySource(TEXT), ms.ArraySampleSource(TEXT)
        small, gathered = ms.BatchTransform({0: 4, 3: 8}), ms.MapTransform(double)
        pipelines = [[host, ms.BatchTransform(8)], [host, gathered, small], [arrays, gathered, ms.BatchTransform(8)]]
        for stages in pipelines:
            plain = ms.DataLoader(stages)
            expected = jax.device_get(list(plain.iterate(plain.init_state(jax.random.key(0)), steps=6)))
            for way, sharding in ways.items():
                loader = ms.DataLoader(stages, sharding=sharding)
                seen = list(loader.iterate(loader.init_state(jax.random.key(0)), steps=6))
                for batch, mask in seen:
                    assert (batch["tokens"].sharding, batch["label"].sharding, mask.sharding) == (both, rows, rows), way
                jax.tree.map(np.testing.assert_array_equal, jax.device_get(seen), expected)
        assert "P('data', 'sequence')" in ms.DataLoader(pipelines[0], sharding=both).explain().table()

        wrong = {
            "sharding names ['token'], which batches do not have. They have ['label'], ['tokens'].": {"token": rows},
            "sharding has P('data', 'sequence') for ['label'], which has fewer axes: its batches are [8]. "
            "Write P('data',).": {"label": both},
            "sharding divides axis 1 of ['tokens'] by 8, and its batches are [8, 12].": NamedSharding(
                mesh, PartitionSpec(None, ("data", "sequence"))
            ),
            "divide the rows alike": {"tokens": both, "label": NamedSharding(mesh, PartitionSpec("sequence"))},
            "needs sharding['tokens'] to be a NamedSharding": {"tokens": PartitionSpec("data")},
            "needs a sharding for at least one leaf": {},
        }
        short = [ms.ArraySampleSource({**TEXT, "tokens": TEXT["tokens"][:, :12]}), ms.BatchTransform(8)]
        for words, sharding in wrong.items():
            try:
                ms.DataLoader(short, sharding=sharding)
            except (TypeError, ValueError) as error:
                assert words in str(error), error
            else:
                raise AssertionError(f"not refused: {words}")

    for axis_type in (AxisType.Auto, AxisType.Explicit):
        check_leaves(axis_type)

    explicit = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    auto = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    for mesh in (explicit, auto):
        for context in (contextlib.nullcontext(), jax.set_mesh(mesh)):
            with context:
                check(mesh)
                check(mesh, executor=ms.Threads(2), on_error="skip item")
    check(auto, executor=ms.Processes(1))
    for mesh in (explicit, auto):
        check_counts(mesh)
        check_iterable(mesh)
    check_counts(explicit, executor=ms.Threads(2))
    check_skips(auto)
    print("fine")
"""


def test_a_loader_over_eight_devices_gives_the_batches_of_a_loader_on_one():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    run = subprocess.run(command, env={**os.environ, **CACHE, **flags}, capture_output=True, text=True, timeout=300)
    assert run.stdout.strip().endswith("fine"), run.stderr[-3000:]
