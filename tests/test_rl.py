"""Environments as streams: transitions, episodes, policies, many environments at once."""

import dataclasses
import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

if importlib.util.find_spec("gymnax") is None:
    pytest.skip("gymnax is not installed", allow_module_level=True)

from conftest import assert_trees_equal
from gymnax.environments import environment
from gymnax.environments.classic_control.cartpole import CartPole
from gymnax.wrappers.purerl import FlattenObservationWrapper
from test_bad_input import refuses

import millstream as ms
from millstream.rl import GymnaxSource, get_policy_state, set_loader_policy_state, set_source_policy_state
from millstream.transforms.buffer import BufferTransform

pytestmark = pytest.mark.optimized

LIMIT, EPOCH = 5, 12


class Corridor(environment.Environment):
    """Walk from a random place; at 100 it ends. Everything in whole numbers, so that runs compare bit by bit."""

    def reset_env(self, key, params):
        place = jax.random.randint(key, (1, 1), 0, 90)
        return place, {"place": place, "time": jnp.int32(0)}

    def step_env(self, key, state, action, params):
        place = state["place"] + action
        after = {"place": place, "time": state["time"] + 1}
        return place, after, jnp.asarray(action, jnp.float32), place[0, 0] >= 100, {"noise": jax.random.bits(key)}

    def is_truncated(self, state, params):
        return state["time"] >= params


def walk(obs, policy_state, new_episode, key):
    """Remembers how many steps the episode has; steps by one of `params`."""
    age = jnp.where(new_episode, 0, policy_state["age"] + 1)
    step = jax.random.choice(key, policy_state["params"])
    return step, {"params": policy_state["params"], "age": age}


TEMPLATE = {"params": jnp.array([1, 2, 10]), "age": jnp.int32(-7)}
ENV = Corridor()


@functools.cache
def corridor(num_envs=1, batch=None, wrapper=lambda env: env):
    source = GymnaxSource(wrapper(ENV), jnp.int32(LIMIT), walk, TEMPLATE, EPOCH, num_envs)
    return ms.DataLoader([source] if batch is None else [source, ms.BatchTransform(batch)])


def collect(carry, batch, mask):
    return carry, batch


def epoch(loader, state):
    state, _, batch = loader.scan_epoch(state, (), collect)
    return state, jax.device_get(batch)


@pytest.mark.parametrize(
    "loader", [corridor(1), corridor(3), corridor(3, wrapper=FlattenObservationWrapper)], ids=["one", "many", "wrapped"]
)
def test_transitions_follow_each_other_and_say_how_an_episode_ends(loader, key):
    state, ends = loader.init_state(key), set()
    for number in range(4):
        assert int(state.epoch) == number
        state, batch = epoch(loader, state)
        assert int(state.step) == 0
        for env in range(batch["done"].size // EPOCH):
            row = jax.tree.map(lambda leaf, env=env: leaf.reshape(EPOCH, -1)[:, env], batch)
            time = 0
            for i in range(EPOCH):
                time += 1
                place = int(row["next_state"][i])
                assert place == row["state"][i] + row["action"][i]
                terminated, last = place >= 100, i == EPOCH - 1
                assert row["done"][i] == (terminated or time == LIMIT or last)
                assert row["truncated"][i] == (not terminated and (time == LIMIT or last))
                ends.add((terminated, time == LIMIT, last))
                if row["done"][i]:
                    time = 0
                else:
                    assert row["state"][i + 1] == place
    assert {(True, False, False), (False, True, False), (False, False, True)} <= ends


def test_the_policy_is_told_of_new_episodes(key):
    loader = corridor(3)
    state, ages = loader.init_state(key), []
    assert get_policy_state(state)["age"].tolist() == [-7, -7, -7]
    done = np.ones(3, bool)
    for _ in range(EPOCH + 3):
        batch, state, mask = loader.next_batch(state)
        ages.append(get_policy_state(state)["age"])
        expected = np.where(done, 0, np.asarray(ages[-2]) + 1 if len(ages) > 1 else 0)
        np.testing.assert_array_equal(ages[-1], expected)
        done = np.asarray(batch["done"])
        assert mask.tolist() == [True] * 3


def test_what_differs_between_environments_is_held_for_each(key):
    state = corridor(3).init_state(key)
    assert jax.tree.map(jnp.shape, get_policy_state(state)) == {"params": (3,), "age": (3,)}
    assert state.per_env == (True, False)  # age, params

    def policy(obs, state, new_episode, key):
        one = state["one"] + 1
        return one, {"one": one, "two": state["three"] * 1, "three": state["three"] + obs[0, 0], "four": state["four"]}

    template = {name: jnp.int32(0) for name in ("one", "two", "three", "four")}
    source = GymnaxSource(ENV, jnp.int32(LIMIT), jax.jit(policy), template, num_envs=2)
    shapes = jax.tree.map(jnp.shape, source.init_state(key).policy_state)
    assert shapes == {"one": (), "two": (2,), "three": (2,), "four": ()}


def test_many_environments_run_as_single_ones_from_their_part_of_the_state(key):
    loader = corridor(3)
    state = loader.init_state(key)
    _, together = epoch(loader, epoch(loader, state)[0])
    single = corridor().init_state(key)
    for env in range(3):
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(single), strict=True)
        part = [many if many.shape == one.shape else many[env] for many, one in pairs]
        part = jax.tree.unflatten(jax.tree.structure(single), part)
        _, alone = epoch(corridor(), epoch(corridor(), part)[0])
        assert_trees_equal(jax.tree.map(lambda leaf, env=env: leaf[:, env], together), alone)


