"""A run with a progress bar, in a process of its own. Run by test_bars.py, on a terminal or into a pipe.

Usage: bar_script.py BAR STEPS TOTAL [fail|print|hosts ADDRESS NUMBER]
       bar_script.py train|kill
"""

import fcntl
import os
import signal
import struct
import sys
import termios

import jax
import jax.numpy as jnp
import numpy as np

import millstream as ms

AT_ONCE = {"keras": {"interval": 0.0}, "tqdm": {"mininterval": 0.0}, "rich": {"interval": 0.0}}
BARS = {"keras": ms.callbacks.keras_bar, "tqdm": ms.callbacks.tqdm_bar, "rich": ms.callbacks.rich_bar}


@jax.jit
def train_step(state, batch):
    logs = ms.logs().add_metric("loss", state).add_stateful_metric("newest", state)
    return logs.add_metrics({f"another_long_name_{number}": jnp.float32(number) for number in range(5)}), state + 1


def main(kind, steps, total, what="", *hosts):
    if what == "hosts":
        address, number = hosts
        jax.distributed.initialize(address, num_processes=2, process_id=int(number))

    def fail(state):
        if what == "fail" and state == steps:
            raise RuntimeError("the last step fails")

    bar = BARS[kind](total, **AT_ONCE[kind])
    batches = [np.ones((number % 3 + 1, 2), np.float32) for number in range(steps)]
    ms.loop(jnp.float32(0), batches, {ms.every(1): [train_step, fail, bar]})
    print("and so on")


@jax.jit
def test_step(state, batch):
    return ms.logs().add_metric("loss", state * 10)


def train(epochs, *widths, kill=False):
    """Epochs of twenty steps, with a test of three after each, with every kind of bar.

    Args:
        epochs: How many.
        widths: Of the terminal, one run after the other; a pair if it changes after the first epoch.
        kill: Whether the process is killed at the begin of the last epoch.
    """
    source = ms.ArraySampleSource({"x": np.arange(40.0)})
    loader, test = ms.DataLoader([source, ms.BatchTransform(2)]), ms.DataLoader([source, ms.BatchTransform(16)])
    for width in widths or (None,):
        first, later = width if isinstance(width, tuple) else (width, width)

        def begin(state, batch, elapsed, first=first, later=later):
            resize(first if elapsed.epochs == 0 else later)
            if kill and elapsed.epochs == epochs - 1:
                os.kill(os.getpid(), signal.SIGKILL)

        for kind, make in BARS.items():
            resize(first)
            ms.train_loop(
                jnp.float32(1),
                loader,
                {"on_train_step": train_step, "on_test_step": test_step, "on_epoch_begin": begin},
                callbacks=[make(**({} if kill else AT_ONCE[kind]))],
                test_dataset=test,
                stop=ms.at(epochs=epochs),
                key=jax.random.key(0),
            )
    print("and so on")


def resize(columns):
    if columns is not None:
        fcntl.ioctl(sys.stdout, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


if __name__ == "__main__" and sys.argv[1] == "train":
    train(3, 120, 80, 40, (120, 50))
elif __name__ == "__main__" and sys.argv[1] == "kill":
    train(4, kill=True)
elif __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
