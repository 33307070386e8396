"""A run with a progress bar, in a process of its own. Run by test_bars.py, on a terminal or into a pipe.

Usage: bar_script.py BAR STEPS TOTAL [fail|print|hosts ADDRESS NUMBER]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import millstream as ms

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

    options = {"keras": {"interval": 0.0}, "tqdm": {"mininterval": 0.0}, "rich": {"interval": 0.0}}[kind]
    bar = BARS[kind](total, **options)
    batches = [np.ones((number % 3 + 1, 2), np.float32) for number in range(steps)]
    ms.loop(jnp.float32(0), batches, {ms.every(1): [train_step, fail, bar]})
    print("and so on")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
