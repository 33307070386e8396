"""What an editor knows of the calls that users write. Pyright checks this file; nothing runs it.

Every comment that ignores an error must have one to ignore, so a nonsense call that pyright lets pass is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple, assert_type

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import millstream as ms


class Model(NamedTuple):
    weights: jax.Array


class Pairs(NamedTuple):
    x: jax.Array
    y: jax.Array


class Walk:
    """A stream of a user's own."""

    steps_per_epoch = 10

    def init_state(self, key: jax.Array) -> jax.Array:
        return key

    def next(self, state: jax.Array) -> tuple[Pairs, jax.Array, jax.Array]:
        return Pairs(state, state), jnp.array(True), state

    def element_spec(self) -> Pairs:
        raise NotImplementedError


class Squares:
    """An indexed source of a user's own."""

    ordering = "sequential"
    arrays = None

    def __len__(self) -> int:
        return 10

    def spec(self) -> Any:
        return jax.ShapeDtypeStruct((), jnp.int32)

    def read(self, indices: np.ndarray, out: Any = None) -> np.ndarray:
        return indices**2


class Negate(ms.Transform):
    """A transform of a user's own."""

    def apply(self, value: Any, mask: jax.Array, key: jax.Array | None) -> tuple[Any, jax.Array]:
        return jax.tree.map(jnp.negative, value), mask


def every_second(source: ms.sources.Stream) -> ms.sources.Stream:
    """A stage of a user's own."""
    return source


def train_step(state: Model, batch: Any) -> tuple[ms.loops.Logs, Model]:
    return ms.logs().add_metric("loss", 0.0), state


