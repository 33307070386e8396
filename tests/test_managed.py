"""Managed states, steps and strategies. What needs several devices is in managed_script.py, run here."""

import dataclasses
import functools
import inspect
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import managed_script
import numpy as np
import optax
import pytest
from conftest import assert_trees_equal, finish, free_address, start_script

import millstream as ms
from millstream import managed
from millstream.loops import history
from millstream.loops.callback import bind
from millstream.loops.elapsed import Elapsed
from millstream.loops.log_entries import Logs, logs
from millstream.loops.loop_state import LoopState

pytestmark = pytest.mark.optimized

SCRIPT = pathlib.Path(__file__).parent / "managed_script.py"
TX, SGD = optax.sgd(0.1, momentum=0.9), optax.sgd(1.0)  # programs are compiled for their optimizer
rng = np.random.default_rng(0)
ROWS = rng.normal(size=(12, 3)).astype(np.float32)
TARGETS = rng.normal(size=12).astype(np.float32)
BATCH = {"x": ROWS, "y": TARGETS}
MASK = np.arange(12) < 7


def new_params():
    return {"w": jnp.arange(3.0) / 4, "b": jnp.ones(())}


def new_state(tx=TX, **options):
    return managed.ManagedState.create(new_params(), tx, **options)


def errors_of(params, batch):
    return jnp.square(batch["x"] @ params["w"] + params["b"] - batch["y"])


def masked_mean(values, mask):
    return jnp.sum(values * mask.astype(values.dtype)) / jnp.sum(mask).astype(values.dtype)


@managed.train_step
def train_step(state, batch):
    return logs().add_loss("loss", jnp.mean(errors_of(state.params, batch)))


@managed.train_step
def masked_step(state, batch):
    errors = errors_of(state.params, batch[0])
    loss = masked_mean(errors, batch[1])
    return logs().add_loss("loss", loss, add_metric=True).add_output("errors", errors), state


@managed.step
def evaluate(state, batch):
    return logs().add_metric("loss", jnp.mean(errors_of(state.params, batch))), state


@managed.train_step
def per_token(state, batch):
    return logs().add_loss("loss", masked_mean(jnp.square(batch["x"] - state.params["w"][0]), batch["is_token"]))


# The steps


def test_a_managed_step_is_the_step_one_would_write_by_hand():
    @jax.jit
    def by_hand(params, opt_state, batch):
        loss, grads = jax.value_and_grad(lambda params: jnp.mean(errors_of(params, batch)))(params)
        updates, opt_state = TX.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    state = new_state()
    params, opt_state = state.params, state.opt_state
    for number in range(3):
        logged, state = train_step(state, BATCH)
        loss, params, opt_state = by_hand(params, opt_state, BATCH)
        assert type(logged) is Logs and logged.losses.loss == loss
        assert_trees_equal((state.params, state.opt_state), (params, opt_state))
        assert int(state.step) == number + 1


def test_all_losses_are_minimised_together_and_stay_in_the_logs():
    @managed.train_step
    def two_losses(state, batch):
        w = state.params["w"]
        found = logs().add_losses({"first": jnp.sum(w * 2), "second": jnp.sum(w * 3)})
        return found.add_metric("mean", jnp.mean(w)), state

    before = new_state(SGD)
    logged, state = two_losses(before, BATCH)
    np.testing.assert_allclose(state.params["w"], before.params["w"] - 5)
    assert logged.losses == {"first": 1.5, "second": 2.25} and logged.metrics == {"mean": 0.25}


def test_a_step_minimises_nothing():
    before = new_state()
    logged, state = evaluate(before, BATCH)
    assert float(logged.metrics.loss) == float(train_step(before, BATCH)[0].losses.loss)
    assert_trees_equal(state, before)


def test_what_a_function_may_return():
    @dataclasses.dataclass(frozen=True)
    class Counting(managed.ManagedState):
        count: Any

    state = Counting.create(new_params(), TX, count=0)
    loss = {"losses": {"loss": 1.0}}
    for output in (loss, (loss, None), logs().add_loss("loss", 1.0)):
        returning = managed.train_step(functools.partial(lambda output, state, batch: output, output))
        logged, new = returning(state, BATCH)
        assert logged.losses.loss == 1.0 and int(new.step) == 1
    counted = managed.train_step(lambda state, batch: (loss, state.replace(count=state.count + 2)))
    assert int(counted(state, BATCH)[1].count) == 2
    assert managed.step(lambda state, batch: (None, state))(state, BATCH)[0] == {}
    with pytest.raises(TypeError, match=r"must return logs, or \(logs, state\). In place of the state it gave 3"):
        managed.step(lambda state, batch: (loss, 3))(state, BATCH)


