"""What training in comfort costs: a save against Orbax's own, steps between saves, managed steps and nnx steps by hand.

Every figure stands beside what it is compared with, measured in the same run, in turn. A save is timed as a loop feels
it: from the end of the step's own work to the begin of the next step, with nothing else under way. What is only more
work for the thread that calls a step is counted twice: by the clock, and in CPU time of that thread, which other
programs disturb less. Run with `make bench`.
"""

import dataclasses
import functools
import gc
import itertools
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _measure import Seconds, print_machine

import millstream as ms

LEAVES, MEGABYTES, SAVES = 60, 50, 11
ROUNDS, STEPS, LOOP_ROUNDS, LOOP_STEPS = 150, 40, 40, 500  # short passes, of which some meet with a quiet moment
LAYERS, WIDTH, ROWS = 8, 8, 4  # small, so that a step is what it costs to start it
NEVER = 10**9


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number that is held to a bar: the least, and the median.

    Attributes:
        name: What it says.
        least: Of the best passes.
        median: Of all rounds.
        bar: What the least may not be above.
        unit: Of all three.
    """

    name: str
    least: float
    median: float
    bar: float
    unit: str


def differences(name: str, wall: Seconds, cpu: Seconds, ours: str, base: str, steps: int, bar: float) -> list[Figure]:
    """Microseconds per step that one case takes more than another."""
    figures = []
    for kind, times in (("clock", wall), ("CPU", cpu)):
        rounds = statistics.median(a - b for a, b in zip(times[ours], times[base], strict=True))
        least = min(times[ours]) - min(times[base])
        figures.append(Figure(f"{name}, {kind}", least / steps * 1e6, rounds / steps * 1e6, bar, "us"))
    return figures


def quotient(name: str, wall: Seconds, ours: str, base: str, bar: float) -> Figure:
    """How many times as long one case takes as another."""
    rounds = statistics.median(a / b for a, b in zip(wall[ours], wall[base], strict=True))
    return Figure(name, min(wall[ours]) / min(wall[base]), rounds, bar, "x")


def passes(cases: dict[str, Callable[[], None]], rounds: int) -> tuple[Seconds, Seconds]:
    """Seconds by the clock, and of CPU time of this thread, of every case in turn; the first round warms up."""
    wall: Seconds = {name: [] for name in cases}
    cpu: Seconds = {name: [] for name in cases}
    for number, (name, case) in itertools.product(range(rounds + 1), cases.items()):
        begun = time.perf_counter(), time.thread_time()
        case()
        if number > 0:
            wall[name].append(time.perf_counter() - begun[0])
            cpu[name].append(time.thread_time() - begun[1])
    return wall, cpu


def show(title: str, wall: Seconds, scale: float, unit: str) -> None:
    print(f"\n{title}\n{'':46}{'least':>10}{'median':>10}{'most':>10}   {unit}")
    for name, seconds in wall.items():
        numbers = (pick(seconds) * scale for pick in (min, statistics.median, max))
        print(f"{name:46}" + "".join(f"{number:>10.2f}" for number in numbers))


# Saving


@functools.partial(jax.jit, static_argnums=0)
def fresh(count: int, number: jax.Array) -> list[Any]:
    """So many states, with arrays that nobody has read yet: a second look at an array costs less than the first."""
    rows = MEGABYTES * 10**6 // (4 * LEAVES)
    return [[jnp.full(rows, number + i + 100 * j, jnp.float32) for i in range(LEAVES)] for j in range(count)]


def saving(folder: pathlib.Path) -> list[Figure]:
    import orbax.checkpoint as ocp

    orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    checkpoint = ms.checkpoint(folder / "ours", keep=1)
    wall: Seconds = {"ms.checkpoint, in a loop": [], "Orbax, AsyncCheckpointer.save": []}
    ours, theirs = wall.values()
    left = [0.0]

    def step(state: Any, batch: int) -> Any:
        if batch > 1:  # the first save warms up
            ours.append(time.perf_counter() - left[0])
        checkpoint.wait()
        mine, other = jax.block_until_ready(fresh(2, jnp.float32(batch)))
        gc.collect()
        begun = time.perf_counter()
        orbax.save(folder / "theirs", args=ocp.args.PyTreeSave(other), force=True)
        if batch > 0:
            theirs.append(time.perf_counter() - begun)
        orbax.wait_until_finished()
        gc.collect()
        left[0] = time.perf_counter()
        return mine

    ms.loop(None, range(SAVES + 2), [(ms.every(1), step), (ms.every(1), checkpoint)])
    orbax.close()
    del theirs[SAVES:]
    show(f"Blocked by a save of {MEGABYTES} MB in {LEAVES} arrays, {SAVES} saves", wall, 1e3, "ms")
    return [quotient("a saving step, of Orbax's own", wall, *wall, 1.5)]


def between_saves(folder: pathlib.Path) -> list[Figure]:
    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        return {"metrics": {"loss": state.sum(), "accuracy": state.max()}}, state + batch

    plain, checkpointed = "loop", "loop with a checkpoint under every(10**9)"
    wall: Seconds = {plain: [], checkpointed: []}
    cpu: Seconds = {plain: [], checkpointed: []}

    def batches(name: str, count: bool) -> Iterator[Any]:
        """Batches that know how long a loop took from the first to the last: not for opening, nor the final save."""
        begun = time.perf_counter(), time.thread_time()
        yield from itertools.repeat(jnp.ones(8), LOOP_STEPS)
        if count:
            wall[name].append(time.perf_counter() - begun[0])
            cpu[name].append(time.thread_time() - begun[1])

    for number, name in itertools.product(range(LOOP_ROUNDS + 1), wall):
        tasks: list[Any] = [(ms.every(1), step)]
        if name == checkpointed:
            tasks.append((ms.every(NEVER), ms.checkpoint(folder / f"{number}")))
        ms.loop(jnp.zeros(8), batches(name, number > 0), tasks)
    show(f"Steps between saves, {LOOP_ROUNDS} rounds of {LOOP_STEPS}", wall, 1e6 / LOOP_STEPS, "us per step")
    return differences("between saves, more per step", wall, cpu, checkpointed, plain, LOOP_STEPS, 1.0)


# Managed steps


def layers(key: jax.Array) -> list[jax.Array]:
    return [jax.random.normal(one, (WIDTH, WIDTH)) / WIDTH**0.5 for one in jax.random.split(key, LAYERS)]


def loss_of(params: list[jax.Array], batch: Any) -> jax.Array:
    x = batch["x"]
    for weights in params:
        x = jax.nn.tanh(x @ weights)
    return jnp.mean((x - batch["y"]) ** 2)


BATCH = {"x": jnp.ones((ROWS, WIDTH)), "y": jnp.zeros((ROWS, WIDTH))}
OPTIMIZER = optax.adam(1e-3)


def by_hand(state: Any, batch: Any) -> Any:
    params, opt_state, step = state
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return {"losses": {"loss": loss}}, (optax.apply_updates(params, updates), opt_state, step + 1)


def steps_of(step: Callable[[Any, Any], Any], state: Any) -> Callable[[], None]:
    """A pass of some steps, which goes on where the one before has ended."""

    def run() -> None:
        nonlocal state
        for _ in range(STEPS):
            _, state = step(state, BATCH)
        jax.block_until_ready(jax.tree.leaves(state))

    return run


def managed() -> list[Figure]:
    @ms.managed.train_step
    def train_step(state: Any, batch: Any) -> Any:
        return ms.logs().add_loss("loss", loss_of(state.params, batch))

    cases = {}
    for strategy, donated in (("jit", ()), ("jit_donate", (0,))):
        params = layers(jax.random.key(0))
        state = ms.managed.ManagedState.create(params, OPTIMIZER, strategy=strategy)  # a copy, if it donates
        hand = jax.jit(by_hand, donate_argnums=donated)
        cases[f"by hand, {strategy}"] = steps_of(hand, (params, OPTIMIZER.init(params), jnp.int32(0)))
        cases[f"managed, {strategy}"] = steps_of(train_step, state)
    wall, cpu = passes(cases, ROUNDS)
    show(f"A step of {LAYERS} layers and Adam, {ROUNDS} rounds of {STEPS}", wall, 1e6 / STEPS, "us per step")
    return [
        figure
        for name in ("jit", "jit_donate")
        for figure in differences(
            f"a managed step, {name}, more", wall, cpu, f"managed, {name}", f"by hand, {name}", STEPS, 10.0
        )
    ]


# nnx


def nnx_model() -> Any:
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = jax.nn.tanh(layer(x))
            return x

    return Model(nnx.Rngs(0))


def squared(preds: Any, target: Any) -> Any:
    return jnp.mean((preds - target) ** 2, axis=-1)


def nnx_by_nnx_jit() -> Callable[[], None]:
    from flax import nnx

    @nnx.jit
    def step(pair: Any, batch: Any) -> Any:
        model, optimizer = pair
        loss, gradients = nnx.value_and_grad(lambda model: squared(model(batch["x"]), batch["y"]).mean())(model)
        optimizer.update(model, gradients)
        return loss

    model = nnx_model()
    pair = model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    def run() -> None:
        for _ in range(STEPS):
            step(pair, BATCH)
        jax.block_until_ready(jax.tree.leaves(nnx.state(pair)))

    return run


def nnx_by_hand() -> Callable[[], None]:
    from flax import nnx

    graph, params = nnx.split(nnx_model(), nnx.Param)
    leaves, tree = jax.tree.flatten(params)

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        leaves, opt_state = state

        def loss_fn(leaves: Any) -> Any:
            model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
            return squared(model(batch["x"]), batch["y"]).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(leaves)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, leaves)
        return loss, (optax.apply_updates(leaves, updates), opt_state)

    return steps_of(step, (leaves, OPTIMIZER.init(leaves)))


def nnx_by_state() -> Callable[[], None]:
    state = ms.create_nnx_state(nnx_model(), OPTIMIZER, losses={"loss": squared})
    return steps_of(lambda state, batch: state.train_step(batch), state)


def nnx_steps() -> list[Figure]:
    hand, ours = "jax.jit over flat leaves, by hand", "create_nnx_state, train_step"
    cases = {"nnx.jit": nnx_by_nnx_jit(), hand: nnx_by_hand(), ours: nnx_by_state()}
    wall, _ = passes(cases, ROUNDS // 3)
    title = f"A step of {LAYERS} nnx layers and Adam, {ROUNDS // 3} rounds of {STEPS}"
    show(title, wall, 1e6 / STEPS, "us per step")
    return [quotient("an nnx step, of one by hand", wall, ours, hand, 2.0)]


def main() -> None:
    begun = time.perf_counter()
    print_machine(["jax", "millstream", "orbax-checkpoint", "optax", "flax"])
    print(f"load average {', '.join(f'{load:.1f}' for load in os.getloadavg())}")
    with tempfile.TemporaryDirectory() as folder:
        figures = saving(pathlib.Path(folder)) + between_saves(pathlib.Path(folder))
    figures += managed() + nnx_steps()
    print(f"\n{'':46}{'least':>10}{'median':>10}{'bar':>10}")
    for figure in figures:
        verdict = "met" if figure.least <= figure.bar else "MISSED"
        numbers = f"{figure.least:>10.2f}{figure.median:>10.2f}{figure.bar:>10.2f}"
        print(f"{figure.name:46}{numbers} {figure.unit:<3} {verdict}")
    print(f"\nmeasured in {time.perf_counter() - begun:.0f} s; load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
