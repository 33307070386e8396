"""CartPole without velocities: a policy that has to remember, and learns through time.

The policy sees only the cart's place and the pole's angle. Its recurrent carry lives in the policy state: one row per
environment, started again where `new_episode` says so. Learning runs the same step over the whole rollout.

Run: pip install '.[train,rl]', then python examples/05_cartpole_recurrent.py [--epochs 200]
"""

import argparse
import time

import gymnax
import jax
import jax.numpy as jnp
import optax

import millstream as ms
from millstream.rl import GymnaxSource, get_policy_state

ENVS, STEPS, HIDDEN, GAMMA = 32, 500, 32, 0.99
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3))


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "in": jax.random.normal(keys[0], (2, 3 * HIDDEN)),
        "carry": jax.random.normal(keys[1], (HIDDEN, 3 * HIDDEN)) / HIDDEN**0.5,
        "out": jax.random.normal(keys[2], (HIDDEN, 3)) / 100,
    }


def network(params, carry, obs, new_episode):
    """One step of a gated recurrent unit: the new carry, the logits of the two actions and the value."""
    carry = jnp.where(new_episode[..., None], 0.0, carry)
    seen = obs[..., jnp.array([0, 2])] * jnp.array([1.0, 10.0])
    gates = seen @ params["in"], carry @ params["carry"]
    (reset, update, new), (own_reset, own_update, own_new) = (jnp.split(gate, 3, axis=-1) for gate in gates)
    update = jax.nn.sigmoid(update + own_update)
    new = jnp.tanh(new + jax.nn.sigmoid(reset + own_reset) * own_new)
    carry = (1 - update) * new + update * carry
    out = carry @ params["out"]
    return carry, out[..., :2], out[..., 2]


def policy_step(obs, policy_state, new_episode, key):
    carry, logits, _ = network(policy_state["params"], policy_state["carry"], obs, new_episode)
    return jax.random.categorical(key, logits), {**policy_state, "carry": carry}


def loss_fn(params, batch):
    """The same network over the rollout; every epoch starts new episodes, so the first carry does not matter."""
    new_episode = jnp.concatenate([jnp.ones((1, ENVS), bool), batch["done"][:-1]])

    def step(carry, now):
        carry, logits, value = network(params, carry, *now)
        return carry, (logits, value)

    _, (logits, values) = jax.lax.scan(step, jnp.zeros((ENVS, HIDDEN)), (batch["state"], new_episode))
    # Where an episode was cut short, the value just before the cut stands for the one just after.
    beyond = jnp.where(batch["truncated"], 100 * jax.lax.stop_gradient(values), 0.0)

    def discount(later, now):
        reward, done, beyond = now
        total = reward + GAMMA * jnp.where(done, beyond, later)
        return total, total

    rewards = (batch["reward"], batch["done"], beyond)
    returns = jax.lax.scan(discount, jnp.zeros(ENVS), rewards, reverse=True)[1] / 100
    advantage = jax.lax.stop_gradient(returns - values)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["action"][..., None], axis=-1)[..., 0]
    return jnp.mean((values - returns) ** 2) - jnp.mean(chosen * advantage)


@jax.jit
def train_epoch(loader, state, params, opt_state):
    state = loader.set_policy_state(state, {**get_policy_state(state), "params": params})
    batch, state, _ = loader.next_batch(state)  # every leaf: (STEPS, ENVS, ...)
    updates, opt_state = OPTIMIZER.update(jax.grad(loss_fn)(params, batch), opt_state)
    mean_return = batch["reward"].sum() / batch["done"].sum()
    return state, optax.apply_updates(params, updates), opt_state, mean_return


def main(epochs):
    env, env_params = gymnax.make("CartPole-v1")
    params = init(jax.random.key(0))
    template = {"params": params, "carry": jnp.zeros(HIDDEN)}
    source = GymnaxSource(env, env_params, policy_step, template, steps_per_epoch=STEPS, num_envs=ENVS)
    loader = ms.DataLoader([source, ms.BatchTransform(STEPS)])
    state, opt_state = loader.init_state(jax.random.key(1)), OPTIMIZER.init(params)

    begun, shown = time.perf_counter(), max(1, epochs // 10)
    print(f"CartPole without velocities, {ENVS} environments, {epochs} epochs of {ENVS * STEPS:,} transitions")
    for epoch in range(1, epochs + 1):
        state, params, opt_state, mean_return = train_epoch(loader, state, params, opt_state)
        if epoch % shown == 0:
            print(f"  epoch {epoch:4d}   mean return {mean_return:6.1f}   {time.perf_counter() - begun:5.1f} s")
    print(f"mean return {mean_return:.1f} of at most {STEPS}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=200)
    main(parser.parse_args().epochs)