def test_a_step_may_take_the_elapsed():
    @managed.step
    def with_elapsed(state, batch, elapsed):
        return logs().add_metric("steps", elapsed.steps + 1)

    @managed.step
    def with_default(state, batch, elapsed=None):
        return logs().add_metric("given", elapsed is not None)

    state = new_state()
    assert with_elapsed(state, BATCH, Elapsed(steps=4))[0].metrics.steps == 5
    assert not with_default(state, BATCH)[0].metrics.given and with_default(state, BATCH, Elapsed())[0].metrics.given
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'elapsed'"):
        with_elapsed(state, BATCH)
    assert train_step(state, BATCH, Elapsed())[0].losses  # who does not take it does not see it


def test_a_step_may_have_arguments_that_are_bound():
    def scaled(state, batch, scale=1.0):
        return logs().add_loss("loss", scale * jnp.sum(state.params["w"] * batch))

    state = managed.ManagedState.create({"w": jnp.ones(2)}, optax.sgd(0.1))
    found, _ = managed.train_step(functools.partial(scaled, scale=3.0))(state, jnp.ones(2))
    assert float(found.losses.loss) == 6.0


def test_a_fused_step_may_take_the_elapsed(key):
    @managed.step
    def with_elapsed(state, batch, elapsed):
        return logs().add_metric("steps", elapsed.steps)

    loader = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(8)}), ms.BatchTransform(batch_size=2)])
    history = ms.loop(new_state(), loader, {ms.every(1): with_elapsed}, stop=4, key=key, fuse=2).history
    assert history.collect("metrics.steps") == [1, 2, 3, 4]


def test_loops_see_the_arguments_of_the_function():
    class Model(managed.ManagedState):
        @managed.step
        def test_step(self, batch, elapsed):
            return logs().add_metric("steps", elapsed.steps * 2)

    state = Model.create(new_params(), TX)
    assert list(inspect.signature(train_step).parameters) == ["state", "batch"]
    assert list(inspect.signature(Model.test_step).parameters) == ["self", "batch", "elapsed"]
    assert list(inspect.signature(state.test_step).parameters) == ["batch", "elapsed"]
    loop_state = LoopState(state, history(), Elapsed(steps=3), batch=BATCH)
    assert bind("loop", Model.test_step)(loop_state)[0].metrics.steps == 6
    assert bind("loop", train_step)(loop_state)[0].losses.loss > 0
    assert train_step.traced.__name__ == "train_step"


@pytest.mark.parametrize("strategy", ["jit", "data_parallel_donate"])
def test_a_loop_runs_a_managed_step_alone_or_fused(strategy, key):
    loader = ms.DataLoader([ms.ArraySampleSource(BATCH), ms.BatchTransform(8)])
    runs = [
        ms.loop(new_state(strategy=strategy), loader, {ms.every(1): masked_step}, stop=5, key=key, fuse=fuse)
        for fuse in (None, 2)
    ]
    losses = [run[1].collect("losses.loss") for run in runs]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert len(losses[0]) == 5 and int(runs[1][0].step) == 5


def test_steps_of_a_state_class_are_its_methods():
    class Model(managed.ManagedState):
        @managed.train_step
        def train_step(self, batch):
            """One step."""
            return logs().add_loss("loss", jnp.mean(errors_of(self.params, batch)))

    state = Model.create(new_params(), TX)
    by_method, by_class = state.train_step(BATCH), type(state).train_step(state, BATCH)
    assert_trees_equal(by_method, by_class)
    assert type(by_method[1]) is Model and Model.train_step.__doc__ == "One step."
    assert by_method[0].losses.loss == train_step(new_state(), BATCH)[0].losses.loss


def test_the_traced_step_runs_inside_a_larger_program():
    batches = jax.tree.map(lambda leaf: np.stack([leaf, leaf * 2, leaf + 1]), BATCH)

    @jax.jit
    def epoch(state):
        def body(state, batch):
            logged, state = train_step.traced(state, batch, Elapsed())
            return state, logged

        return jax.lax.scan(body, state, batches)

    state = new_state()
    fused, rows = epoch(state)
    for number in range(3):
        logged, state = train_step(state, jax.tree.map(lambda leaf: leaf[number], batches))  # noqa: B023
        np.testing.assert_allclose(rows.losses.loss[number], logged.losses.loss, rtol=1e-6)
    assert_trees_close(fused, state)
    nested = jax.jit(lambda state: train_step(state, BATCH))(new_state(strategy="data_parallel_donate"))
    np.testing.assert_allclose(nested[0].losses.loss, train_step(new_state(), BATCH)[0].losses.loss, rtol=1e-6)


