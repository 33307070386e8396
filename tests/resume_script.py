"""A small training run that can be stopped anywhere, and what came of it in values that can be compared bit by bit.

`python resume_script.py FOLDER [WORD=VALUE ...]` runs it to its end, or continues with what is in the folder.
"""

import csv
import functools
import hashlib
import json
import os
import pathlib
import signal
import sys
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import millstream as ms

SAMPLES, ROWS, EPOCHS = 22, 4, 3
EPOCH = -(-SAMPLES // ROWS)
KEY_SEED = 3


class Faults:
    """Sends this process a signal when it comes by a place for the given time. A place is a word.

    Attributes:
        place: Where.
        count: At what pass.
        number: The signal.
        action: What is done instead of sending a signal.
        slow: How many seconds a step then takes.
    """

    def __init__(self):
        self.set(None)
        self._hooked = False

    def set(self, place, count=1, number: int = signal.SIGKILL, action=None):
        self.place, self.count, self.number, self.action = place, count, number, action
        self.passed, self.done, self.slow = 0, False, 0.0

    def come_by(self, place):
        if place == "step":
            time.sleep(self.slow)
        if place == self.place and not self.done:
            self.passed += 1
            if self.passed >= self.count:
                self.done = True
                if self.action is None:
                    os.kill(os.getpid(), self.number)
                else:
                    self.action()

    def watch_files(self):
        """Come by "save" whenever a file or a folder of a checkpoint is made, opened, named or deleted."""
        if not self._hooked:
            self._hooked = True
            sys.addaudithook(self._audit)

    def _audit(self, event, arguments):
        if self.place == "save" and event in ("open", "os.mkdir", "os.link", "os.rename", "os.remove", "os.rmdir"):
            if any(mark in str(arguments[:2]) for mark in ("/.tmp-", "/.trash-", "/.old-")):
                self.come_by("save")


faults = Faults()


def arrays(samples=SAMPLES, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(samples, 3)).astype(np.float32)
    return {"index": np.arange(samples, dtype=np.int32), "x": x, "y": np.sin(x.sum(1))}


DATA = arrays()


def jitter(sample, mask, key):
    noise = jax.random.key_data(key).astype(np.float32)[0] * np.float32(2**-36)  # no rounding anywhere
    return {**sample, "y": sample["y"] + noise}


def read(index):
    faults.come_by("data")
    return {name: leaf[index] for name, leaf in DATA.items()}


SPEC = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), DATA)


def loader(executor=None, *, on_disk=False, data=None, ordering: Any = "shuffle", rows=ROWS, stages=(), jitter=jitter):
    if on_disk:
        source = ms.DiskSampleSource(SAMPLES, read, sample_spec=SPEC, ordering=ordering)
    else:
        source = ms.ArraySampleSource(DATA if data is None else data, ordering=ordering)
    random = [] if jitter is None else [ms.RandomMapTransform(jitter)]
    return ms.DataLoader([source, *random, ms.BatchTransform(rows), *stages], executor=executor)


EXECUTORS = {"in graph": lambda: None, "threads": lambda: ms.Threads(2), "processes": lambda: ms.Processes(1)}


@functools.cache
def test_batches():
    """What to test on: three batches, the last of which is padded."""
    data = arrays(12, seed=1)
    mask = np.arange(12) < 10
    return [
        ({name: jnp.asarray(leaf[at : at + ROWS]) for name, leaf in data.items()}, jnp.asarray(mask[at : at + ROWS]))
        for at in range(0, 12, ROWS)
    ]


def count_real(batch):
    return int(np.sum(batch[1]))


@functools.cache
def test_loader():
    """The same as a loader."""
    data = {name: leaf[:10] for name, leaf in arrays(12, seed=1).items()}
    return loader(data=data, ordering="sequential", jitter=None)


def start():
    random = np.random.default_rng(2)
    params = {
        "a": jnp.asarray(random.normal(size=(3, 4)).astype(np.float32)),
        "b": jnp.asarray(random.normal(size=(4,)).astype(np.float32)),
    }
    return {
        "params": params,
        "momentum": jax.tree.map(lambda leaf: jnp.asarray(np.zeros_like(leaf)), params),
        "steps": jnp.asarray(np.int32(0)),
        "key": jax.random.wrap_key_data(jnp.zeros(2, np.uint32)),
    }


