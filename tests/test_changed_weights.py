"""Weights of samples that a training run changes, and that are saved with it."""

import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_trees_equal

import millstream as ms

ROOT = pathlib.Path(__file__).parent
N = 24
DATA = {"x": np.arange(N, dtype=np.int32)}


def weighted(executor: Any = None, sizes: Any = 6, **options: Any) -> Any:
    view = ms.views.weighted(ms.ArraySampleSource(DATA), np.ones(N), **options)
    return ms.DataLoader([view, ms.BatchTransform(sizes)], executor=executor)


def drawn(loader, key, steps, first=0):
    return [jax.device_get(pair) for pair in loader.iterate(loader.init_state(key, step=first), steps=steps)]


@jax.jit
def step(state, batch):
    rows, mask = batch
    seen = jnp.sum(jnp.where(mask, rows["x"], 0))
    return ms.logs().add_metric("sum", seen), {"total": state["total"] * 3 % 10007 + seen, "seen": seen}


START = {"total": jnp.int32(0), "seen": jnp.int32(0)}


def weights_at(state: Any, step: int) -> np.ndarray:
    """Weights that depend on what was learned, and leave most samples out."""
    return np.random.default_rng([int(state["total"]), step]).integers(0, 2, N) + 1e-3


def mine(state, batch, elapsed, loop_state):
    loop_state.set_weights(weights_at(state, elapsed.steps))


def run(key, stop=14, loader=None, folder=None, callbacks=(), **options):
    tasks: list[Any] = [(ms.every(1), step), (ms.every(4), mine), *callbacks]
    if folder is not None:
        tasks.append((ms.every(1), ms.checkpoint(folder)))
        options["resume"] = folder
    return ms.loop(START, weighted() if loader is None else loader, tasks, stop=stop, key=key, **options)


def by_hand(key, stop=14):
    """What `run` does, step by step, with a loader for all weights."""
    loader, state, sums = weighted(), START, []
    for number in range(stop):
        batch = drawn(loader, key, 1, number)[0]
        _, state = step(state, batch)
        sums.append(int(state["seen"]))
        if (number + 1) % 4 == 0:
            loader = weighted().with_weights(weights_at(state, number + 1))
    return state, sums


def test_weights_change_what_is_drawn_from_a_step_on(key):
    before, after = weighted(), weighted().with_weights(np.arange(N) % 2)
    assert {row for batch, _ in drawn(after, key, 8, 3) for row in batch["x"].tolist()} == set(range(1, N, 2))
    assert_trees_equal(drawn(before, key, 3), drawn(weighted(), key, 3))
    once = weighted(samples=12, replacement=False).with_weights(np.arange(N) % 2)
    assert sorted(row for batch, _ in drawn(once, key, 2) for row in batch["x"].tolist()) == list(range(1, N, 2))


@pytest.mark.parametrize("options", [{}, {"fuse": 3}, {"loader": "threads"}, {"loader": "processes"}])
def test_a_run_that_changes_its_weights_is_what_it_is_by_hand(options, key):
    made = {"threads": lambda: weighted(ms.Threads(2)), "processes": lambda: weighted(ms.Processes(1))}
    given = {name: made[value]() if name == "loader" else value for name, value in options.items()}
    output = run(key, **given)
    state, sums = by_hand(key)
    assert [int(one) for one in output.history.to_dict()["sum"]] == sums
    assert_trees_equal(output.state, state)
    assert len(set(sums)) > 5


@pytest.mark.parametrize("options", [{}, {"fuse": 3}])
def test_changed_weights_are_saved_with_the_run(options, key, tmp_path):
    expected = run(key, **options)
    for stop in (3, 4, 5, 8, 9):
        folder = tmp_path / str(stop)
        run(key, stop, folder=folder, **options)
        output = run(key, folder=folder, **options)
        assert_trees_equal(output.state, expected.state)
        assert output.history.to_dict()["sum"] == expected.history.to_dict()["sum"]