def assert_trees_close(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), left, right)


def test_randomness_is_a_function_of_key_and_step(key):
    @managed.train_step
    def noisy(state, batch):
        noise = jax.random.normal(state.step_key())
        return logs().add_loss("loss", jnp.sum(state.params["w"])).add_metric("noise", noise)

    def noises(state):
        for _ in range(3):
            logged, state = noisy(state, BATCH)
            yield float(logged.metrics.noise)

    seen = list(noises(new_state(key=key)))
    assert seen == list(noises(new_state(key=key, strategy="jit_donate"))) and len(set(seen)) == 3
    assert seen[2] == float(jax.random.normal(jax.random.fold_in(key, 2)))
    with pytest.raises(ValueError, match=r"step_key needs a key to begin with: create\(..., key="):
        new_state().step_key()


def test_nothing_is_compiled_after_the_first_step(count_compilations, key):
    everything: dict[str, Any] = dict(
        ema=0.9, clip_norm=1.0, log_norms=True, skip_nonfinite=True, accumulate=2, precision="fp16"
    )
    weak = {"w": jnp.asarray([1.0, 2.0, 3.0]), "b": 1.0}
    resetting = managed.step(lambda state, batch: (None, state.replace(params={"w": state.params["w"], "b": 0.0})))
    for strategy in ("jit", "data_parallel_donate", "fsdp"):
        state = managed.ManagedState.create(weak, TX, strategy=strategy, key=key, **everything)
        _, state = masked_step(state, (BATCH, MASK))
        with count_compilations() as count:
            for _ in range(3):
                _, state = masked_step(state, (BATCH, MASK))
        assert count == [0], strategy
    _, state = resetting(new_state(), BATCH)
    with count_compilations() as count:
        resetting(state, BATCH)
    assert count == [0]


def test_a_step_does_not_wait_for_the_device():
    @jax.jit
    def slowly(x):
        for _ in range(2):
            x = x @ x
        return x[:12, :3]

    state = new_state()
    table = np.ones((2000, 2000), np.float32)
    train_step(state, {"x": slowly(table), "y": TARGETS})
    x = slowly(table)  # much longer than a step
    logged, state = train_step(state, {"x": x, "y": TARGETS})
    assert not logged.losses.loss.is_ready() and not state.params["w"].is_ready()
    assert float(logged.losses.loss) > 0


# What can be asked for


@pytest.mark.parametrize("mask", [MASK, np.arange(12) < 2, np.ones(12, bool)], ids=["some", "few", "all"])
def test_gradients_in_parts_are_those_of_the_whole_batch(mask):
    """With few rows there are parts without any, whose own loss is 0 / 0."""
    logged, state = masked_step(new_state(SGD), (BATCH, mask))
    parts, accumulated = masked_step(new_state(SGD, accumulate=4), (BATCH, mask))
    assert_trees_close(accumulated.params, state.params)
    assert_trees_close(parts, logged)
    by_hand = jax.grad(lambda params: masked_mean(errors_of(params, BATCH), mask))(new_params())
    np.testing.assert_allclose(accumulated.params["w"], new_params()["w"] - by_hand["w"], rtol=1e-5)


def test_gradients_in_parts_without_a_mask():
    logged, state = train_step(new_state(), BATCH)
    parts, accumulated = train_step(new_state(accumulate=3), BATCH)
    assert_trees_close((parts, accumulated.params), (logged, state.params))


def test_parts_can_be_weighted_by_something_else_than_rows():
    lengths = np.array([4, 1, 1, 2, 3, 0, 4, 1], np.int32)
    tokens = np.arange(4)[None] < lengths[:, None]
    batch = {"x": rng.normal(size=(8, 4)).astype(np.float32), "is_token": tokens}

    logged, state = per_token(new_state(), batch)
    for weight, close in ((lambda part: jnp.sum(part["is_token"]), True), (None, False)):
        parts, accumulated = per_token(new_state(accumulate=managed.Accumulate(4, weight)), batch)
        assert np.allclose(accumulated.params["w"], state.params["w"], rtol=1e-6) == close
        assert np.allclose(parts.losses.loss, logged.losses.loss, rtol=1e-6) == close