def count_rows(total: jax.Array, batch: Pairs, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    return total + jnp.sum(mask), jnp.mean(batch.x)


def states_keep_their_types(model: Model, loader: ms.DataLoader) -> None:
    output = ms.train_loop(model, loader, {ms.on_train_step: train_step}, stop=ms.at(epochs=2))
    assert_type(output, ms.loops.LoopOutput[Model])
    assert_type(output.state, Model)
    state, history, elapsed = output
    assert_type(state, Model)
    assert_type(history, ms.loops.History)
    assert_type(elapsed, ms.loops.Elapsed)
    assert_type(ms.loop(model, [np.ones(3)], {ms.every(1): train_step}).state, Model)
    assert_type(ms.test_loop(model, loader, {"on_test_step": train_step}).state, Model)
    assert_type(ms.predict_loop(model, loader).state, Model)
    assert_type(ms.restore("run", model), ms.loops.SavedRun[Model])
    assert_type(ms.restore("run", model).state, Model)


def pipelines_may_be_written_in_all_these_ways() -> None:
    source, batch = ms.ArraySampleSource({"x": np.arange(10.0)}), ms.BatchTransform(4)
    assert_type(ms.DataLoader([source, batch]), ms.DataLoader[Any, ms.loader.LoaderState])
    assert_type(ms.DataLoader((source, batch, Negate()), prefetch=4), ms.DataLoader[Any, ms.loader.LoaderState])
    assert_type(ms.DataLoader(batch(source)), ms.DataLoader[Any, ms.loader.LoaderState])
    assert_type(ms.DataLoader([Squares(), batch], executor=ms.Threads(2)), ms.DataLoader[Any, ms.loader.LoaderState])
    double = ms.HostMapTransform(lambda sample: 2 * sample)
    assert_type(ms.DataLoader([ms.HostArraySource(np.arange(4.0)), double, batch]), ms.DataLoader)
    stages = [source, batch, Negate(), ms.MapTransform(lambda value, mask: value)]
    assert_type(ms.DataLoader(stages), ms.DataLoader)
    more = [*stages, ms.DevicePutTransform("cpu")]
    assert_type(ms.DataLoader(more), ms.DataLoader)


def streams_have_states_of_their_own() -> None:
    source, batch = ms.ArraySampleSource({"x": np.arange(10.0)}), ms.BatchTransform(4)
    assert_type(ms.DataLoader([Walk(), batch]), ms.DataLoader[Any, Any])
    assert_type(ms.DataLoader([source, ms.BufferTransform(8, 4), batch]), ms.DataLoader[Any, Any])
    assert_type(ms.DataLoader([source, every_second, batch]), ms.DataLoader[Any, Any])
    assert_type(ms.DataLoader(Walk()), ms.DataLoader[Pairs, Any])
    for value, mask in (loader := ms.DataLoader(Walk())).iterate(loader.init_state(jax.random.key(0))):
        assert_type(value, Pairs)
        assert_type(mask, jax.Array)


def batches_have_the_type_that_the_user_says(key: jax.Array) -> None:
    loader: ms.DataLoader[Pairs] = ms.DataLoader([ms.ArraySampleSource(Pairs(key, key)), ms.BatchTransform(4)])
    assert_type(ms.DataLoader[Pairs]([ms.ArraySampleSource(Pairs(key, key))]), ms.DataLoader[Pairs])
    assert_type(loader.replace(executor=ms.Threads(2)), ms.DataLoader[Pairs])
    state = loader.init_state(key)
    assert_type(state, ms.loader.LoaderState)
    assert_type(loader.init_state(key, state.step), ms.loader.LoaderState)
    batch, state, mask = loader.next_batch(state)
    assert_type(batch, Pairs)
    assert_type(state, ms.loader.LoaderState)
    assert_type(mask, jax.Array)
    assert_type(loader.iterate(state), ms.loader.BatchIterator[Pairs])
    with loader.iterate(state, steps=3) as batches:
        for batch, mask in batches:
            assert_type(batch, Pairs)
            assert_type(mask, jax.Array)
    assert_type(batches.state, ms.loader.LoaderState)
    for batch, mask, info in loader.iterate(state, with_info=True):
        assert_type((batch, mask), tuple[Pairs, jax.Array])
        assert_type(info, ms.loader.BatchInfo)
    assert_type(loader.scan_epoch(state, jnp.zeros(()), count_rows), tuple[ms.loader.LoaderState, jax.Array, jax.Array])
    assert_type(
        loader.run_steps(state, jnp.zeros(()), count_rows, 2, width=4),
        tuple[ms.loader.LoaderState, jax.Array, jax.Array],
    )
    last, total, nothing = loader.scan_epoch(state, 0, lambda total, batch, mask: (total + 1, None))
    assert_type(last, ms.loader.LoaderState)
    assert_type(total, int)
    assert_type(nothing, None)
    for elapsed, batch_and_mask in ms.loops.elapse(loader, stop=10):
        assert_type(elapsed, ms.loops.Elapsed)
        assert_type(batch_and_mask, tuple[Pairs, jax.Array])
    assert_type(ms.loops.elapse([1.0, 2.0]), Iterator[tuple[ms.loops.Elapsed, float]])


def mixed_and_training_streams_keep_it(loader: ms.DataLoader[Pairs], key: jax.Array) -> None:
    mixed = ms.loader.MixedLoader({"a": loader, "b": loader})
    assert_type(mixed, ms.loader.MixedLoader[Pairs])
    for batch, mask in mixed.iterate(mixed.init_state(key)):
        assert_type(batch, Pairs)
        assert_type(mask, jax.Array)
    for batch, mask, info in mixed.iterate(mixed.init_state(key), with_info=True):
        assert_type((batch, mask), tuple[Pairs, jax.Array])
        assert_type(info.group, str | None)
    stream = ms.loader.TrainStream(mixed, validation=loader)
    items = stream.iterate(stream.init_state(key), end_at=("epoch", 1))
    assert_type(items.state, ms.loader.LoaderState)
    for item in items:
        assert_type(item, ms.loader.StreamItem[Pairs])
        assert_type(item.batch, Pairs)


def the_type_checker_knows(state: Model, loader: ms.DataLoader, key: jax.Array) -> None:
    output = ms.train_loop(state, loader, {ms.on_train_step: train_step})
    assert_type(output.state, Model)
    for _, mask in loader.iterate(loader.init_state(key)):
        assert_type(mask, jax.Array)


def histories_and_logs(history: ms.loops.History, logs: ms.loops.Logs) -> None:
    assert_type(history.collect("loss"), list[Any])
    steps, loss = history.collect("steps", "loss")
    assert_type(steps, list[Any])
    assert_type(loss, list[Any])
    assert_type(history.collect("steps", "loss", "loss_test", missing=np.nan)[2], list[Any])
    assert_type(history.mean("loss"), float)
    assert_type(history[0], ms.loops.Logs)
    assert_type(history[-3:], list[ms.loops.Logs])
    assert_type(history.elapsed(), ms.loops.Elapsed)
    for row in history.rows(0, 3):
        assert_type(row, ms.loops.Logs)
    assert_type(history.plot("history.png"), pathlib.Path)
    assert_type(logs.add_metrics(loss=0.5, accuracy=jnp.ones(())).add_output("preds", np.ones(3)), ms.loops.Logs)
    assert_type(logs.metrics, ms.loops.Entries)
    metrics = ms.loops.Metrics(accuracy=lambda preds, target: preds == target).update(
        preds=np.ones(3), target=np.ones(3)
    )
    assert_type(metrics.compute(), dict[str, jax.Array])


def states_of_frameworks(key: jax.Array) -> None:
    state = ms.create_flax_state(nn.Dense(3), jnp.ones((1, 4)), optax.adam(1e-3), key=key, clip_norm=1.0)
    assert_type(ms.train_loop(state, [np.ones((2, 4))]).state.step, jax.Array)
    managed = ms.managed.ManagedState.create({"w": jnp.zeros(3)}, optax.sgd(0.1))
    step = ms.managed.train_step(lambda state, batch: ms.logs().add_loss("loss", 0.0))
    assert_type(step(managed, np.ones(3)), tuple[ms.loops.Logs, ms.managed.ManagedState])
    assert_type(managed.replace(params={"w": jnp.ones(3)}), ms.managed.ManagedState)


def tasks_may_be_written_in_all_these_ways(model: Model, loader: ms.DataLoader) -> None:
    by_name = {ms.on_train_step: train_step, ms.on_epoch_end: [train_step, ms.loops.noop]}
    ms.train_loop(model, loader, by_name, stop=10)
    ms.train_loop(model, loader, {**by_name, ms.every(5): ms.checkpoint("run")}, stop=lambda elapsed: True)
    ms.train_loop(model, loader, {"train_step": train_step, lambda elapsed: elapsed.steps == 3: train_step}, stop=10)
    ms.loop(model, lambda: [np.ones(3)], [(ms.every(1), train_step), (ms.at(3), [train_step])])
    bars = [ms.callbacks.tqdm_bar(), ms.callbacks.csv_logger("log.csv", every=10)]
    ms.train_loop(model, loader, by_name, callbacks=bars, test_dataset=lambda: loader, epoch_duration=ms.at(samples=64))
    ms.loops.piecewise(ms.every(10), {100: ms.every(50), ms.at(epochs=10): ms.never()})


def nonsense_about_loops(model: Model, loader: ms.DataLoader) -> None:
    ms.train_loop(1, 2, 3)  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, 5, {ms.on_train_step: train_step})  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, {"on_trian_step": train_step})  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, train_step)  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, {1: train_step})  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, stop="three epochs")  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, stop=2.5)  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, epochs=2)  # pyright: ignore[reportCallIssue]
    ms.train_loop(model, loader, key=0)  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, callbacks=ms.callbacks.tqdm_bar())  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, test_dataset=3)  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, epoch_duration="long")  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, resume=3.0)  # pyright: ignore[reportArgumentType]
    ms.test_loop(model, loader, {"on_tset_step": train_step})  # pyright: ignore[reportArgumentType]
    ms.loop(model, loader)  # pyright: ignore[reportCallIssue]
    ms.inner_loop("test", ms.logs)  # pyright: ignore[reportArgumentType]
    ms.callbacks.early_stopping("loss", patience="three")  # pyright: ignore[reportArgumentType]
    ms.callbacks.early_stopping("loss", patience=3, mode="lowest")  # pyright: ignore[reportArgumentType]
    ms.checkpoint("run", keep="all")  # pyright: ignore[reportArgumentType]
    ms.checkpoint("run", mode="minimum")  # pyright: ignore[reportArgumentType]
    ms.callbacks.terminate_on_nan(action="warn")  # pyright: ignore[reportArgumentType]
    ms.callbacks.csv_logger("log.csv", every="epoch")  # pyright: ignore[reportArgumentType]
    ms.restore(3, model)  # pyright: ignore[reportArgumentType]
    ms.at(epochs="two")  # pyright: ignore[reportArgumentType]
    ms.after(epoch=2)  # pyright: ignore[reportCallIssue]
    ms.create_flax_state(nn.Dense(3), jnp.ones((1, 4)), optax.adam)  # pyright: ignore[reportArgumentType]