def test_a_stream_goes_on_exactly_from_the_middle_of_an_episode(key):
    env = CartPole()
    source = GymnaxSource(env, env.default_params, sample_action, {"params": jnp.zeros((4, 2))}, 300)
    loader = ms.DataLoader([source])
    state = loader.init_state(key)
    for _ in range(7):
        _, state, _ = loader.next_batch(state)
    assert not state.new_episode
    saved = jax.device_get(state)

    def step(state, _):
        batch, state, _ = loader.next_batch(state)
        return state, batch

    thousand_steps = jax.jit(lambda state: jax.lax.scan(step, state, length=1000))
    after, seen = thousand_steps(state)
    assert_trees_equal(thousand_steps(saved), (after, seen))
    assert seen["done"].sum() > 20
    stepped, _, _ = loader.next_batch(saved)
    np.testing.assert_allclose(stepped["next_state"], seen["next_state"][0], rtol=1e-6)


def sample_action(obs, policy_state, new_episode, key):
    return jax.random.categorical(key, obs @ policy_state["params"]), policy_state


def test_the_example_of_the_first_readme_runs_and_the_policy_decides():
    env = CartPole()
    policy_state = {"params": jnp.zeros((4, 2)), "recurrent_state": jnp.zeros((3,))}
    source = GymnaxSource(
        env=env,
        env_params=env.default_params,
        policy_step_fn=sample_action,
        policy_state_template=policy_state,
        steps_per_epoch=16,
    )
    loader = ms.DataLoader([source, ms.BatchTransform(batch_size=16, drop_last=True)])
    state = loader.init_state(jax.random.PRNGKey(0))
    state = set_loader_policy_state(state, policy_state)
    for batch, mask in loader.iterate(state):
        assert set(batch) == {"state", "action", "reward", "next_state", "done", "truncated", "info"}
        assert batch["state"].shape == (16, 4)
        assert mask.all() and batch["done"][-1]
        policy_state.update({"params": jnp.ones((4, 2))})
        state = set_loader_policy_state(state, policy_state)
    np.testing.assert_array_equal(get_policy_state(state)["params"], np.ones((4, 2)))

    left = {**policy_state, "params": jnp.array([[0.0, 0.0]] * 4).at[:, 0].set(jnp.array([0.0, 0.0, -1e6, 0.0]))}
    batch, _, _ = loader.next_batch(loader.set_policy_state(loader.init_state(jax.random.key(1)), left))
    np.testing.assert_array_equal(batch["action"], batch["state"][:, 2] > 0)  # follows the sign of the angle


def test_a_running_iterator_takes_a_new_policy_up_at_its_next_batch(key):
    loader = corridor(3, 4)
    batches = loader.iterate(loader.init_state(key), steps=5)
    seen = []
    for batch, _ in batches:
        seen.append(set(np.asarray(batch["action"]).reshape(-1).tolist()))
        now = get_policy_state(batches.state)
        batches.set_policy_state({**now, "params": jnp.full(3, len(seen))})
        np.testing.assert_array_equal(get_policy_state(batches.state)["age"], now["age"])
    assert len(seen[0]) > 1
    assert seen[1:] == [{1}, {2}, {3}, {4}]