def test_a_weight_may_be_any_object_that_can_be_called():
    class Tokens(tuple):  # an empty one is no reason to count rows
        def __call__(self, part):
            return jnp.sum(part["is_token"])

    tokens = np.arange(4)[None] < np.array([4, 1, 1, 2], np.int32)[:, None]
    batch = {"x": rng.normal(size=(4, 4)).astype(np.float32), "is_token": tokens}
    found = [
        new_state(SGD, accumulate=managed.Accumulate(2, weight)) for weight in (Tokens(), lambda part: Tokens()(part))
    ]
    assert_trees_equal(*(per_token(state, batch)[1].params for state in found))


def test_each_part_sees_the_state_of_the_one_before_and_a_key_of_its_own(key):
    @dataclasses.dataclass(frozen=True)
    class Seen(managed.ManagedState):
        total: Any

    @managed.train_step
    def step(state, batch):
        new = state.replace(total=state.total + jnp.sum(batch["x"]))
        found = logs().add_loss("loss", jnp.sum(state.params["w"]))
        return found.add_stateful_metric("total", new.total).add_output("bits", state_bits(state, batch)), new

    def state_bits(state, batch):
        return jnp.full(len(batch["x"]), jax.random.bits(state.step_key()))

    logged, state = step(Seen.create(new_params(), TX, key=key, accumulate=3, total=0.0), BATCH)
    np.testing.assert_allclose(state.total, ROWS.sum(), rtol=1e-5)
    assert logged.stateful_metrics.total == state.total
    assert len(set(logged.outputs.bits.tolist())) == 3 and logged.outputs.bits[0] == logged.outputs.bits[3]
    assert state.key is not None
    assert jnp.array_equal(jax.random.key_data(state.key), jax.random.key_data(key))


def test_a_batch_that_does_not_divide_into_parts_is_refused():
    with pytest.raises(ValueError, match=r"train_step needs a batch whose rows divide into 5 microbatches. Got 12"):
        train_step(new_state(accumulate=5), BATCH)
    with pytest.raises(ValueError, match=r"train_step needs arrays with the same number of rows. Got:\n"):
        train_step(new_state(accumulate=2), {"x": ROWS, "y": TARGETS[:4]})
    with pytest.raises(ValueError, match=r"ManagedState.create needs accumulate to be an int of at least 1. Got 0"):
        new_state(accumulate=0)


