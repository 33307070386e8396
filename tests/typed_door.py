"""What an editor knows of the calls that users write. Pyright checks this file; nothing runs it.

Every comment that ignores an error must have one to ignore, so a nonsense call that pyright lets pass is an error.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=error

from typing import Any, NamedTuple, assert_type

import jax
import numpy as np

import millstream as ms


class Model(NamedTuple):
    weights: jax.Array


def train_step(state: Model, batch: Any) -> tuple[ms.loops.Logs, Model]:
    return ms.logs().add_metric("loss", 0.0), state


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


def tasks_may_be_written_in_all_these_ways(model: Model, loader: ms.DataLoader) -> None:
    by_name = {ms.on_train_step: train_step, ms.on_epoch_end: [train_step, ms.loops.noop]}
    ms.train_loop(model, loader, by_name, stop=10)
    ms.train_loop(model, loader, {**by_name, ms.every(5): ms.checkpoint("run")}, stop=lambda elapsed: True)
    ms.train_loop(model, loader, {"train_step": train_step, lambda elapsed: elapsed.steps == 3: train_step}, stop=10)
    ms.loop(model, lambda: [np.ones(3)], [(ms.every(1), train_step), (ms.at(3), [train_step])])


def nonsense(model: Model, loader: ms.DataLoader) -> None:
    ms.train_loop(1, 2, 3)  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, 5, {ms.on_train_step: train_step})  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, {"on_trian_step": train_step})  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, train_step)  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, {1: train_step})  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, stop="three epochs")  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, stop=2.5)  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, epochs=2)  # pyright: ignore[reportCallIssue]
    ms.train_loop(model, loader, test_dataset=3)  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, epoch_duration="long")  # pyright: ignore[reportArgumentType]
    ms.train_loop(model, loader, resume=3.0)  # pyright: ignore[reportArgumentType]
    ms.test_loop(model, loader, {"on_tset_step": train_step})  # pyright: ignore[reportArgumentType]
    ms.loop(model, loader)  # pyright: ignore[reportCallIssue]
    ms.callbacks.early_stopping("loss", patience="three")  # pyright: ignore[reportArgumentType]
    ms.callbacks.early_stopping("loss", patience=3, mode="lowest")  # pyright: ignore[reportArgumentType]
    ms.checkpoint("run", keep="all")  # pyright: ignore[reportArgumentType]
    ms.checkpoint("run", mode="minimum")  # pyright: ignore[reportArgumentType]
    ms.callbacks.terminate_on_nan(action="warn")  # pyright: ignore[reportArgumentType]
    ms.restore(3, model)  # pyright: ignore[reportArgumentType]
    ms.at(epochs="two")  # pyright: ignore[reportArgumentType]
    ms.DataLoader(5)  # pyright: ignore[reportArgumentType]
    ms.DataLoader(loader, executor="threads")  # pyright: ignore[reportArgumentType]
    ms.BatchTransform("8")  # pyright: ignore[reportArgumentType]
    ms.Threads("4")  # pyright: ignore[reportArgumentType]
    loader.iterate(loader.init_state(jax.random.key(0)), steps="all")  # pyright: ignore[reportArgumentType]