def test_new_episode_can_be_said_from_outside(key):
    source = GymnaxSource(ENV, jnp.int32(LIMIT), walk, TEMPLATE, EPOCH)
    _, _, state = source.next(source.init_state(key))
    assert not state.new_episode
    assert bool(source.set_policy_state(state, TEMPLATE, new_episode=True).new_episode)
    assert not source.set_policy_state(state, TEMPLATE).new_episode
    many = set_loader_policy_state(corridor(3, 4).init_state(key), TEMPLATE, new_episode=False)
    assert many.inner.new_episode.tolist() == [False] * 3


def test_a_policy_without_memory(key):
    def policy(obs, params, key):
        return params["step"]

    source = GymnaxSource(ENV, jnp.int32(LIMIT), policy_fn=policy, policy_params={"step": jnp.int32(3)})
    value, mask, state = source.next(source.init_state(key))
    assert (int(value["action"]), bool(mask)) == (3, True)
    value, _, _ = source.next(set_source_policy_state(state, {"step": 4}))
    assert int(value["action"]) == 4


def test_wrapped_environments_keep_their_wrapping(key):
    source = GymnaxSource(FlattenObservationWrapper(ENV), jnp.int32(LIMIT), walk, TEMPLATE, EPOCH)
    spec = source.element_spec()
    assert spec["state"].shape == spec["next_state"].shape == (1,)
    assert set(spec["info"]) == {"noise"}


def test_transitions_of_many_environments_fill_a_buffer(key):
    source = GymnaxSource(ENV, jnp.int32(LIMIT), walk, TEMPLATE, EPOCH, num_envs=3)
    loader = ms.DataLoader([source, BufferTransform(30, 6, 4, mode="uniform", by_row=True)])
    state, batch = epoch(loader, loader.init_state(key))
    assert batch["state"].shape == (EPOCH, 4, 1, 1)
    assert int(state.count) == 30
    set_loader_policy_state(state, TEMPLATE)
    np.testing.assert_array_equal(batch["next_state"][3:, :, 0, 0], batch["state"][3:, :, 0, 0] + batch["action"][3:])


def test_a_policy_state_that_does_not_fit_is_refused(key):
    state = corridor(3).init_state(key)
    with refuses(
        ValueError,
        "set_loader_policy_state got a policy state that does not fit",
        "policy_state['params']: shape (3,), int32 expected, shape (2,), int32 found",
        "policy_state['age']: shape (3,), int32 expected, none found",
        "policy_state['more']: none expected, shape (), float32 found",
        "policy_state_template",
    ):
        set_loader_policy_state(state, {"params": jnp.zeros(2, jnp.int32), "more": 0.0})
    with refuses(ValueError, "set_policy_state got", "policy_state['age']: shape (3,), int32 expected, shape ()"):
        corridor(3).set_policy_state(state, {**TEMPLATE, "age": 0.0})
    with refuses(TypeError, "made of arrays", "policy_state['age']: 'old' (str)"):
        set_loader_policy_state(state, {**TEMPLATE, "age": "old"})
    with refuses(ValueError, "one acting source, such as GymnaxSource", "Got LoaderState with 0 of them"):
        set_loader_policy_state(ms.DataLoader([ms.ArraySampleSource(np.arange(3))]).init_state(key), TEMPLATE)
    with refuses(ValueError, "set_policy_state got a state of a different pipeline"):
        corridor(3).set_policy_state(corridor(3, 4).init_state(key), TEMPLATE)