def test_a_loader_gives_what_a_step_takes(key):
    loader = ms.DataLoader([ms.ArraySampleSource(BATCH, ordering="sequential"), ms.BatchTransform(8)])
    state, seen = new_state(accumulate=4), []
    for batch, mask in loader.iterate(loader.init_state(key)):
        logged, state = masked_step(state, (batch, mask))
        seen.append(float(logged.losses.loss))
    expected, state = [], new_state()
    for start in (0, 8):
        logged, state = train_step(state, jax.tree.map(lambda leaf: leaf[start : start + 8], BATCH))  # noqa: B023
        expected.append(float(logged.losses.loss))
    np.testing.assert_allclose(seen, expected, rtol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", managed.Precision(compute=jnp.bfloat16, output="float16")], ids=str)
def test_mixed_precision_computes_in_few_bits_and_keeps_many(precision):
    seen = []

    @managed.train_step
    def step(state, batch):
        seen.append((state.params["w"].dtype, batch["x"].dtype, batch["n"].dtype))
        return logs().add_loss("loss", jnp.mean(batch["x"] @ state.params["w"])).add_output("x", batch["x"]), state

    output = "float32" if precision == "bf16" else "float16"
    before = new_state(precision=precision)
    logged, state = step(before, {"x": ROWS, "n": np.arange(12, dtype=np.int32)})
    assert seen[0] == (jnp.bfloat16, jnp.bfloat16, jnp.int32)
    assert logged.losses.loss.dtype == logged.outputs.x.dtype == output
    assert state.params["w"].dtype == state.opt_state[0].trace["w"].dtype == jnp.float32
    expected = before.params["w"] - 0.1 * ROWS.mean(axis=0)
    np.testing.assert_allclose(state.params["w"], expected, rtol=1e-2)
    assert not np.array_equal(state.params["w"], state.params["w"].astype(jnp.bfloat16).astype(np.float32))


def test_a_step_without_gradients_computes_in_few_bits_too():
    dtypes = managed.step(lambda state, batch: {"x": state.params["w"] * batch})
    before = new_state(precision="fp16")
    logged, state = dtypes(before, np.ones(3, np.float32))
    assert logged.metrics.x.dtype == jnp.float32
    assert_trees_equal(state, before)
    changing = managed.step(
        lambda state, batch: (None, state.replace(params=jax.tree.map(lambda x: x * 2, state.params)))
    )
    np.testing.assert_array_equal(changing(new_state(), BATCH)[1].params["w"], before.params["w"] * 2)
    with pytest.raises(ValueError, match=r"must return the state with the parameters it was given, in mixed precision"):
        changing(before, BATCH)


def test_parameters_are_kept_in_the_dtype_asked_for():
    state = new_state(precision=managed.Precision(param="bfloat16", compute="bfloat16"), ema=0.5)
    _, state = managed.train_step(lambda s, batch: logs().add_loss("loss", jnp.sum(s.params["w"])))(state, BATCH)
    assert state.params["w"].dtype == state.opt_state[0].trace["w"].dtype == jnp.bfloat16
    assert state.ema_params["w"].dtype == jnp.float32


def overflowing(state, batch):
    return logs().add_loss("loss", jnp.sum(state.params["w"] * batch["scale"]))


def test_a_loss_scale_shrinks_when_gradients_overflow_and_grows_when_they_do_not():
    scale = managed.LossScale(2.0**10, growth_interval=2, limit=2.0**11)
    state = new_state(SGD, precision="fp16", loss_scale=scale)
    step, seen = managed.train_step(overflowing), []
    for size in (100.0, 100.0, *[10.0] * 6):  # 100 * 1024 is infinite in 16 bits, 100 * 512 is not
        before = state.params["w"]
        logged, state = step(state, {"scale": np.float32(size)})
        change = float((before - state.params["w"])[1])
        seen.append((float(logged.stateful_metrics.loss_scale), change, float(logged.metrics.skipped_updates)))
    assert seen == [
        (1024, 0, 1),  # left out, halved
        (512, 100, 0),
        (512, 10, 0),  # the second in a row: doubled
        (1024, 10, 0),
        (1024, 10, 0),  # the second since then
        (2048, 10, 0),
        (2048, 10, 0),  # at its limit
        (2048, 10, 0),
    ]
    assert int(state.step) == 8
    assert float(managed.LossScale(1.0).adjusted(jnp.asarray(False)).scale) == 1.0
    begins: Any = new_state(precision="fp16").loss_scale
    assert float(begins.scale) == 2**15 and new_state(precision="bf16").loss_scale is None


def test_updates_that_are_not_finite_are_left_out_whole():
    @dataclasses.dataclass(frozen=True)
    class Statistics(managed.ManagedState):
        mean: Any

    @managed.train_step
    def step(state, batch):
        return overflowing(state, batch), state.replace(mean=state.mean + batch["scale"])

    options: dict[str, Any] = dict(ema=0.5, skip_nonfinite=True, key=jax.random.PRNGKey(1), mean=0.0)
    before = Statistics.create(new_params(), TX, **options)
    logged, state = step(before, {"scale": np.float32("nan")})
    assert logged.metrics.skipped_updates == 1 and int(state.step) == 1
    assert_trees_equal(state.replace(step=before.step), before)
    logged, state = step(state, {"scale": np.float32(1)})
    assert logged.metrics.skipped_updates == 0 and int(state.step) == 2 and state.mean == 1
    gone = new_state(skip_nonfinite=True)
    assert_trees_equal(gone.apply_gradients(jax.tree.map(lambda leaf: leaf * np.inf, gone.params)).params, gone.params)


def test_gradients_are_clipped_by_their_norm_and_norms_are_logged():
    steep = managed.train_step(lambda state, batch: logs().add_loss("loss", jnp.sum(state.params["w"]) * batch))
    before = new_state(SGD, clip_norm=0.5, log_norms=True)
    logged, state = steep(before, np.float32(4))
    np.testing.assert_allclose(state.params["w"], before.params["w"] - 0.5 / np.sqrt(3), rtol=1e-6)
    np.testing.assert_allclose(logged.metrics.grad_norm, 4 * np.sqrt(3), rtol=1e-6)
    np.testing.assert_allclose(logged.metrics.update_norm, 0.5, rtol=1e-6)
    np.testing.assert_allclose(logged.metrics.param_norm, optax.tree.norm(state.params), rtol=1e-6)
    logged, state = steep(before, np.float32(0.1))
    np.testing.assert_allclose(state.params["w"], before.params["w"] - 0.1, rtol=1e-6)
    assert "metrics" not in train_step(new_state(), BATCH)[0]


def test_the_average_of_the_parameters_follows_them():
    state = new_state(ema=0.75)
    average = state.params["w"]
    for _ in range(3):
        _, state = train_step(state, BATCH)
        average = 0.75 * average + 0.25 * state.params["w"]
    np.testing.assert_allclose(state.ema_params["w"], average, rtol=1e-6)
    assert new_state().ema_params is None


# The state


def test_a_state_is_a_pytree_of_its_fields(key):
    @dataclasses.dataclass(frozen=True)
    class Model(managed.ManagedState):
        statistics: Any
        depth: int = dataclasses.field(default=2, metadata={"static": True})

    state = Model.create(new_params(), TX, statistics={"mean": np.zeros(2)}, apply_fn=len, key=key)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    assert paths[:2] == [".params['b']", ".params['w']"] and ".statistics['mean']" in paths and len(paths) == 7
    other = jax.tree.map(lambda leaf: leaf, state)
    assert type(other) is Model and other.depth == 2 and other.apply_fn is len and other.tx is TX
    deeper = state.replace(depth=3)
    assert (deeper.depth, state.depth) == (3, 2) and jax.tree.structure(deeper) != jax.tree.structure(state)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.step = 3  # pyright: ignore
    with pytest.raises(TypeError, match=r"Model.replace knows no field 'param'. There are: params, opt_state, step"):
        state.replace(param=1)


def test_fields_of_a_subclass_are_checked():
    @dataclasses.dataclass(frozen=True)
    class Model(managed.ManagedState):
        statistics: Any
        depth: int = dataclasses.field(default=2, metadata={"static": True})

    class Forgotten(managed.ManagedState):
        statistics: Any

    create = functools.partial(Model.create, new_params(), TX)
    with pytest.raises(TypeError, match=r"takes these fields of its own: depth, statistics. statistics missing"):
        create()
    with pytest.raises(TypeError, match=r"takes these fields of its own: depth, statistics. Got statistic\."):
        create(statistic=0, statistics=0)
    with pytest.raises(
        TypeError, match=r"Got:\n  statistics\['fn'\]: <built-in function len>.*\nAnything else belongs"
    ):
        create(statistics={"fn": len})
    with pytest.raises(TypeError, match=r"Forgotten has fields of its own \(statistics\), and so must be a dataclass"):
        Forgotten.create(new_params(), TX, statistics=0)


def test_wrong_arguments_are_refused_at_once():
    create = managed.ManagedState.create
    with pytest.raises(TypeError, match=r"needs params to be floats.* Got:\n  params\['n'\]: shape \(\), int32"):
        create({"w": jnp.ones(2), "n": 3}, TX)
    with pytest.raises(ValueError, match=r"ManagedState.create needs params with at least one array of floats"):
        create({}, TX)
    with pytest.raises(TypeError, match=r"needs tx to be an optimizer with init and update.* Got 0.1 \(float\)"):
        create(new_params(), 0.1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match=r"no strategy 'pmap' \(str\). There are: 'eager', 'jit', 'jit_donate', 'data_p"
    ):
        new_state(strategy="pmap")
    for clip_norm in (0, -1.0, float("nan"), float("inf"), True):
        with pytest.raises(ValueError, match=r"needs clip_norm to be a finite number above 0. Got"):
            new_state(clip_norm=clip_norm)
    for ema in (1, -0.1, float("nan"), "0.9"):
        with pytest.raises(ValueError, match=r"needs ema, .* to be from 0 to below 1, such as 0.999. Got"):
            new_state(ema=ema)
    with pytest.raises(TypeError, match=r"ManagedState.create needs a key such as jax.random.key\(0\). Got 0 \(int\)"):
        new_state(key=0)
    with pytest.raises(TypeError, match=r"needs log_norms to be a bool. Got 'grad'"):
        new_state(log_norms="grad")
    with pytest.raises(ValueError, match=r"to be a managed.Precision, 'fp32', 'bf16' or 'fp16'. Got 'f8'"):
        new_state(precision="f8")
    with pytest.raises(TypeError, match=r"Precision needs compute to be a dtype of floats. Got 'int8'"):
        managed.Precision(compute="int8")
    with pytest.raises(TypeError, match=r"needs loss_scale to be a managed.LossScale. Got 1024 \(int\)"):
        new_state(loss_scale=1024)
    with pytest.raises(ValueError, match=r"needs loss_scale.factor to be more than 1. Got 1"):
        new_state(loss_scale=managed.LossScale(factor=1))


def test_wrong_functions_are_refused_when_they_are_decorated():
    with pytest.raises(TypeError, match=r"managed.train_step decorates .* <lambda> takes \(state\). Bind other"):
        managed.train_step(lambda state: None)
    with pytest.raises(TypeError, match=r"managed.step decorates a function of .* takes \(state, batch, \*, rate\)"):
        managed.step(lambda state, batch, *, rate: None)
    with pytest.raises(TypeError, match=r"managed.step decorates a function of .* Got 'jit'"):
        managed.step("jit")  # pyright: ignore


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (lambda w: logs().add_metric("loss", w[0]), "at least one loss .* It logged: metrics. A step that minimises"),
        (lambda w: logs(), "at least one loss .* It logged: nothing."),
        (
            lambda w: logs().add_loss("l", w),
            r"every loss to be one finite float.* Got:\n  losses.l: shape \(3,\), float32",
        ),
        (lambda w: logs().add_loss("l", jnp.ones((), int)), r".*one finite float.*\n  losses.l: shape \(\), int32"),
        (lambda w: logs().add_loss("l", float("nan")), r".*one finite float.*\n  losses.l: nan \(float\)"),
    ],
    ids=["a metric", "nothing", "rows", "an int", "a constant that is not finite"],
)
def test_losses_that_cannot_be_minimised_are_refused(output, words):
    @managed.train_step
    def bad_step(state, batch):
        return output(state.params["w"]), state

    with pytest.raises(ValueError, match=f"(?s)bad_step needs {words}"):
        bad_step(new_state(), BATCH)


