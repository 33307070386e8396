"""Managed steps on several devices or in several processes. Run by test_managed.py; tells losses in a line of JSON."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import millstream as ms
from millstream import managed
from millstream.loops.log_entries import logs
from millstream.sharding import as_batch_sharding, make_ddp_mesh_config, rows_by_process

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

STEPS, ROWS = 4, 32
TX = optax.sgd(0.1, momentum=0.9)  # one for all: a program is compiled for its optimizer


def new_params():
    rng = np.random.default_rng(5)
    return {
        "hidden": rng.normal(size=(16, 64)).astype(np.float32) / 4,
        "out": rng.normal(size=64).astype(np.float32) / 8,
    }


def batches():
    rng = np.random.default_rng(6)
    for _ in range(STEPS):
        x = rng.normal(size=(ROWS, 16)).astype(np.float32)
        yield {"x": x, "y": x.sum(axis=1)}, np.arange(ROWS) < 27


def loss_of(params, batch, mask):
    """The mean over the real rows."""
    predicted = jnp.tanh(batch["x"] @ params["hidden"]) @ params["out"]
    real = mask.astype(predicted.dtype)
    return jnp.sum(jnp.square(predicted - batch["y"]) * real) / jnp.sum(real)


@managed.train_step
def train_step(state, batch):
    return logs().add_loss("loss", loss_of(state.params, *batch)), state


@managed.step
def words_of_key(state, batch):
    return logs().add_metric("words", jax.random.key_data(state.step_key())), state


def new_state(strategy, **options):
    return managed.ManagedState.create(new_params(), TX, strategy=strategy, key=jax.random.key(3), **options)


def train(state, data):
    found = []
    for batch in data:
        logged, state = train_step(state, batch)
        found.append(float(logged.losses.loss))
    return found, state


def check_everything_on_eight_devices():
    runs = {name: train(new_state(name), batches()) for name in ("data-parallel", "data_parallel_donate")}
    runs["fsdp"] = train(new_state("fsdp", ema=0.9), batches())
    runs["fsdp-donate"] = train(new_state(managed.FSDP(small_mesh(), donate=True, min_size=1)), batches())
    runs["accumulated"] = train(new_state("data_parallel", accumulate=4), batches())
    check_where_states_lie(runs)
    check_batches_that_lie_on_all_devices_are_used_as_they_are(runs["data-parallel"][0])
    check_a_sharded_loader()
    check_a_batch_that_cannot_be_divided_is_refused()
    check_donation()
    check_the_key_of_a_step()
    print(json.dumps({name: losses for name, (losses, _) in runs.items()}))


def small_mesh():
    return jax.make_mesh((2, 4), ("data", "model"))


def check_where_states_lie(runs):
    copied, spread, small = (runs[name][1] for name in ("data-parallel", "fsdp", "fsdp-donate"))
    assert all(leaf.is_fully_replicated and len(leaf.devices()) == 8 for leaf in jax.tree.leaves(copied))
    for tree in (spread.params, spread.ema_params, spread.opt_state[0].trace, new_state("fsdp").params):
        assert tree["hidden"].sharding.spec == P(None, "model")
        assert tree["hidden"].addressable_shards[0].data.shape == (16, 8)
        assert tree["out"].is_fully_replicated and len(tree["out"].devices()) == 8  # smaller than min_size
    assert small.params["out"].sharding.spec == P("model")
    assert small.params["out"].addressable_shards[0].data.shape == (16,)
    assert small.strategy.batch_sharding.spec == P(("data", "model"))
    half = managed.DataParallel(jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",)))
    assert len(new_state(half).step.devices()) == 4


def check_batches_that_lie_on_all_devices_are_used_as_they_are(expected):
    rows = jax.sharding.Mesh(np.array(jax.devices()), ("rows",))
    for mesh, axis in ((rows, "rows"), (jax.make_mesh((8,), ("data",)), "data")):  # the second has explicit axes
        lying = [jax.device_put(batch, NamedSharding(mesh, P(axis))) for batch in batches()]
        assert train(new_state("data_parallel"), lying)[0] == expected
    on_one_device = [jax.tree.map(jnp.asarray, batch) for batch in batches()]
    assert train(new_state("data_parallel"), on_one_device)[0] == expected


def check_a_sharded_loader():
    rows, _ = next(batches())
    loader = ms.DataLoader([ms.ArraySampleSource(rows), ms.BatchTransform(ROWS)], sharding=make_ddp_mesh_config())
    stream = loader.iterate(loader.init_state(jax.random.key(0)), steps=2)
    found, state = train(new_state("data_parallel"), stream)
    assert len(found) == 2 and found[1] < found[0] and int(state.step) == 2


def check_a_batch_that_cannot_be_divided_is_refused():
    batch, mask = next(batches())
    wrong = jax.tree.map(lambda leaf: leaf[:12], (batch, mask))
    with pytest.raises(ValueError, match=r"A data-parallel step .* divides by 8, .* Got 12\. Take 8 or 16\."):
        train_step(new_state("data_parallel"), wrong)
    with pytest.raises(ValueError, match=r"needs arrays with the same number of rows. Got:\n"):
        train_step(new_state("data_parallel"), (batch, mask[:8]))


def check_donation():
    batch = jax.device_put(next(batches()), as_batch_sharding(make_ddp_mesh_config()))
    state = new_state("data_parallel_donate")
    _, after = train_step(state, batch)
    assert state.params["out"].is_deleted() and not batch[0]["x"].is_deleted()
    with pytest.raises(RuntimeError, match="train_step was given a state whose memory an earlier step has taken over"):
        train_step(state, batch)
    params = after.params
    train_step(after.replace(params=params), batch)
    assert not params["out"].is_deleted()


def check_the_key_of_a_step():
    for name in ("data_parallel", "fsdp"):
        logged, _ = words_of_key(new_state(name), ())
        expected = jax.random.key_data(jax.random.fold_in(jax.random.key(3), 0))
        assert np.asarray(logged.metrics.words).tolist() == expected.tolist()


def check_two_processes(process):
    losses = {}
    mine = rows_by_process(as_batch_sharding(make_ddp_mesh_config()), ROWS)[process]  # with FSDP it has the same
    local = [jax.tree.map(lambda leaf: leaf[mine], batch) for batch in batches()]
    for name in ("data_parallel", "fsdp"):
        losses[name], state = train(new_state(name), local)
        assert len(state.params["hidden"].sharding.device_set) == 8
    assert state.opt_state[0].trace["hidden"].addressable_shards[0].data.shape == (16, 16)
    losses["accumulated"], state = train(new_state("data_parallel", accumulate=4, ema=0.5), local)
    assert state.ema_params["hidden"].is_fully_replicated
    with pytest.raises(ValueError, match=r"A data-parallel step .* divides by 4, .* Got 6 rows. Take 4 or 8."):
        train_step(new_state("data_parallel"), jax.tree.map(lambda leaf: leaf[:6], local[0]))
    check_a_sharded_loader()
    check_the_key_of_a_step()
    print(json.dumps(losses))


if __name__ == "__main__":
    if sys.argv[1:]:
        number = int(sys.argv[2])
        jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=number)
        check_two_processes(number)
        jax.distributed.shutdown()
    else:
        check_everything_on_eight_devices()