def test_bad_arguments():
    with refuses(TypeError, "needs an environment with `reset` and `step`", "Got 'CartPole-v1' (str)"):
        GymnaxSource("CartPole-v1", None, walk, TEMPLATE)
    with refuses(TypeError, "needs an environment with `reset` and `step`", "Corridor"):
        GymnaxSource(Corridor, None, walk, TEMPLATE)
    with refuses(ValueError, "give policy_step_fn or policy_fn, and not both"):
        GymnaxSource(ENV, None)
    with refuses(ValueError, "takes policy_params with policy_fn"):
        GymnaxSource(ENV, None, walk, policy_params=TEMPLATE)
    with refuses(ValueError, "policy_state_template with policy_step_fn"):
        GymnaxSource(ENV, None, policy_state_template=TEMPLATE, policy_fn=walk)  # pyright: ignore[reportArgumentType]
    with refuses(TypeError, "GymnaxSource needs policy_step_fn to be a function", "3 (int)"):
        GymnaxSource(ENV, None, 3)  # pyright: ignore[reportArgumentType]
    with refuses(TypeError, "GymnaxSource needs a policy state made of arrays", "policy_state_template['f']"):
        GymnaxSource(ENV, None, walk, {"f": walk})
    with refuses(TypeError, "GymnaxSource needs a policy state made of arrays", "policy_params[1]: 'a' (str)"):
        GymnaxSource(ENV, None, policy_fn=walk, policy_params=(1, "a"))  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "GymnaxSource needs num_envs to be an int of at least 1"):
        GymnaxSource(ENV, None, walk, TEMPLATE, num_envs=0)
    with refuses(ValueError, "GymnaxSource needs steps_per_epoch to be an int of at least 1"):
        GymnaxSource(ENV, None, walk, TEMPLATE, 0)


def test_policies_and_environments_that_return_something_else():
    def forgets(obs, policy_state, new_episode, key):
        return jnp.int32(1)

    def grows(obs, policy_state, new_episode, key):
        return jnp.int32(1), jnp.stack([policy_state, policy_state])

    class Short(Corridor):
        def step(self, key, state, action, params=None):  # pyright: ignore[reportIncompatibleVariableOverride]
            return self.step_env(key, state, action, params)[:4]

    class Silent(Corridor):
        def step(self, key, state, action, params=None):  # pyright: ignore[reportIncompatibleVariableOverride]
            return *self.step_env(key, state, action, params)[:4], None

    with refuses(TypeError, "policy_step_fn to return (action, policy_state). forgets returned"):
        ms.DataLoader([GymnaxSource(ENV, 5, forgets, jnp.int32(0))])
    with refuses(ValueError, "grows returned a different one", "policy_state: shape (), int32 expected, shape (2,)"):
        ms.DataLoader([GymnaxSource(ENV, 5, grows, jnp.int32(0))])
    with refuses(TypeError, "(obs, state, reward, done, info), with info a dict", "Short returned 4 values"):
        ms.DataLoader([GymnaxSource(Short(), 5, walk, TEMPLATE)])
    with refuses(TypeError, "(obs, state, reward, done, info), with info a dict", "returned None (NoneType) as info"):
        ms.DataLoader([GymnaxSource(Silent(), 5, walk, TEMPLATE)])


class Counter:
    """Written by hand, with five or six values: counts actions up to 3, or to its time limit."""

    def __init__(self, values, resets_itself=False):
        self.values, self.resets_itself = values, resets_itself

    def reset(self, key, params):
        return jnp.zeros(1, jnp.int32), (jnp.int32(0), jnp.int32(0))

    def step(self, key, state, action, params):
        count, time = state[0] + action, state[1] + 1
        terminated, truncated, obs, state = count >= 3, time >= params, count[None], (count, time)
        if self.resets_itself:
            fresh = self.reset(key, params)
            obs, state = jax.tree.map(lambda old, new: jnp.where(terminated | truncated, new, old), (obs, state), fresh)
        if self.values == 5:
            return obs, state, action, terminated | truncated, {"truncated": truncated}
        return obs, state, action, terminated, truncated, {}


def stay_or_go(obs, params, key):
    return jax.random.randint(key, (), 0, 2)


