"""Environments as streams: transitions, episodes, policies, many environments at once."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
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
from millstream.transforms import BufferTransform

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
        "policy_state['params']: shape (2,), int32; expected shape (3,), int32",
        "policy_state['age']: missing; expected shape (3,), int32",
        "policy_state['more']: shape (), float32; expected nothing",
        "policy_state_template",
    ):
        set_loader_policy_state(state, {"params": jnp.zeros(2, jnp.int32), "more": 0.0})
    with refuses(ValueError, "set_policy_state got", "policy_state['age']: shape (), float32; expected"):
        corridor(3).set_policy_state(state, {**TEMPLATE, "age": 0.0})
    with refuses(TypeError, "made of arrays", "policy_state['age']: 'old' (str)"):
        set_loader_policy_state(state, {**TEMPLATE, "age": "old"})
    with refuses(ValueError, "one acting source, such as GymnaxSource", "Got LoaderState with 0 of them"):
        set_loader_policy_state(ms.DataLoader([ms.ArraySampleSource(np.arange(3))]).init_state(key), TEMPLATE)
    with refuses(ValueError, "set_policy_state got a state of another pipeline"):
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
    with refuses(TypeError, "GymnaxSource needs a policy state made of arrays", "policy_state['f']"):
        GymnaxSource(ENV, None, walk, {"f": walk})
    with refuses(ValueError, "GymnaxSource needs num_envs to be an int of at least 1"):
        GymnaxSource(ENV, None, walk, TEMPLATE, num_envs=0)
    with refuses(ValueError, "GymnaxSource needs steps_per_epoch to be an int of at least 1"):
        GymnaxSource(ENV, None, walk, TEMPLATE, 0)


def test_policies_and_environments_that_return_something_else():
    def forgets(obs, policy_state, new_episode, key):
        return jnp.int32(1)

    def grows(obs, policy_state, new_episode, key):
        return jnp.int32(1), jnp.stack([policy_state, policy_state])

    class Old(Corridor):
        def step(self, key, state, action, params=None):  # pyright: ignore[reportIncompatibleVariableOverride]
            return self.step_env(key, state, action, params)

    with refuses(TypeError, "policy_step_fn to return (action, policy_state). forgets returned"):
        ms.DataLoader([GymnaxSource(ENV, 5, forgets, jnp.int32(0))])
    with refuses(ValueError, "grows returned another", "policy_state: shape (2,), int32; expected shape (), int32"):
        ms.DataLoader([GymnaxSource(ENV, 5, grows, jnp.int32(0))])
    with refuses(TypeError, "gymnax 1.0 or later", "Old returned 5 values"):
        ms.DataLoader([GymnaxSource(Old(), 5, walk, TEMPLATE)])