def loss_of(params, batch, mask):
    hidden = jnp.tanh(batch["x"] @ params["a"])
    errors = (hidden @ params["b"] - batch["y"]) ** 2
    return jnp.sum(jnp.where(mask, errors, 0)) / jnp.maximum(jnp.sum(mask, dtype=np.float32), 1)


def step(state, batch):
    faults.come_by("compile")
    batch, mask = batch
    loss, grads = jax.value_and_grad(loss_of)(state["params"], batch, mask)
    momentum = jax.tree.map(lambda old, new: 0.9 * old + new, state["momentum"], grads)
    params = jax.tree.map(lambda old, new: old - 0.05 * new, state["params"], momentum)
    ids = jnp.sum(jnp.where(mask, 1 << batch["index"], 0))  # a bit for each sample that was seen
    state = {**state, "params": params, "momentum": momentum, "steps": state["steps"] + 1}
    return ms.logs().add_metric("loss", loss).add_metric("ids", ids), state


train_step = jax.jit(step)
donating_step = jax.jit(step, donate_argnums=0)


@jax.jit
def measure(state, batch):
    return ms.logs().add_metric("loss", loss_of(state["params"], *batch))


def test_step(state, batch):
    faults.come_by("evaluation")
    return measure(state, batch)


class Watched(ms.Callback):
    """Comes by the places of a run, and remembers something of its own, in arrays."""

    def __init__(self):
        self.total, self.begun = {"sums": jnp.asarray(np.zeros(2, np.float32)), "more": ("a", [np.zeros(3)])}, 0

    def on_epoch_begin(self, state):
        faults.come_by("epoch begin")
        self.begun += 1

    def on_train_batch_end(self, state, batch, elapsed, loop_state):
        if elapsed.steps == 1:
            faults.come_by("first step")
        faults.come_by("step")

    def on_epoch_end(self, state):
        faults.come_by("epoch end")
        sums = np.asarray(self.total["sums"]) + np.asarray(state["params"]["b"])[:2]
        self.total = {"sums": jnp.asarray(sums), "more": ("a", [self.total["more"][1][0] + 1])}

    def on_train_end(self):
        faults.come_by("shutdown")

    def get_state(self):
        return {"total": self.total, "begun": self.begun}

    def set_state(self, state):
        self.total, self.begun = state["total"], state["begun"]


class Halt(ms.Observer):
    """Comes by "observed" whenever steps are complete, fused or not."""

    named_schedules = ("on_train_batch_end",)

    def observe(self, loop_state, start, stop):
        faults.come_by("observed")


def run(
    folder,
    *,
    batches=None,
    executor="in graph",
    on_disk=False,
    test=None,
    every=2,
    keep: int | None = 3,
    stop=None,
    watched=True,
    resume=True,
    **options,
):
    """Run it, or continue with it; what the loop returned, and what can be compared of it."""
    folder = pathlib.Path(folder)
    batches = loader(EXECUTORS[executor](), on_disk=on_disk) if batches is None else batches
    stopper = ms.callbacks.early_stopping("loss_test", patience=1000, restore_best_weights=True)
    watched = Watched() if watched else None
    callbacks = [watched, stopper, ms.callbacks.csv_logger(folder / "log.csv", overwrite=True), Halt()]
    output = ms.train_loop(
        start(),
        batches,
        {
            ms.on_train_step: train_step,
            ms.on_test_step: test_step,
            ms.every(every): ms.checkpoint(folder / "run", keep=keep),
        },
        callbacks=[callback for callback in callbacks if callback is not None],
        test_dataset=test_batches() if test is None else test,
        batch_size_fn=count_real,
        stop=ms.at(epochs=EPOCHS) if stop is None else stop,
        key=jax.random.key(KEY_SEED),
        resume=resume,
        **options,
    )
    found = signature(output, folder, stopper, watched)
    (folder / "result.json").write_text(json.dumps(found))
    return output, found