@pytest.mark.parametrize(
    ("values", "resets_itself", "num_envs"), [(5, False, 1), (5, False, 3), (5, True, 3), (6, False, 1), (6, True, 3)]
)
def test_environments_written_by_hand_are_reset_where_an_episode_ends(key, values, resets_itself, num_envs):
    env = Counter(values, resets_itself)
    source = GymnaxSource(env, 4, policy_fn=stay_or_go, policy_params=(), steps_per_epoch=30, num_envs=num_envs)
    loader = ms.DataLoader([source])
    _, batch = epoch(loader, loader.init_state(key))
    assert set(batch["info"]) == ({"truncated"} if values == 5 else set())
    ends = set()
    for env in range(num_envs):
        row = jax.tree.map(lambda leaf, env=env: leaf.reshape(30, num_envs)[:, env], batch)
        count, time = 0, 0
        for i in range(30):
            assert row["state"][i] == count
            count, time = count + int(row["action"][i]), time + 1
            terminated, cut, last = count >= 3, time >= 4, i == 29
            assert row["done"][i] == (terminated or cut or last)
            # Five values do not say how an episode ended: every end but that of the epoch counts as terminated.
            told = (last and not (terminated or cut)) if values == 5 else (cut or last) and not terminated
            assert row["truncated"][i] == told
            at_reset = resets_itself and (terminated or cut)
            assert row["next_state"][i] == (0 if at_reset else count)
            ends.add((terminated, cut))
            if row["done"][i]:
                count, time = 0, 0
    assert {(True, False), (False, True)} <= ends


def test_a_gymnax_environment_without_a_time_limit_of_its_own_ends_where_its_step_says(key):
    """As before 1.0: `step_env` is True at the time limit, too, and there is no `is_truncated`."""

    class Old:
        reset = Counter.reset

        def step(self, *_):
            raise AssertionError("it would reset every environment at every step")

        step.__module__ = "gymnax.environments.environment"

        def step_env(self, key, state, action, params):
            return Counter(5).step(key, state, action, params)

    loader = ms.DataLoader([GymnaxSource(Old(), 4, policy_fn=stay_or_go, policy_params=(), steps_per_epoch=30)])
    _, batch = epoch(loader, loader.init_state(key))
    assert batch["done"].sum() > 5 and batch["truncated"].sum() <= 1
    np.testing.assert_array_equal(batch["next_state"][:, 0], batch["state"][:, 0] + batch["action"])


@pytest.mark.parametrize("wrong", [np.array(["a"]), 2**40, object()], ids=["text", "long", "object"])
def test_a_policy_state_that_jax_has_no_arrays_for_is_refused(wrong, key):
    with refuses(TypeError, "set_loader_policy_state needs a policy state made of arrays. Got policy_state: "):
        set_loader_policy_state(corridor().init_state(key), wrong)


def test_new_episode_of_a_wrong_shape_or_kind_is_refused(key):
    state = corridor(3).init_state(key)
    with refuses(
        ValueError,
        "set_policy_state needs new_episode to be one bool, or one for each environment, shape (3,)",
        "shape (2,), bool",
    ):
        corridor(3).set_policy_state(state, TEMPLATE, new_episode=[True, False])
    with refuses(ValueError, "set_loader_policy_state needs new_episode to be one bool. Got 'now' (str)"):
        set_loader_policy_state(corridor().init_state(key), TEMPLATE, new_episode="now")  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "needs new_episode to be one bool. Got shape (), int32: 1 (int)"):
        set_loader_policy_state(corridor().init_state(key), TEMPLATE, new_episode=1)
    with refuses(ValueError, "needs new_episode to be one bool. Got 1099511627776 (int)"):
        set_loader_policy_state(corridor().init_state(key), TEMPLATE, new_episode=2**40)


def step_of_params(obs, params, key):
    return params["step"]


@functools.cache
def walks(num_envs=3, stages=()):
    params = {"step": jnp.int32(50)}
    source = GymnaxSource(
        ENV, jnp.int32(LIMIT), None, None, EPOCH, num_envs, policy_fn=step_of_params, policy_params=params
    )
    return ms.DataLoader([source, ms.BatchTransform(4), *stages])


@functools.partial(jax.jit, donate_argnums=0)
def count_up(state, batch):
    actions = batch[0]["action"]
    params = {"step": state["policy"]["step"] + 1}
    logs = ms.logs().add_metric("least", actions.min()).add_metric("most", actions.max())
    return logs, {"policy": params, "sum": state["sum"] + batch[0]["next_state"].sum()}


def fresh(first=0):
    return {"policy": {"step": jnp.int32(first)}, "sum": jnp.int32(0)}


def policy_of(state):
    return state["policy"]