def nonsense_about_histories(history: ms.loops.History) -> None:
    history.collect(5)  # pyright: ignore[reportArgumentType]
    _ = history["loss"]  # pyright: ignore[reportArgumentType, reportCallIssue]
    history.mean("loss", start="first")  # pyright: ignore[reportArgumentType]
    _steps, _loss, _test = history.collect("steps", "loss")  # pyright: ignore[reportAssignmentType]
    history.collect("steps", "loss").mean()  # pyright: ignore[reportAttributeAccessIssue]
    history.collect()  # pyright: ignore[reportCallIssue]


def nonsense_about_loaders(loader: ms.DataLoader[Pairs], key: jax.Array) -> None:
    state, source = loader.init_state(key), Squares()
    ms.DataLoader(5)  # pyright: ignore[reportArgumentType, reportCallIssue]
    ms.DataLoader([1, 2])  # pyright: ignore[reportArgumentType, reportCallIssue]
    ms.DataLoader([ms.BatchTransform(4), 5])  # pyright: ignore[reportArgumentType, reportCallIssue]
    ms.DataLoader([source, ms.BatchTransform])  # pyright: ignore[reportArgumentType, reportCallIssue]
    ms.DataLoader([{"x": np.ones(3)}, ms.BatchTransform(4)])  # pyright: ignore[reportArgumentType, reportCallIssue]
    ms.DataLoader([source], executor="threads")  # pyright: ignore[reportArgumentType, reportCallIssue]
    ms.DataLoader([source], prefech=2)  # pyright: ignore[reportCallIssue]
    ms.DataLoader([source], batch_size=8)  # pyright: ignore[reportCallIssue]
    ms.DataLoader([source], sharding="data")  # pyright: ignore[reportArgumentType, reportCallIssue]
    loader.replace(on_error="ignore")  # pyright: ignore[reportArgumentType]
    loader.init_state(0)  # pyright: ignore[reportArgumentType]
    loader.next_batch(key)  # pyright: ignore[reportArgumentType]
    loader.iterate(key)  # pyright: ignore[reportArgumentType]
    loader.iterate(state, steps="all")  # pyright: ignore[reportArgumentType]
    for _batch, _mask, _info in loader.iterate(state):  # pyright: ignore[reportAssignmentType]
        pass
    for batch, _ in loader.iterate(state):
        _ = batch["x"]  # pyright: ignore[reportArgumentType, reportCallIssue]
        _ = batch.z  # pyright: ignore[reportAttributeAccessIssue]
    loader.scan_epoch(state, 0.0, lambda total, batch: (total, None))  # pyright: ignore[reportArgumentType]
    loader.scan_epoch(state, 0.0, lambda total, batch, mask: total)  # pyright: ignore[reportArgumentType]
    loader.scan_epoch(state, 0.0)  # pyright: ignore[reportCallIssue]
    loader.scan_epoch(state, "none", count_rows)  # pyright: ignore[reportArgumentType]
    loader.run_steps(state, 0, lambda total, batch, mask: (total, None), 3)  # pyright: ignore[reportCallIssue]
    ms.loader.MixedLoader([source])  # pyright: ignore[reportArgumentType]
    ms.loader.TrainStream(loader, every=("day", 1))  # pyright: ignore[reportArgumentType]
    ms.BatchTransform("8")  # pyright: ignore[reportArgumentType]
    ms.MapTransform(3)  # pyright: ignore[reportArgumentType]
    ms.DatasetSource(5)  # pyright: ignore[reportArgumentType]
    ms.Threads("4")  # pyright: ignore[reportArgumentType]