def test_a_train_step_leaves_parameters_to_their_gradients():
    @managed.train_step
    def meddling(state, batch):
        found = logs().add_loss("loss", jnp.sum(state.params["w"]))
        return found, state.replace(params={**state.params, "w": state.params["w"] * 2})

    with pytest.raises(ValueError, match=r"meddling must return the state with the parameters it was given, because a"):
        meddling(new_state(), BATCH)


def test_something_else_than_a_managed_state_is_refused():
    with pytest.raises(TypeError, match=r"train_step is a managed step and needs a ManagedState.* Got 3 \(int\)"):
        train_step(3, BATCH)  # pyright: ignore[reportArgumentType]


# Strategies

STRATEGIES = ["eager", "jit_donate", "data_parallel", "data-parallel", "data-parallel-donate", "fsdp", "fsdp_donate"]


def losses_of(strategy, steps=3):
    state, seen = new_state(strategy=strategy), []
    for _ in range(steps):
        logged, state = train_step(state, BATCH)
        seen.append(float(logged.losses.loss))
    return seen


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_gives_the_same_losses(strategy):
    found, expected = losses_of(strategy), losses_of("jit")
    if strategy == "eager":  # what is compiled operation by operation may be rounded otherwise
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    else:
        assert found == expected


def test_an_eager_step_can_be_looked_into():
    seen = []

    @managed.step
    def looking(state, batch):
        seen.append(float(state.params["w"][2]))
        return {}

    looking(new_state(strategy="eager"), BATCH)
    assert seen == [0.5]