@pytest.mark.parametrize("fuse", [None, 4])
def test_every_batch_of_a_loop_is_made_with_the_policy_of_the_state_before_it(key, fuse, folder):
    def run(**options):
        return ms.train_loop(fresh(), walks(), {ms.on_train_step: count_up}, key=key, policy=policy_of, **options)

    output, expected = run(stop=9, fuse=fuse), run(stop=9)
    assert output.history.collect("least") == output.history.collect("most") == list(range(9))
    assert_trees_equal(output.state, expected.state)
    saving = {"callbacks": [ms.checkpoint(folder)], "resume": True}
    first = run(stop=5, fuse=fuse, **saving)
    assert int(get_policy_state(first.data_state)["step"]) == 4  # of the last batch; the next is made with 5
    rest = run(stop=9, fuse=fuse, **saving)
    assert_trees_equal(rest.state, expected.state)
    assert rest.history.collect("least") == list(range(9))
    by_hand = ms.train_loop(
        first.state,
        walks(),
        {ms.on_train_step: count_up},
        stop=9,
        policy=policy_of,
        data_state=first.data_state,
        elapsed=first.elapsed,
    )
    assert_trees_equal(by_hand.state, expected.state)


def test_a_fixed_policy_is_asked_for_by_name(key):
    with refuses(
        ValueError,
        "train_loop over an environment needs policy=",
        "policy=lambda state: state.params",
        'policy="fixed"',
    ):
        ms.train_loop(fresh(), walks(), {ms.on_train_step: count_up}, stop=3, key=key)
    with refuses(ValueError, "loop over an environment needs policy="):
        ms.loop(fresh(), walks(), {ms.every(1): count_up}, stop=3, key=key)
    with refuses(ValueError, "loop over an environment needs policy="):
        ms.loop(fresh(), walks().iterate(walks().init_state(key)), {ms.every(1): count_up})
    output = ms.train_loop(fresh(), walks(), {ms.on_train_step: count_up}, stop=3, key=key, policy="fixed")
    assert output.history.collect("least", "most") == ([50] * 3, [50] * 3)
    batches = walks().iterate(walks().init_state(key), steps=3)
    output = ms.loop(fresh(), batches, {ms.every(1): count_up}, policy=policy_of)
    assert output.history.collect("least", "most") == ([0, 1, 2], [0, 1, 2])


def test_a_test_over_an_environment_acts_with_the_policy_of_the_state(key):
    def test_step(state, batch):
        return ms.logs().add_metric("action", batch[0]["action"].max())

    tasks = {ms.on_test_step: test_step}
    options = {"key": key, "stop": 2}
    assert ms.test_loop(fresh(7), walks(), tasks, policy=policy_of, **options).history.collect("action") == [7, 7]
    assert ms.test_loop(fresh(7), walks(), tasks, policy="fixed", **options).history.collect("action") == [50, 50]
    with refuses(ValueError, "test_loop over an environment needs policy="):
        ms.test_loop(fresh(7), walks(), tasks, **options)

    data = ms.DataLoader([ms.ArraySampleSource({"x": np.arange(4)}), ms.BatchTransform(2)])
    learn = {ms.on_train_step: lambda state, batch: {**state, "policy": {"step": state["policy"]["step"] + 1}}, **tasks}
    learnt = {"test_dataset": walks(), "test_duration": 1, "stop": 4, "key": key}
    output = ms.train_loop(fresh(), data, learn, policy=policy_of, **learnt)
    assert output.history.collect("action_test") == [2, 4]
    with refuses(ValueError, "train_loop over an environment needs policy="):
        ms.train_loop(fresh(), data, learn, **learnt)
    with refuses(
        ValueError, "train_loop takes policy= for data that come from an environment", "DataLoader has no policy"
    ):
        ms.train_loop(fresh(), data, {ms.on_train_step: learn[ms.on_train_step]}, policy=policy_of, stop=2, key=key)
    with refuses(TypeError, 'needs policy to be a function of the state, or "fixed". Got 3 (int)'):
        ms.train_loop(fresh(), walks(), {ms.on_train_step: count_up}, policy=3, stop=2, key=key)  # pyright: ignore


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_policy_with_a_memory_keeps_it_from_batch_to_batch(key, num_envs):
    loader = corridor(num_envs, 4)

    def step(state, batch):
        return state + 1

    def policy(state, policy_state):
        return {**policy_state, "params": jnp.full(3, state)}

    outputs = [
        ms.loop(jnp.int32(0), loader, {ms.every(1): jax.jit(step)}, stop=5, key=key, policy=policy, fuse=fuse)
        for fuse in (None, 3)
    ]
    state = loader.init_state(key)
    for number in range(5):
        now = {**get_policy_state(state), "params": jnp.full(3, number)}
        _, state, _ = loader.next_batch(loader.set_policy_state(state, now))
    for output in outputs:
        assert_trees_equal(output.data_state, state)
    with refuses(
        ValueError, "this policy has a memory of its own, policy_state['age']", "policy=lambda state, policy_state:"
    ):
        ms.loop(jnp.int32(0), loader, {ms.every(1): step}, stop=5, key=key, policy=lambda state: TEMPLATE)


