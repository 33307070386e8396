"""What a loop adds to a bare `for` over the same compiled step, beside ciclo and Keras `fit`.

A step on a tiny state, with a constant batch, shows the microseconds that a loop costs; a step of 5 ms behind 3 ms of
preparation shows whether the two still run beside each other. Every pass waits for its last state and reads its
history; what bars write goes to a terminal that is a string. Run with `make bench`.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from _ciclo import import_ciclo
from _measure import Seconds, interleaved, print_machine, verdict

import millstream as ms

STEPS, ROUNDS = 3_000, 7
LEAVES, LEAVES_STEPS = 200, 600  # a step on so many leaves takes ten times as long
DEVICE_MS, HOST_MS, SLOW_STEPS, SLOW_ROUNDS = 5, 3, 50, 7
BATCH = {"x": jnp.ones((32, 4))}
KEY = jax.random.key(0)
KEPT, BAR = "two metrics kept", "two metrics and keras_bar"


@dataclasses.dataclass(frozen=True)
class Case:
    """A pass over some steps.

    Attributes:
        run: The pass.
        floor: The case of the bare `for` over the same step; "" if it is one.
        limit: Microseconds per step that it may take more.
        steps: How many steps it has.
    """

    run: Callable[[], Any]
    floor: str = ""
    limit: float | None = None
    steps: int = STEPS


class Terminal(io.StringIO):
    """A string that bars take for a terminal."""

    def isatty(self) -> bool:
        return True


def start(leaves: int = 0) -> dict[str, Any]:
    return {"x": jnp.zeros(8), "count": jnp.int32(0), "more": [jnp.float32(i) for i in range(leaves)]}


def advance(state: dict[str, Any], batch: Any) -> dict[str, Any]:
    x = state["x"] + jax.tree.leaves(batch)[0].mean()
    return {"x": x, "count": state["count"] + 1, "more": [leaf + 1 for leaf in state["more"]]}


def advance_and_log(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Logs that every loop understands, and the state."""
    state = advance(state, batch)
    return {"metrics": {"loss": state["x"].sum(), "accuracy": state["x"].max()}}, state


quiet, step = jax.jit(advance), jax.jit(advance_and_log)
donated = jax.jit(advance_and_log, donate_argnums=0)


def log_every_100(state: Any, batch: Any, elapsed: ms.Elapsed) -> Any:
    logs, state = step(state, batch)
    return (logs if elapsed.steps % 100 == 0 else None), state


def nothing(state: Any) -> None:
    """A callback that costs its call."""


def bare(step: Any, leaves: int = 0, steps: int = STEPS) -> None:
    state = start(leaves)
    for batch in itertools.repeat(BATCH, steps):
        _, state = step(state, batch)
    jax.block_until_ready(state)


def bare_quiet() -> None:
    state = start()
    for batch in itertools.repeat(BATCH, STEPS):
        state = quiet(state, batch)
    jax.block_until_ready(state)


def bare_kept() -> None:
    """What one writes by hand to have the same history."""
    state, kept = start(), []
    for batch in itertools.repeat(BATCH, STEPS):
        logs, state = step(state, batch)
        kept.append(logs)
    jax.device_get(kept)


def ours(
    step: Any, others: Iterable[tuple[Any, Any]] = (), leaves: int = 0, bar: bool = False, steps: int = STEPS
) -> None:
    tasks = [(ms.every(1), step), *others, *([(ms.every(1), ms.keras_bar())] if bar else [])]
    with contextlib.redirect_stdout(Terminal()):
        state, history, _ = ms.loop(start(leaves), itertools.repeat(BATCH), tasks, stop=steps)
    jax.block_until_ready(state)
    history.collect("loss", "accuracy")


def our_cases() -> dict[str, Case]:
    rare = [(ms.every(1000), nothing) for _ in range(5)]
    cases = {
        "bare, no logs": Case(bare_quiet),
        "bare": Case(functools.partial(bare, step)),
        "bare, donated": Case(functools.partial(bare, donated)),
        f"bare, {LEAVES} leaves": Case(functools.partial(bare, step, LEAVES, LEAVES_STEPS), steps=LEAVES_STEPS),
        "bare, metrics kept by hand": Case(bare_kept, "bare"),
        "no logs": Case(functools.partial(ours, quiet), "bare, no logs"),
        "logs every 100 steps": Case(functools.partial(ours, log_every_100), "bare"),
        KEPT: Case(functools.partial(ours, step), "bare", 10),
        BAR: Case(functools.partial(ours, step, bar=True), "bare", 15),
        "two metrics and five every(1000)": Case(functools.partial(ours, step, rare), "bare", 12),
        "two metrics, donated": Case(functools.partial(ours, donated), "bare, donated"),
        f"two metrics, {LEAVES} leaves": Case(
            functools.partial(ours, step, leaves=LEAVES, steps=LEAVES_STEPS),
            f"bare, {LEAVES} leaves",
            steps=LEAVES_STEPS,
        ),
    }
    loader = ms.DataLoader([ms.ArraySampleSource({"x": jnp.ones((1024, 4))}), ms.BatchTransform(32)])
    for width, steps, limit in ((1, STEPS, None), (10, 2 * STEPS, None), (100, 10 * STEPS, 1)):
        floor = f"run_steps, {width} per call"
        cases[floor] = Case(functools.partial(bare_fused, loader, width, steps), steps=steps)
        cases[f"fuse={width}"] = Case(functools.partial(our_fused, loader, width, steps), floor, limit, steps)
    return cases


