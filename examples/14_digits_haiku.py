"""A network in Haiku in mixed precision: computed in bfloat16, kept in float32, its steps called by hand and by a loop.

Run: pip install '.[train,haiku]', then python examples/14_digits_haiku.py [--epochs 15]
"""

import argparse

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import millstream as ms

BATCH = 64


def network(x, is_training):
    for width in (256, 128):
        x = jax.nn.relu(hk.Linear(width)(x))
        x = hk.dropout(hk.next_rng_key(), 0.2, x) if is_training else x
    return hk.Linear(10)(x)


def make_loader(split, ordering):
    return ms.DataLoader(
        [
            ms.ArraySampleSource(ms.datasets.DigitsDataset(split).as_array_dict(), ordering=ordering),
            ms.BatchTransform(BATCH),
            ms.NormalizeImageTransform(),
            ms.FlattenImageTransform(),
        ]
    )


def main(epochs):
    train, test = make_loader("train", "shuffle"), make_loader("test", "sequential")
    state = ms.create_haiku_state(
        hk.transform(network),
        inputs=jnp.empty((1, 64)),
        tx=optax.adam(2e-3),
        key=jax.random.key(0),
        losses={"loss": optax.softmax_cross_entropy_with_integer_labels},
        metrics={"accuracy": lambda preds, target: jnp.argmax(preds, axis=-1) == target},
        precision="bf16",
    )
    print("the first epoch by hand:")
    for elapsed, batch in ms.loops.elapse(train, key=jax.random.key(1)):
        logs, state = state.train_step(batch)
        if elapsed.steps % 8 == 1:
            print(f"  step {elapsed.steps:>3}  loss {logs.losses.loss:.4f}")

    print("and the others by a loop:")
    state, history, _ = ms.train_loop(
        state,
        train,
        callbacks=[ms.callbacks.keras_bar()],
        test_dataset=test,
        elapsed=elapsed,
        stop=ms.at(epochs=epochs),
        key=jax.random.key(1),
    )
    tested = history.collect("epochs", "loss_test", "accuracy_test")
    for epoch, loss, accuracy in list(zip(*tested, strict=True))[:: max(1, epochs // 5)]:
        print(f"epoch {epoch:>3}  test loss {loss:.4f}  test accuracy {accuracy:.2%}")
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(state.params)}
    print(f"the parameters are kept in {', '.join(dtypes)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    main(**vars(parser.parse_args()))