@pytest.mark.parametrize("fuse", [None, 2])
def test_a_policy_that_does_not_fit_is_refused_by_the_loop(key, fuse):
    for policy, words in (
        (lambda state: state["sum"], ["a policy state that does not fit this source", "int32 expected, none found"]),
        (lambda state: policy_of, ["loop: policy= needs a policy state made of arrays", "policy_of"]),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            ms.loop(fresh(), walks(), {ms.every(1): count_up}, stop=4, key=key, policy=policy, fuse=fuse)
        for word in words:
            assert word in str(caught.value)


RATE, HORIZON = 0.02, 200
OPTIMIZER = optax.adam(RATE)


@dataclasses.dataclass(frozen=True)
class Halved(ms.Transform):
    """Every second transition counts."""

    def apply(self, value, mask, key):
        return value, mask & (jnp.arange(mask.size) % 2 == 0).reshape(mask.shape)


def test_samples_that_the_next_policies_decide_about_are_not_counted_ahead(key):
    loader = walks(stages=(Halved(),))
    options = {"key": key, "policy": policy_of, "fuse": 2}
    output = ms.train_loop(fresh(), loader, {ms.on_train_step: count_up}, stop=4, **options)
    assert output.elapsed.samples == 4 * 6
    with refuses(ValueError, "train_loop with fuse=2 cannot count samples ahead", "in steps or epochs"):
        ms.train_loop(fresh(), loader, {ms.on_train_step: count_up}, stop=ms.at(samples=12), **options)


def logits(params, obs):
    return jnp.tanh(obs @ params["in"]) @ params["out"]


def sample(obs, params, key):
    return jax.random.categorical(key, logits(params, obs))


@functools.partial(jax.jit, donate_argnums=0)
@jax.numpy_dtype_promotion("standard")  # which optax counts on
def policy_gradient(state, batch):
    batch, _ = batch

    def to_go(later, now):
        total = now[0] + 0.99 * jnp.where(now[1], 0.0, later)
        return total, total

    returns = jax.lax.scan(to_go, jnp.zeros(16), (batch["reward"], batch["done"]), reverse=True)[1]
    advantage = (returns - returns.mean()) / returns.std()

    def loss(params):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits(params, batch["state"])), batch["action"][..., None], -1)
        return -jnp.mean(chosen[..., 0] * advantage)

    updates, opt_state = OPTIMIZER.update(jax.grad(loss)(state["policy"]), state["opt_state"])
    logs = ms.logs().add_metric("mean_return", batch["reward"].sum() / jnp.sum(batch["done"], dtype=jnp.float32))
    return logs, {"policy": optax.apply_updates(state["policy"], updates), "opt_state": opt_state}


def test_cartpole_is_learnt_in_the_loop_and_resumed_exactly_after_a_crash(folder):
    def new_state():
        params = {"in": jax.random.normal(jax.random.key(0), (4, 16)) / 2, "out": jnp.zeros((16, 2))}
        return {"policy": params, "opt_state": OPTIMIZER.init(params)}

    env, template = CartPole(), new_state()["policy"]
    source = GymnaxSource(
        env, env.default_params, policy_fn=sample, policy_params=template, steps_per_epoch=HORIZON, num_envs=16
    )
    loader = ms.DataLoader([source, ms.BatchTransform(HORIZON)])

    def run(*tasks, **options):
        return ms.train_loop(
            new_state(),
            loader,
            [(ms.on_train_step, policy_gradient), *tasks],
            stop=30,
            key=jax.random.key(1),
            policy=policy_of,
            **options,
        )

    def crash():
        raise MemoryError

    whole = run()
    returns = whole.history.collect("mean_return")
    assert returns[0] < 30 and min(returns[-5:]) > 100
    saving = {"callbacks": [ms.checkpoint(folder)], "resume": True}
    with pytest.raises(MemoryError):
        run((ms.at(17), crash), **saving)
    resumed = run(**saving)
    assert_trees_equal(resumed.state, whole.state)
    assert_trees_equal(resumed.data_state, whole.data_state)
    assert resumed.history.collect("mean_return") == returns


