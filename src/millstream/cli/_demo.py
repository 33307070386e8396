"""The demo: the whole way from data to a trained network, killed and resumed, in one screen."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import millstream as ms
from millstream.report.page import write_report
from millstream.text.tables import line_width

_BATCH, _HIDDEN, _RATE, _MOMENTUM, _FUSE = 64, 128, 0.1, 0.9, 100
_FAR = 1_000_000  # the number of a batch that no run comes to
_SHADES = " ░▒▓█"
_KILLED = (
    "import sys; from millstream.cli._demo import train_until_killed as f; f(sys.argv[1], *map(int, sys.argv[2:]))"
)


def run(epochs: int, seed: int, folder: str | os.PathLike[str] | None, open_page: bool) -> int:
    """Train on the embedded digits, kill the same run and resume it, compare the two, and write a report.

    Args:
        epochs: How many to train.
        seed: Of the run's key.
        folder: Where the record of the run and the report go; None for a new temporary folder.
        open_page: Whether to open the report in a browser.
    """
    if folder is not None:
        return show(epochs, seed, pathlib.Path(folder), open_page)
    made = pathlib.Path(tempfile.mkdtemp(prefix="millstream-demo-"))
    try:
        return show(epochs, seed, made, open_page)
    except BaseException:
        shutil.rmtree(made)  # nobody was told of it
        raise


def show(epochs: int, seed: int, folder: pathlib.Path, open_page: bool) -> int:
    """The demo, with its record and report in a folder."""
    begun, platform = time.perf_counter(), jax.devices()[0].platform
    say(f"Millstream {ms.__version__} on JAX {jax.__version__}, {platform}: train, kill, resume, compare.", "")
    train, test = make_loader("train", "shuffle"), make_loader("test", "sequential")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="killed-") as saved, killed_run(saved, epochs, seed) as killed:
        show_data(train, seed)
        output = show_training(train, test, epochs, seed, folder)
        same = show_resume(train, output, epochs, seed, saved, killed())
    headline(4, "See it")
    page = write_report(folder)
    say("The run as a page, with its curves and where the time went:")
    print(page, flush=True)  # in one piece, to be copied
    if not open_page:
        say("--open opens it in a browser.")
    elif not webbrowser.open(page.as_uri()):
        say("There is no browser to open it with.")
    words = "All of it" if same else "They should not differ: please report it. All of it"
    print()
    say(f"{words} in {time.perf_counter() - begun:.0f} s. Next, read the program of this demo, and write your own:", "")
    print(__file__, flush=True)
    return 0 if same else 1


def show_data(train: ms.DataLoader, seed: int) -> None:
    """Some samples of the first batch, and a batch far away in several ways."""
    headline(1, f"The data: {len(ms.datasets.DigitsDataset('train')):,} handwritten digits in batches of {_BATCH}")
    key = jax.random.key(seed)
    (batch, _), *_ = train.iterate(train.init_state(key), steps=1)
    images = np.asarray(batch["image"]).reshape(-1, 8, 8)
    count = max(1, min(4, (line_width() - 3) // 18))
    print(drawn(images[:count]), flush=True)
    say(f"The first of batch 0: {' '.join(map(str, batch['label'][:count]))}.")
    far = train.init_state(key, step=_FAR)
    ways: dict[str, Callable[[], Any]] = {
        "in Python": lambda: next(train.iterate(far))[0],
        "inside jax.jit": lambda: jax.jit(lambda loader, state: loader.next_batch(state)[0])(train, far),
        "in threads": lambda: next(train.replace(executor=ms.Threads(2)).iterate(far))[0],
    }
    labels = {name: np.asarray(make()["label"]).tolist() for name, make in ways.items()}
    assert len({*map(tuple, labels.values())}) == 1, labels
    first = " ".join(map(str, labels["in Python"][:8]))
    say(f"A batch is a function of key and step. Number {_FAR:,} at once, {', '.join(ways)}: {first} ...")


def show_training(train: ms.DataLoader, test: ms.DataLoader, epochs: int, seed: int, folder: pathlib.Path) -> Any:
    """A run that nothing disturbs, and how good and how fast it is."""
    headline(2, f"Train: {epochs} epochs of {train.steps_per_epoch} steps, up to {_FUSE} in one program")
    tasks = {ms.every(epochs=max(1, epochs // 4)): ms.callbacks.throughput()}
    recorded = ms.record(folder, overwrite=True, loaders={"test": test})
    output = fit(train, epochs, seed, tasks, callbacks=[ms.callbacks.keras_bar(), recorded])
    tested = ms.test_loop(output.state, test, {ms.on_test_step: test_step}, key=jax.random.key(seed))
    if tested.interrupted:
        raise KeyboardInterrupt
    accuracy, count = tested.history.mean("accuracy"), tested.elapsed.samples
    say(f"Test accuracy {accuracy:.2%}, on {count} digits that it never saw.")
    seconds, rates = output.history.collect("seconds", "samples_per_second")
    say(f"{rates[-1]:,.0f} samples per second; at first, with compiling, {seconds[0]:.1f} s.")
    return output


def show_resume(train: ms.DataLoader, alone: Any, epochs: int, seed: int, saved: str, killed_at: int) -> bool:
    """What is left of a killed run, resumed; whether it ends like the one that nothing disturbed."""
    headline(3, "Kill it, and resume")
    store = ms.checkpoints.CheckpointStore(saved, read_only=True)
    say(f"Meanwhile a process ran the same program. SIGKILL ended it at step {killed_at} of {alone.elapsed.steps}.")
    resumed = fit(train, epochs, seed, {}, resume=saved)
    say(f"Resumed from its checkpoint of step {store.latest()}, with the same samples in the same order.")
    weights, others = jax.tree.leaves(alone.state), jax.tree.leaves(resumed.state)
    losses = [output.history.collect("loss") for output in (alone, resumed)]
    same = losses[0] == losses[1] and all(map(np.array_equal, weights, others))
    count = sum(leaf.size for leaf in jax.tree.leaves(alone.state[0]))
    verdict = "IDENTICAL" if same else "DIFFERENT"
    say(f"{verdict}, bit for bit: {count:,} weights, their momenta, and {len(losses[0]):,} losses.")
    return same


def fit(train: ms.DataLoader, epochs: int, seed: int, tasks: Mapping[Any, Any], **options: Any) -> Any:
    """One run of the program; `tasks` and options say what is done besides."""
    key = jax.random.key(seed)
    output = ms.train_loop(
        make_model(key),
        train,
        {ms.on_train_step: train_step, **tasks},
        stop=ms.at(epochs=epochs),
        key=key,
        fuse=_FUSE,
        **options,
    )
    if output.interrupted:
        raise KeyboardInterrupt
    return output


@contextlib.contextmanager
def killed_run(saved: str, epochs: int, seed: int) -> "Iterator[Callable[[], int]]":
    """The same run in a process of its own, which is killed; gives what waits for that and says at which step."""
    steps = epochs * make_loader("train", "shuffle").steps_per_epoch
    kill_at = max(2, 3 * steps // 5)
    command = [sys.executable, "-c", _KILLED, *map(str, (saved, epochs, seed, kill_at))]

    def wait() -> int:
        complaint = process.communicate()[1]
        if process.returncode == 0 or not ms.checkpoints.CheckpointStore(saved, read_only=True).steps():
            raise RuntimeError(f"the process that should be killed ended with {process.returncode}: {complaint}")
        return kill_at

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield wait
        finally:
            process.kill()


def train_until_killed(saved: str, epochs: int, seed: int, kill_at: int) -> None:
    """The run with checkpoints, up to a step at which this process is killed: nothing can be tidied up."""

    def kill(state: Any) -> None:
        while not ms.checkpoints.CheckpointStore(saved, read_only=True).steps():  # it is written in the background
            time.sleep(0.01)
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    tasks = {ms.every(max(1, kill_at // 3)): ms.checkpoint(saved), ms.at(kill_at): kill}
    fit(make_loader("train", "shuffle"), epochs, seed, tasks)


def headline(number: int, text: str) -> None:
    """What comes next."""
    print()
    say(f"{number}. {text}", "")


def say(text: str, indent: str = "   ") -> None:
    """Print a sentence in as many lines as the terminal needs."""
    more = indent or "   "
    print(textwrap.fill(text, min(88, line_width()), initial_indent=indent, subsequent_indent=more), flush=True)


def drawn(images: np.ndarray) -> str:
    """Images beside each other, two characters per pixel."""
    shades = np.array(list(_SHADES))[np.clip((images * len(_SHADES)).astype(int), 0, len(_SHADES) - 1)]
    rows = ["  ".join("".join(np.repeat(image[row], 2)) for image in shades) for row in range(images.shape[1])]
    return "\n".join(f"   {row}".rstrip() for row in rows)


def make_loader(split: Any, ordering: Any) -> ms.DataLoader:
    """The digits of a split, shuffled or not, as batches of floats."""
    return ms.DataLoader(
        [
            ms.ArraySampleSource(ms.datasets.DigitsDataset(split).as_array_dict(), ordering=ordering),
            ms.BatchTransform(_BATCH),
            ms.NormalizeImageTransform(),
            ms.FlattenImageTransform(),
            ms.DevicePutTransform(),
        ]
    )


def make_model(key: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
    """Weights of a network with one hidden layer, and their momenta."""
    first, second = jax.random.split(key)
    weights = [
        jax.random.normal(first, (64, _HIDDEN)) * np.sqrt(2 / 64),
        jnp.zeros(_HIDDEN),
        jax.random.normal(second, (_HIDDEN, 10)) * np.sqrt(1 / _HIDDEN),
        jnp.zeros(10),
    ]
    return weights, jax.tree.map(jnp.zeros_like, weights)


def logits(weights: list[jax.Array], images: jax.Array) -> jax.Array:
    """Scores of the ten digits."""
    return jax.nn.relu(images @ weights[0] + weights[1]) @ weights[2] + weights[3]


def loss_and_accuracy(weights: list[jax.Array], batch: Any) -> tuple[jax.Array, jax.Array]:
    """The means over the real rows of a batch."""
    rows, mask = batch
    scores = jax.nn.log_softmax(logits(weights, rows["image"]))
    losses = -jnp.take_along_axis(scores, rows["label"][:, None], axis=1)[:, 0]
    hits = jnp.argmax(scores, axis=1) == rows["label"]
    return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1), jnp.sum(hits * mask) / jnp.maximum(jnp.sum(mask), 1)


@jax.jit
def train_step(model: Any, batch: Any) -> tuple[ms.loops.Logs, Any]:
    """One step of gradient descent with momentum."""
    weights, momenta = model
    (loss, accuracy), gradients = jax.value_and_grad(loss_and_accuracy, has_aux=True)(weights, batch)
    momenta = jax.tree.map(lambda m, g: _MOMENTUM * m + g, momenta, gradients)
    weights = jax.tree.map(lambda w, m: w - _RATE * m, weights, momenta)
    return ms.logs().add_metric("accuracy", accuracy).add_metric("loss", loss), (weights, momenta)


@jax.jit
def test_step(model: Any, batch: Any) -> ms.loops.Logs:
    """What the network makes of a batch."""
    return ms.logs().add_metric("accuracy", loss_and_accuracy(model[0], batch)[1])