def log_in_body(state: Any, batch: Any, mask: jax.Array) -> Any:
    logs, state = advance_and_log(state, (batch, mask))
    return state, logs


def bare_fused(loader: Any, width: int, steps: int) -> None:
    data, state = loader.init_state(KEY), start()
    for _ in range(steps // width):
        data, state, _ = loader.run_steps(data, state, log_in_body, width, width=width)
    jax.block_until_ready(state)


def our_fused(loader: Any, width: int, steps: int) -> None:
    state, history, _ = ms.loop(start(), loader, {ms.every(1): step}, stop=steps, key=KEY, fuse=width)
    jax.block_until_ready(state)
    history.collect("loss", "accuracy")


def ciclo_cases() -> dict[str, Case]:
    ciclo = import_ciclo()

    def run(step: Any, bar: bool = False) -> None:
        with contextlib.redirect_stdout(Terminal()):
            tasks = {ciclo.every(1): [step, *([ciclo.keras_bar(total=STEPS)] if bar else [])]}
            state, history, _ = ciclo.loop(start(), itertools.repeat(BATCH), tasks, stop=STEPS)
        jax.block_until_ready(state)
        history.collect("loss", "accuracy")

    return {
        "ciclo, no logs": Case(functools.partial(run, quiet), "bare, no logs"),
        "ciclo, two metrics kept": Case(functools.partial(run, step), "bare"),
        "ciclo, keras_bar": Case(functools.partial(run, step, bar=True), "bare"),
    }


def keras_model(step: Any, state: Any) -> Any:
    """A Keras model whose train step is this one."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    leaves, tree = jax.tree.flatten(state)

    class Model(keras.Model):
        def train_step(self, state: Any, data: Any) -> Any:
            trainable, ours, *others = state
            logs, new = step(jax.tree.unflatten(tree, ours), data[0])
            return logs["metrics"], (trainable, jax.tree.leaves(new), *others)

    model: Any = Model()
    for i, leaf in enumerate(leaves):
        model.add_weight(leaf.shape, "zeros", leaf.dtype, trainable=False, name=f"leaf_{i}")
    model.built = True
    model.compile(optimizer="sgd")
    return model


def keras_fit(model: Any, batches: Iterable[Any], steps: int, verbose: int) -> None:
    with contextlib.redirect_stdout(Terminal()):
        model.fit(((batch,) for batch in batches), steps_per_epoch=steps, verbose=verbose, shuffle=False)
    jax.block_until_ready([weight.value for weight in model.weights])


def keras_cases() -> dict[str, Case]:
    model = keras_model(advance_and_log, start())
    every = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")

    def floor() -> None:
        model.make_train_function()
        state = jax.tree.map(jnp.copy, model._get_jax_state(**dict.fromkeys(every, True)))
        batches = itertools.repeat((BATCH,))
        for _ in range(STEPS):
            _, state = model.train_function(state, batches)
        jax.block_until_ready(state)

    fit = functools.partial(keras_fit, model, itertools.repeat(BATCH), STEPS)
    return {
        "bare train_function of Keras": Case(floor),
        "Keras fit, verbose 0": Case(functools.partial(fit, 0), "bare train_function of Keras"),
        "Keras fit, verbose 1": Case(functools.partial(fit, 1), "bare train_function of Keras"),
    }


def installed(peer: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return make()
    except ImportError as error:
        print(f"skipped {peer}: {error}")
        return {}


def overhead() -> None:
    cases = our_cases() | installed("ciclo", ciclo_cases) | installed("Keras", keras_cases)
    wall, cpu = interleaved({name: case.run for name, case in cases.items()}, ROUNDS)
    print(f"\nMicroseconds per step, and over the bare `for` of the same step; {ROUNDS} rounds of {STEPS:,} steps")
    print(f"{'':34}{'least':>10}{'median':>10}{'over: least':>14}{'median':>10}{'CPU':>10}   bar")
    more = {}
    for name, case in cases.items():
        least, middle = (pick(wall[name]) / case.steps * 1e6 for pick in (min, statistics.median))
        text = f"{name:34}{least:>10.2f}{middle:>10.2f}"
        if case.floor:
            (more[name], typical), (busy, _) = added(wall, name, case), added(cpu, name, case)
            text += f"{more[name]:>14.2f}{typical:>10.2f}{busy:>10.2f}"
        if case.limit is not None:
            text += f"   {case.limit:g}: {'met' if more[name] <= case.limit else 'MISSED'}"
        print(text)
    beside_peers(more)


def added(times: Seconds, name: str, case: Case) -> tuple[float, float]:
    """Microseconds per step over the floor: of the best passes of both, and the median of round by round."""
    best = min(times[name]) - min(times[case.floor])
    rounds = statistics.median(mine - bare for mine, bare in zip(times[name], times[case.floor], strict=True))
    return best / case.steps * 1e6, rounds / case.steps * 1e6


def beside_peers(more: dict[str, float]) -> None:
    print("\nWhat ours adds, as a share of what theirs adds")
    for mine, theirs in (
        ("no logs", "ciclo, no logs"),
        (KEPT, "ciclo, two metrics kept"),
        (BAR, "ciclo, keras_bar"),
        (KEPT, "Keras fit, verbose 0"),
        (BAR, "Keras fit, verbose 1"),
    ):
        if theirs in more:
            verdict(f"{mine} / {theirs}", more[mine] / more[theirs], at_most=0.1)


def slow_step() -> Any:
    """A step of about 5 ms: a chain of products, as long as this machine needs."""

    def chain(state: Any, batch: Any, links: int) -> Any:
        x = jax.lax.fori_loop(0, links, lambda _, x: jnp.tanh(x @ x), state["x"])
        return {"metrics": {"loss": x.mean() + batch["x"].mean(), "accuracy": x.max()}}, {"x": x}

    compiled = jax.jit(chain)
    jax.block_until_ready(compiled(slow_start(), BATCH, 1))
    seconds = []
    for _ in range(10):
        begun = time.perf_counter()
        jax.block_until_ready(compiled(slow_start(), BATCH, 20))
        seconds.append((time.perf_counter() - begun) / 20)
    links = max(round(DEVICE_MS * 1e-3 / min(seconds)), 1)
    return functools.partial(chain, links=links)


def slow_start() -> dict[str, Any]:
    return {"x": jnp.full((256, 256), 0.01)}


def prepared() -> Iterator[Any]:
    for _ in range(SLOW_STEPS):
        time.sleep(HOST_MS * 1e-3)
        yield BATCH


def overlap() -> None:
    plain = slow_step()
    step = jax.jit(plain)

    def bare(batches: Callable[[], Iterable[Any]], wait: bool = False) -> None:
        state = slow_start()
        for batch in batches():
            logs, state = step(state, batch)
            if wait:
                jax.device_get(logs)
        jax.block_until_ready(state)

    def ours() -> None:
        with contextlib.redirect_stdout(Terminal()):
            tasks = {ms.every(1): [step, ms.keras_bar(total=SLOW_STEPS)]}
            jax.block_until_ready(ms.loop(slow_start(), prepared(), tasks).state)

    def theirs() -> dict[str, Any]:
        ciclo = import_ciclo()

        def run() -> None:
            with contextlib.redirect_stdout(Terminal()):
                tasks = {ciclo.every(1): [step, ciclo.keras_bar(total=SLOW_STEPS)]}
                jax.block_until_ready(ciclo.loop(slow_start(), prepared(), tasks)[0])

        return {"ciclo, keras_bar": run}

    def keras() -> dict[str, Any]:
        model = keras_model(plain, slow_start())
        return {"Keras fit, verbose 1": lambda: keras_fit(model, prepared(), SLOW_STEPS, 1)}

    device, mine = "the step alone", "millstream, history and keras_bar"
    cases = {
        device: functools.partial(bare, lambda: itertools.repeat(BATCH, SLOW_STEPS)),
        "the preparation alone": lambda: list(prepared()),
        "bare, never waiting": functools.partial(bare, prepared),
        "bare, reading at every step": functools.partial(bare, prepared, wait=True),
        mine: ours,
    }
    cases |= installed("ciclo", theirs) | installed("Keras", keras)
    wall, _ = interleaved(cases, SLOW_ROUNDS)
    ideal = max(min(wall[name]) for name in list(cases)[:2])
    rounds = f"{SLOW_ROUNDS} rounds of {SLOW_STEPS} steps"
    print(
        f"\nMilliseconds per step: about {DEVICE_MS} on the device, and {HOST_MS} of preparation on the host; {rounds}"
    )
    print(f"{'':34}{'least':>10}{'median':>10}{'of the longer':>16}")
    for name, seconds in wall.items():
        least, middle = (pick(seconds) / SLOW_STEPS * 1e3 for pick in (min, statistics.median))
        print(f"{name:34}{least:>10.2f}{middle:>10.2f}{min(seconds) / ideal:>15.2f}x")
    verdict(f"{mine}, of the longer", min(wall[mine]) / ideal, at_most=1.05)


def main() -> None:
    begun = time.perf_counter()
    print_machine(["jax", "millstream", "ciclo", "keras"])
    print(f"load average {', '.join(f'{load:.1f}' for load in os.getloadavg())}")
    overhead()
    overlap()
    print(f"\nmeasured in {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
