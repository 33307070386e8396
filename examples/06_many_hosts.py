"""One small transformer trained twice, data parallel and fully sharded, on any number of processes.

Run: pip install '.[train]', then
    python examples/06_many_hosts.py [--epochs 3]                                            # one process, one device
    millstream launch --processes 4 --devices-per-process 2 --cpu examples/06_many_hosts.py  # eight devices of four
    millstream launch --processes 1 --devices-per-process 8 --cpu examples/06_many_hosts.py  # eight devices of one

Eight devices give the same losses, bit for bit, whether they belong to one process, two or four. (On CPUs; elsewhere
networks may add numbers in a different order.) A run that is killed resumes from its last checkpoint, on a
different number of processes if need be, and ends with the same losses again:
    millstream launch -n 4 --devices-per-process 2 --cpu examples/06_many_hosts.py --checkpoints runs --kill-at 21
    millstream launch -n 2 --devices-per-process 4 --cpu examples/06_many_hosts.py --checkpoints runs
"""

import argparse
import os
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import millstream as ms

BATCH, CONTEXT, WIDTH, HEADS, LAYERS = 64, 32, 32, 2, 2
SAVE_EVERY = 8  # steps
NUMBERS = "nought one two three four five six seven eight".split()
PAIRS = [(a, b) for a in range(9) for b in range(9 - a)]
TEXT = "".join(f"{NUMBERS[a]} and {NUMBERS[b]} is {NUMBERS[a + b]}. " for a, b in PAIRS).encode()
LETTERS = sorted(set(TEXT))


def read(index):
    """One window of the text. Only the process that needs it calls this."""
    window = np.frombuffer(TEXT, np.uint8, CONTEXT + 1, index)
    letters = np.searchsorted(LETTERS, window).astype(np.int32)
    return {"seen": letters[:-1], "next": letters[1:]}


def make_parameters(seed):
    generator = np.random.default_rng(seed)

    def dense(*shape):
        return generator.normal(0, shape[-2] ** -0.5, shape).astype(np.float32)

    return {
        "letters": dense(len(LETTERS), WIDTH),
        "places": dense(CONTEXT, WIDTH),
        "layers": {
            "attend": dense(LAYERS, WIDTH, 3 * WIDTH),
            "merge": dense(LAYERS, WIDTH, WIDTH),
            "widen": dense(LAYERS, WIDTH, 4 * WIDTH),
            "narrow": dense(LAYERS, 4 * WIDTH, WIDTH),
        },
        "answer": dense(WIDTH, len(LETTERS)),
    }