def bits(tree):
    """A tree as text that is the same only if all bits are."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        digest = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        found[jax.tree_util.keystr(path)] = f"{array.dtype}{list(array.shape)} {digest}"
    return found


def table(history):
    """All columns of a history but the times."""
    columns = {name: values for name, values in history.to_dict().items() if name not in ("time", "date")}
    return {
        name: [value.hex() if isinstance(value, float) else value for value in columns[name]]
        for name in sorted(columns)
    }


def logged(path):
    with open(path) as file:
        rows = list(csv.DictReader(file))
    return [{name: row[name] for name in sorted(row) if name not in ("time", "date")} for row in rows]


def signature(output, folder, stopper, watched):
    elapsed = output.elapsed
    found = {
        "state": bits(output.state),
        "history": table(output.history),
        "elapsed": [elapsed.steps, elapsed.samples, elapsed.epochs],
        "log": logged(folder / "log.csv"),
        "best": [stopper.best_value.hex() if stopper.best_value is not None else None, bits(stopper.best)],
    }
    if watched is not None:
        found["remembered"] = [bits(watched.total["sums"]), bits(watched.total["more"][1]), watched.begun]
    return json.loads(json.dumps(found))


def differences(found, expected):
    """What differs between two signatures, and whether every sample was seen once per epoch."""
    wrong = [f"{name}: {found[name]} instead of {expected[name]}" for name in expected if found[name] != expected[name]]
    ids = found["history"]["ids"]
    for epoch in range(len(ids) // EPOCH):
        if sum(ids[epoch * EPOCH : (epoch + 1) * EPOCH]) != 2**SAMPLES - 1:
            wrong.append(f"epoch {epoch} saw other samples than all of them once")
    return wrong


def use_cache(folder):
    """Keep compiled programs in a folder, so that the next process need not compile them."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def join(address, processes, process):
    """Become one of several processes."""
    if int(processes) > 1:
        jax.distributed.initialize(
            address,
            int(processes),
            int(process),
            coordinator_bind_address=address,
            initialization_timeout=60,
            heartbeat_timeout_seconds=10,
            shutdown_timeout_seconds=10,
        )


def run_together(folder, terminated):
    """A run over all devices of all processes, of which one may be terminated at a step; tells what it came to."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    source = ms.ArraySampleSource(DATA, ordering="sequential")  # a shuffle takes its time to compile
    batches = ms.DataLoader([source, ms.BatchTransform(ROWS)], sharding=mesh)

    def replicated(leaf):
        leaf = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, everywhere, lambda index: leaf[index])

    def terminate(state, batch, elapsed):
        if terminated is not None:
            time.sleep(0.1)  # time for the processes to agree on where to stop
        if terminated == f"{jax.process_index()},{elapsed.steps}":
            os.kill(os.getpid(), signal.SIGTERM)

    state = {name: jax.tree.map(replicated, tree) for name, tree in start().items() if name != "key"}
    tasks = {ms.every(1): [train_step, terminate], ms.every(10): ms.checkpoint(pathlib.Path(folder) / "run")}
    time.sleep(0.5 * jax.process_index())  # the first process makes the directory before the others look for it
    try:
        output = ms.loop(state, batches, tasks, stop=40, key=jax.random.key(KEY_SEED), resume=True)
    except ms.errors.Preempted as preempted:
        print(json.dumps({"steps": preempted.loop_output.elapsed.steps}), flush=True)
        raise
    found = {"steps": output.elapsed.steps, "state": bits(output.state), "history": table(output.history)}
    print(json.dumps(found), flush=True)


def main(folder, *words):
    options = dict(word.split("=", 1) for word in words)
    warnings.simplefilter("error")
    if "together" in options:
        join(*options["together"].split(","))
        for name in filter(None, (folder, options.get("more"))):
            run_together(name, options.get("terminated"))
    else:
        faults.set(options.get("place"), int(options.get("count", 1)), int(options.get("number", signal.SIGKILL)))
        skip = [tuple(map(int, each.split("-"))) for each in options.get("skip", "").split(",") if each]
        run(folder, skip=skip)


if __name__ == "__main__":
    main(*sys.argv[1:])
