"""A program as users write it, which type checkers find nothing in: pyright in strict mode, and mypy --strict.

What is ignored are functions of JAX that strict pyright finds partially unknown. `tests/test_public_types.py` has mypy
check this program, and runs it.
"""
# pyright: strict, reportUnnecessaryTypeIgnoreComment=error

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import millstream as ms


class Batch(NamedTuple):
    x: jax.Array
    y: jax.Array


class Model(NamedTuple):
    weight: jax.Array
    step: jax.Array


def as_batch(value: dict[str, jax.Array], mask: jax.Array) -> Batch:
    return Batch(value["x"] / 10, value["y"])


def jittered(batch: Batch, mask: jax.Array, key: jax.Array) -> Batch:
    return Batch(batch.x + 0.01 * jax.random.normal(key, batch.x.shape), batch.y)


def make_loader(count: int, *, train: bool) -> ms.DataLoader[Batch]:
    x = np.linspace(0, 1, count, dtype=np.float32)
    source = ms.ArraySampleSource({"x": x, "y": 3 * x}, ordering="shuffle" if train else "sequential")
    stages = [ms.BatchTransform(8), ms.MapTransform(as_batch)]
    augmentations = [ms.RandomMapTransform(jittered)] if train else []
    return ms.DataLoader([source, *stages, *augmentations], prefetch=2)


def loss_of(weight: jax.Array, batch: Batch, mask: jax.Array) -> jax.Array:
    return jnp.mean((batch.x * weight - batch.y) ** 2, where=mask)


loss_and_gradient = jax.value_and_grad(loss_of)  # pyright: ignore[reportUnknownMemberType]


@jax.jit  # pyright: ignore[reportUnknownMemberType]
def train_step(model: Model, batch: tuple[Batch, jax.Array]) -> tuple[ms.loops.Logs, Model]:
    loss, gradient = loss_and_gradient(model.weight, *batch)
    return ms.logs().add_metric("loss", loss), Model(model.weight - 0.5 * gradient, model.step + 1)


def test_step(model: Model, batch: tuple[Batch, jax.Array]) -> ms.loops.Logs:
    return ms.logs().add_metric("loss", loss_of(model.weight, *batch))


def predict_step(model: Model, batch: tuple[Batch, jax.Array], elapsed: ms.loops.Elapsed) -> ms.loops.Logs:
    return ms.logs().add_output("y", model.weight * batch[0].x).add_metric("step", elapsed.steps)


class RowCounter(ms.Observer):
    """A callback of the user's own."""

    rows = 0

    def observe(self, loop_state: ms.loops.LoopState, start: int, stop: int) -> None:
        self.rows += sum(1 for _ in loop_state.history.rows(start, stop))


def add_up(total: jax.Array, batch: Batch, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    return total + jnp.sum(batch.y, where=mask), jnp.max(batch.x)


def main(directory: str, epochs: int = 2) -> float:
    loader, validation = make_loader(64, train=True), make_loader(20, train=False)
    zero = jnp.zeros(())  # pyright: ignore[reportUnknownMemberType]
    key, counter = jax.random.key(0), RowCounter()
    output = ms.train_loop(
        Model(zero, zero),
        loader,
        {
            ms.on_train_step: train_step,
            ms.on_test_step: test_step,
            ms.every(4) | ms.loops.last(): [ms.checkpoint(directory), counter],
        },
        callbacks=[ms.callbacks.early_stopping("loss_test", patience=10)],
        test_dataset=validation,
        stop=ms.at(epochs=epochs),
        key=key,
    )
    model, history, elapsed = output
    steps, losses = history.collect("steps", "loss")
    print(
        f"{elapsed.steps} steps, {len(steps)} rows, {losses[-1]:.3f}, {history.mean('loss_test'):.3f}, {counter.rows}"
    )

    saved = ms.restore(directory, model, loader)
    more = saved.elapsed.steps + 2
    model = ms.train_loop(
        saved.state, loader, {"train_step": train_step}, elapsed=saved.elapsed, stop=more, key=key
    ).state

    state = loader.init_state(key, step=3)
    with loader.iterate(state, steps=5) as batches:
        for batch, mask in batches:
            print(loss_of(model.weight, batch, mask), float(batch.x[0]), int(mask.sum()))
    for batch, mask, info in loader.iterate(batches.state, with_info=True):
        print(info.epoch, info.indices.tolist(), batch.y.shape, mask.shape)
    batch, state, mask = loader.next_batch(state)
    state, total, largest = loader.scan_epoch(state, zero, add_up)
    predictions = ms.predict_loop(model, validation, {ms.on_predict_step: predict_step})
    print(int(state.step), predictions.elapsed.samples, predictions.outputs["y"].shape, float(largest[-1]))
    return float(total)