def normalized(x):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def attention(weights, x):
    queries, keys, values = jnp.split((normalized(x) @ weights["attend"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / np.sqrt(WIDTH // HEADS)
    earlier = np.tril(np.ones((CONTEXT, CONTEXT), bool))
    looks = jax.nn.softmax(jnp.where(earlier, scores, -1e9), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", looks, values).reshape(x.shape) @ weights["merge"]


def loss_fn(parameters, batch, mask):
    def layer(x, weights):
        x = x + attention(weights, x)
        return x + jax.nn.relu(normalized(x) @ weights["widen"]) @ weights["narrow"], None

    x = parameters["letters"][batch["seen"]] + parameters["places"]
    x, _ = jax.lax.scan(layer, x, parameters["layers"])
    losses = optax.softmax_cross_entropy_with_integer_labels(normalized(x) @ parameters["answer"], batch["next"])
    return jnp.sum(jnp.mean(losses, axis=1) * mask) / jnp.maximum(jnp.sum(mask), 1)


def spread(leaf, mesh):
    """Over all devices along the first axis that divides by their number; whole on each if none does."""
    for axis, size in enumerate(leaf.shape):
        if size % mesh.size == 0:
            return NamedSharding(mesh, P(*[None] * axis, mesh.axis_names))
    return NamedSharding(mesh, P())


class Training:
    """Parameters, optimizer and where they lie; saved whole, so that any mesh can continue with them."""

    def __init__(self, mesh, shard_parameters):
        optimizer = optax.adam(3e-3)

        def step(model, batch, mask):
            parameters, moments = model
            loss, gradients = jax.value_and_grad(loss_fn)(parameters, batch, mask)
            updates, moments = optimizer.update(gradients, moments)
            return (optax.apply_updates(parameters, updates), moments), loss

        whole = NamedSharding(mesh, P())
        parameters = make_parameters(seed=0)
        moments = jax.eval_shape(optimizer.init, parameters)  # Adam begins with zeros
        self.first = parameters, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), moments)
        self.shardings = jax.tree.map(lambda leaf: spread(leaf, mesh) if shard_parameters else whole, self.first)
        self.step = jax.jit(step, out_shardings=(self.shardings, whole), donate_argnums=0)
        self.gathered = jax.jit(lambda model: model, out_shardings=whole)

    def save(self, path, model, state, losses):
        """All processes call this; the first writes. The file appears only when it is whole."""
        leaves = jax.tree.leaves(self.gathered(model))
        if jax.process_index() == 0:
            part = path.with_suffix(".part")
            numbered = {f"leaf {number}": np.asarray(leaf) for number, leaf in enumerate(leaves)}
            with part.open("wb") as file:
                np.savez(file, key=np.asarray(state.key), step=int(state.step), losses=np.array(losses), **numbered)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)

    def restore(self, path):
        """What `save` has written: the model over this mesh, the loader's key and step, and the losses so far."""
        structure = jax.tree.structure(self.first)
        with np.load(path) as saved:
            model = structure.unflatten([saved[f"leaf {number}"] for number in range(structure.num_leaves)])
            return self.placed(model), (saved["key"], int(saved["step"])), saved["losses"].tolist()

    def placed(self, model):
        """A model that every process has whole, as arrays over the mesh."""

        def place(leaf, sharding):
            return jax.make_array_from_callback(np.shape(leaf), sharding, np.asarray(leaf).__getitem__)

        return jax.tree.map(place, model, self.shardings)


def train(name, config, options):
    loader = ms.DataLoader(
        [ms.DiskSampleSource(len(TEXT) - CONTEXT, read, ordering="shuffle"), ms.BatchTransform(BATCH)], sharding=config
    )
    training = Training(config.create_device_mesh(), shard_parameters=name == "FSDP")
    key, step, losses = jax.random.key(1), 0, []
    path = None if options.checkpoints is None else pathlib.Path(options.checkpoints) / f"{name}.npz"
    if path is not None and path.exists():
        model, (words, step), losses = training.restore(path)
        key = jax.random.wrap_key_data(words)
    else:
        model = training.placed(training.first)

    steps = options.epochs * loader.steps_per_epoch
    batches = loader.iterate(loader.init_state(key, step), steps=steps - step)
    for batch, mask in batches:
        model, loss = training.step(model, batch, mask)
        losses.append(float(loss))
        done = int(batches.state.step)
        if path is not None and done % SAVE_EVERY == 0:
            training.save(path, model, batches.state, losses)
        if done == options.kill_at and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return np.array(losses).reshape(options.epochs, -1).mean(axis=1)


def main(options):
    if "JAX_COORDINATOR_ADDRESS" in os.environ:  # set by `millstream launch`; on a cluster, always initialize
        jax.distributed.initialize()
    if options.checkpoints is not None:
        pathlib.Path(options.checkpoints).mkdir(parents=True, exist_ok=True)
    losses = {
        "DDP": train("DDP", ms.sharding.make_ddp_mesh_config(), options),
        "FSDP": train("FSDP", ms.sharding.make_fsdp_mesh_config(), options),
    }
    if jax.process_index() == 0:
        for epoch, (ddp, fsdp) in enumerate(zip(*losses.values(), strict=True)):
            print(f"epoch {epoch + 1}: loss {ddp:.7f} data parallel, {fsdp:.7f} fully sharded")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoints", metavar="FOLDER", help="save every few steps, and resume from what is there")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="have the last process killed at this step")
    main(parser.parse_args())