def test_one_step_runs_states_of_different_strategies_in_turn():
    calls = []

    @dataclasses.dataclass(frozen=True)
    class Named(managed.Jit):
        name: str = ""

        def compile(self, traced):
            run = super().compile(traced)
            return lambda *arguments: calls.append(self.name) or run(*arguments)

    count = managed.step(lambda state, batch: {"rows": len(batch["x"])})
    for name in "abbab":  # equal strategies that are not the same object run alike
        count(new_state(strategy=Named(name=name)), BATCH)
    assert calls == list("abbab")


def test_a_batch_of_numpy_is_checked_after_batches_of_jax():
    total = managed.step(lambda state, batch: {"total": batch["n"].sum()})
    state, wide = new_state(), np.array([2**40, 1])
    total(state, {"n": jnp.arange(2)})
    assert int(total(state, {"n": np.array([3, 4])})[0].metrics.total) == 7
    with pytest.raises(ValueError, match=str(2**40)):
        total(state, {"n": wide})
    with pytest.raises(ValueError, match=str(2**40)):
        total(state, {"m": jnp.arange(2), "n": wide})


def test_strategies_can_be_added():
    calls = []

    @dataclasses.dataclass(frozen=True)
    class Counted(managed.Jit):
        def compile(self, traced):
            run = super().compile(traced)
            return lambda *arguments: calls.append(traced.__name__) or run(*arguments)

    managed.register_strategy("counted-jit", Counted())
    assert losses_of("counted_jit") == losses_of("jit") and calls == ["train_step"] * 3
    assert managed.get_strategy("data-parallel") == managed.DataParallel()
    with pytest.raises(ValueError, match=r"register_strategy has a strategy 'counted_jit' already: "):
        managed.register_strategy("counted_jit", managed.Jit())
    with pytest.raises(
        TypeError, match=r"register_strategy needs a name and a managed.Strategy. Got 'x' \(str\) and 'jit'"
    ):
        managed.register_strategy("x", "jit")  # pyright: ignore
    with pytest.raises(ValueError, match=r"FSDP needs min_size to be an int of at least 0. Got -1"):
        managed.FSDP(min_size=-1)