# Recorded data beside an environment


OFFLINE = 20


def transitions():
    """The rows of a corridor as recorded data: each with a number of its own."""
    spec = corridor(2).element_spec()
    leaves = jax.tree.map(lambda leaf: np.zeros((OFFLINE, *leaf.shape[1:]), leaf.dtype), spec)
    return {**leaves, "reward": 1000 + np.arange(OFFLINE, dtype=np.float32)}


def combined(stages=(), **options):
    online = [GymnaxSource(ENV, jnp.int32(LIMIT), walk, TEMPLATE, EPOCH, 2), BufferTransform(30, 6, 4, by_row=True)]
    offline = [ms.ArraySampleSource(transitions()), ms.BatchTransform(3, pad_last_batch=False)]
    return ms.DataLoader([ms.rl.combine({"online": online, "offline": offline}), *stages], **options)


def test_recorded_data_and_an_environment_come_in_one_batch(key):
    loader = combined()
    batches = [jax.device_get(batch) for batch, mask in loader.iterate(loader.init_state(key), steps=2 * OFFLINE)]
    assert {len(batch["reward"]) for batch in batches} == {7}
    assert all((batch["reward"][:4] < 1000).all() for batch in batches)
    recorded = np.concatenate([batch["reward"][4:] for batch in batches]) - 1000
    for epoch in range(3 * len(batches) // OFFLINE):
        assert sorted(recorded[epoch * OFFLINE : (epoch + 1) * OFFLINE].tolist()) == list(range(OFFLINE))
    alone = ms.DataLoader([combined().pipeline.parts[0]])
    state = alone.init_state(combined().init_state(key)[0].key)
    assert_trees_equal(jax.device_get(next(alone.iterate(state))[0]), jax.tree.map(lambda leaf: leaf[:4], batches[0]))


@jax.jit
def learn(state, batch):
    rows, mask = batch
    total = state["total"] * 0.5 + jnp.sum(jnp.where(mask, rows["reward"], 0))
    return ms.logs().add_metric("total", total), {"total": total, "params": state["params"] + 1}


@pytest.mark.parametrize("fuse", [None, 3])
def test_a_run_over_both_resumes_exactly(fuse, key, tmp_path):
    start = {"total": jnp.float32(0), "params": jnp.array([1, 2, 10])}
    acts = {"policy": lambda state, policy: {**policy, "params": state["params"]}}
    options = {"key": key, **acts, **({} if fuse is None else {"fuse": fuse})}

    def run(stop, **more):
        tasks = [(ms.every(1), learn), *([(ms.every(2), ms.checkpoint(tmp_path))] if more else [])]
        return ms.loop(start, combined(), tasks, stop=stop, **options, **more)

    expected = run(9)
    run(5, resume=tmp_path)
    output = run(9, resume=tmp_path)
    assert_trees_equal(output.state, expected.state)
    assert output.history.to_dict()["total"] == expected.history.to_dict()["total"]


def test_parts_that_cannot_be_combined_are_refused_by_name():
    combine: Any = ms.rl.combine
    rows = [ms.ArraySampleSource({"x": np.arange(4)}), ms.BatchTransform(2)]
    other = [ms.ArraySampleSource({"x": np.arange(4.0)}), ms.BatchTransform(2)]
    with refuses(ValueError, "rows are alike", "batch.x: shape (), int32 in 'a', shape (), float32 in 'b'"):
        combine({"a": rows, "b": other})
    with refuses(ValueError, "combine needs 'a' to give batches", "Add a BatchTransform"):
        combine({"a": rows[:1]})
    with refuses(ValueError, "combine needs at least one part"):
        combine({})
    with refuses(TypeError, "combine needs parts to be a dict of pipelines"):
        combine([rows, other])
    with refuses(TypeError, "combine needs 'a' to be a list of stages. Got 'x'"):
        combine({"a": "x"})