def test_a_run_saved_in_the_middle_of_a_step_draws_its_batch_by_the_weights_before(key, tmp_path):
    """SIGTERM comes after the callback that changes the weights, and before one that looks at the batch."""
    script = """
        import os, signal, sys
        sys.path.insert(0, {tests!r})
        import jax, millstream as ms
        import test_changed_weights as t
        def end(state, batch, elapsed, loop_state):  # a loop inside, such as an evaluation, that is ended early
            kill = lambda state: os.kill(os.getpid(), signal.SIGTERM) if elapsed.steps == 8 else None
            ms.loop(0, range(3), {{ms.every(1): kill}})
        def look(state, batch, elapsed):
            with open({seen!r}, "a") as file:
                print(elapsed.steps, int(batch[0]["x"].sum()), file=file)
        callbacks = [(ms.every(1), end), (ms.every(1), look)]
        t.run(jax.random.key({seed}), folder={folder!r}, callbacks=callbacks)
    """
    seen = tmp_path / "seen"
    words = {"tests": str(ROOT), "seen": str(seen), "folder": str(tmp_path / "run"), "seed": 7}
    text = "\n".join(line[8:] for line in script.splitlines()).format(**words)
    assert subprocess.run([sys.executable, "-c", text], check=False, capture_output=True).returncode != 0
    assert len(seen.read_text().splitlines()) == 7
    subprocess.run([sys.executable, "-c", text.replace("== 8", "== 99")], check=True)
    _, sums = by_hand(jax.random.key(7))
    found = [tuple(map(int, line.split())) for line in seen.read_text().splitlines()]
    assert found == list(enumerate(sums, 1))


def test_weights_change_where_batches_grow_too(key):
    sizes = {0: 4, 5: 6}
    output = run(key, loader=weighted(sizes=sizes))
    fused = run(key, loader=weighted(ms.Threads(1), sizes=sizes), fuse=5)
    assert output.history.to_dict()["sum"] == fused.history.to_dict()["sum"]
    assert output.elapsed.samples == 5 * 4 + 8 * 6 + 4 and fused.elapsed.samples == output.elapsed.samples


def test_a_step_before_the_first_change_can_be_replayed_and_no_other(key, tmp_path):
    run(key, 6, folder=tmp_path)
    assert int(ms.replay(tmp_path, weighted(), 3).batch["x"].sum()) == by_hand(key)[1][2]
    with pytest.raises(ValueError, match=r"changed the weights of its samples, last at step 4\. With"):
        ms.replay(tmp_path, weighted(), 5)
    run(key, 9, folder=tmp_path)
    with pytest.raises(ValueError, match="last at step 8"):
        ms.replay(tmp_path, weighted(), 3)


def test_batches_are_left_out_where_weights_change(key, tmp_path):
    skips = {"skip": [(5, 8), (11, 12)]}
    output = run(key, 10, **skips)
    assert run(key, 10, fuse=4, **skips).history.to_dict()["sum"] == output.history.to_dict()["sum"]
    run(key, 6, folder=tmp_path, **skips)
    assert run(key, 10, folder=tmp_path).history.to_dict()["sum"] == output.history.to_dict()["sum"]
    assert output.history.to_dict()["sum"] != run(key, 10).history.to_dict()["sum"]


REFUSED: dict[str, tuple[Any, str]] = {
    "no weights": (
        lambda key: ms.loop(START, plain(), {ms.every(1): mine}, stop=2, key=key),
        "set_weights needs a loop",
    ),
    "balanced": (lambda key: balanced().with_weights(np.ones(N)), "with_weights needs a loader that draws by weight"),
    "too few": (
        lambda key: weighted().with_weights(np.ones(3)),
        "with_weights needs a number for each of the 24 samples",
    ),
    "negative": (lambda key: weighted().with_weights(-np.ones(N)), "with_weights needs weights that are finite"),
    "all zero": (lambda key: run(key, callbacks=[(ms.every(1), nothing)]), "set_weights needs at least one weight"),
}


def plain() -> Any:
    return ms.DataLoader([ms.ArraySampleSource(DATA), ms.BatchTransform(6)])


def balanced() -> Any:
    view = ms.views.balanced(ms.ArraySampleSource(DATA), np.arange(N) % 2)
    return ms.DataLoader([view, ms.BatchTransform(6)])


def nothing(state, batch, elapsed, loop_state):
    loop_state.set_weights(np.zeros(N))


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_cannot_be_set_are_refused_by_name(name, key):
    call, words = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        call(key)