@pytest.mark.parametrize("strategy", ["jit_donate", "data_parallel_donate"])
def test_a_donating_strategy_takes_the_old_state_and_nothing_else(strategy, key):
    @dataclasses.dataclass(frozen=True)
    class Twice(managed.ManagedState):
        again: Any

    @managed.train_step
    def step(state, batch):
        found = logs().add_loss("loss", jnp.mean(errors_of(state.params, batch)))
        return found.add_metric("step", state.step).add_output("b", state.params["b"]), state

    shared, host = jnp.ones(3), np.ones(3, np.float32)
    params, batch = {"w": shared, "b": jnp.ones(())}, jax.device_put(BATCH, jax.devices()[0])
    keeping = optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, state))
    state = first = Twice.create(params, keeping, key=key, again=(shared, shared, host), strategy=strategy, ema=0.5)
    rows = []
    for _ in range(3):
        logged, state = step(state, batch)
        rows.append(logged)
    assert first.params["w"].is_deleted() and first.ema_params["w"].is_deleted()
    with pytest.raises(RuntimeError, match=r"step was given a state whose memory an earlier step has taken over"):
        step(first, batch)
    state = state.replace(again=(state.params["w"], shared, host))  # shared once more
    logged, state = step(state, batch)
    logged, state = step(state, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, batch, shared, key, rows, logged)))
    assert [int(row.metrics.step) for row in rows] == [0, 1, 2] and (host == 1).all() and (shared == 1).all()


# Several devices, several processes


def told_by(*processes):
    """What each process told in its last line."""
    return [json.loads(output.splitlines()[-1]) for output in finish(*processes)]


def check_against_one_device(told):
    """Sums over devices are added up in a different order, so equal to a few units of the last place."""
    expected, _ = managed_script.train(managed_script.new_state("jit"), managed_script.batches())
    for name, found in told.items():
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=name)


def test_strategies_on_eight_devices():
    (told,) = told_by(start_script(SCRIPT, 8))
    assert len(told) == 5
    check_against_one_device(told)


def test_strategies_in_two_processes():
    address = free_address()
    first, second = told_by(start_script(SCRIPT, 4, address, "0"), start_script(SCRIPT, 4, address, "1"))
    assert first == second and len(first) == 3
    check_against_one_device(first)


def test_a_run_whose_strategy_donates_is_tested_in_between():
    @managed.step
    def test(state, batch):
        return ms.logs().add_metric("loss", jnp.mean((batch["x"] @ state.params["w"] - batch["y"]) ** 2))

    for strategy in ("jit_donate", "data_parallel_donate"):
        tasks = {ms.on_train_step: train_step, ms.on_test_step: test}
        output = ms.train_loop(new_state(strategy=strategy), [BATCH] * 4, tasks, test_dataset=[BATCH], epoch_duration=2)
        assert len(output.history.collect("loss_test")) == 2


def test_a_state_that_begins_to_donate_owns_its_arrays():
    first = new_state()
    for strategy in (managed.get_strategy("jit_donate"), "jit_donate"):
        train_step(first.replace(strategy=strategy), BATCH)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    with pytest.raises(ValueError, match="knows no strategy 'pmap'"):
        first.replace(strategy="pmap")


def test_params_that_jax_has_no_arrays_for_are_refused():
    with pytest.raises(
        TypeError, match=r"needs arrays and numbers in params\. Got:\n  params\['w'\]: shape \(1,\), <U1"
    ):
        managed.ManagedState.create({"w": np.array(["a"])}, TX)
