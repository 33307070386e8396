"""What a loop adds to a step that logs 200 metrics, all of them kept.

Beside a bare `for` over the same compiled step, on a tiny state and with a constant batch. By hand, the metrics of
every step are put into a list, and all are fetched at the end.
"""

import itertools
from typing import Any

import jax
from _case import Options, main
from _loops import BATCH, advance, start
from _measure import Entry, Run, measured
from _result import Table

import millstream as ms

METRICS = 200
OURS, BY_HAND, BARE = "Millstream, loop", "metrics kept by hand", "a bare for"


def logging_step(metrics: int) -> Any:
    """A compiled step with that many metrics."""

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        state = advance(state, batch)
        total = state["x"].sum()
        return {"metrics": {f"metric {number}": total + number for number in range(metrics)}}, state

    return jax.jit(step)


def ours(step: Any, metrics: int, steps: int) -> Run:
    def run() -> None:
        state, history, _ = ms.loop(start(), itertools.repeat(BATCH), [(ms.every(1), step)], stop=steps)
        jax.block_until_ready(state)
        history.collect("metric 0", f"metric {metrics - 1}")

    return run


def by_hand(step: Any, steps: int, kept: bool) -> Run:
    def run() -> None:
        state, logged = start(), []
        for batch in itertools.repeat(BATCH, steps):
            logs, state = step(state, batch)
            logged += [logs["metrics"]] * kept
        jax.block_until_ready(state)
        jax.device_get(logged)

    return run


def measure(options: Options) -> list[Table]:
    steps, step = options.size(300, 20), logging_step(METRICS)
    entries = [
        Entry(OURS, lambda: ours(step, METRICS, steps), "millstream", steps, BARE),
        Entry(BY_HAND, lambda: by_hand(step, steps, True), "", steps, BARE),
        Entry(BARE, lambda: by_hand(step, steps, False), "", steps),
    ]
    table = measured(f"{steps:,} steps with {METRICS} metrics", "µs per step", OURS, entries, options.rounds(7))
    table.hold("µs per step over the bare for", table.added(OURS), at_most=300)
    return [table]


if __name__ == "__main__":
    main(measure)
