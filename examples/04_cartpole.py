"""Policy gradient on CartPole: 32 environments roll out and learn inside one compiled function.

An epoch is 500 steps of every environment. The rollout is a batch like any other, so acting and learning are one
jitted function of (loader, its state, parameters); the new parameters go back in with `set_policy_state`.

Run: pip install '.[train,rl]', then python examples/04_cartpole.py [--epochs 100]
"""

import argparse
import time

import gymnax
import jax
import jax.numpy as jnp
import optax

import millstream as ms
from millstream.rl import GymnaxSource

ENVS, STEPS, HIDDEN, GAMMA = 32, 500, 32, 0.99
OPTIMIZER = optax.adam(1e-2)


def init(key):
    keys = jax.random.split(key, 2)
    return {
        "in": jax.random.normal(keys[0], (4, HIDDEN)) / 2,
        "bias": jnp.zeros(HIDDEN),
        "out": jax.random.normal(keys[1], (HIDDEN, 3)) / 100,
    }


def network(params, obs):
    """Logits of the two actions, and the value of the state."""
    out = jnp.tanh(obs @ params["in"] + params["bias"]) @ params["out"]
    return out[..., :2], out[..., 2]


def policy(obs, params, key):
    return jax.random.categorical(key, network(params, obs)[0])


def returns_to_go(batch, values_after):
    """Discounted rewards to the end of the episode; where it was cut short, the value of what came next stands in."""
    beyond = jnp.where(batch["truncated"], values_after, 0.0)

    def step(later, now):
        reward, done, beyond = now
        total = reward + GAMMA * jnp.where(done, beyond, later)
        return total, total

    zeros = jnp.zeros(ENVS)
    return jax.lax.scan(step, zeros, (batch["reward"], batch["done"], beyond), reverse=True)[1] / 100


def loss_fn(params, batch):
    logits, values = network(params, batch["state"])
    returns = returns_to_go(batch, jax.lax.stop_gradient(100 * network(params, batch["next_state"])[1]))
    advantage = jax.lax.stop_gradient(returns - values)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["action"][..., None], axis=-1)[..., 0]
    return jnp.mean((values - returns) ** 2) - jnp.mean(chosen * advantage)


@jax.jit
def train_epoch(loader, state, params, opt_state):
    state = loader.set_policy_state(state, params)
    batch, state, _ = loader.next_batch(state)  # every leaf: (STEPS, ENVS, ...)
    updates, opt_state = OPTIMIZER.update(jax.grad(loss_fn)(params, batch), opt_state)
    mean_return = batch["reward"].sum() / batch["done"].sum()
    return state, optax.apply_updates(params, updates), opt_state, mean_return


def main(epochs):
    env, env_params = gymnax.make("CartPole-v1")
    params = init(jax.random.key(0))
    source = GymnaxSource(env, env_params, policy_fn=policy, policy_params=params, steps_per_epoch=STEPS, num_envs=ENVS)
    loader = ms.DataLoader([source, ms.BatchTransform(STEPS)])
    state, opt_state = loader.init_state(jax.random.key(1)), OPTIMIZER.init(params)

    begun, shown = time.perf_counter(), max(1, epochs // 10)
    print(f"CartPole, {ENVS} environments, {epochs} epochs of {ENVS * STEPS:,} transitions")
    for epoch in range(1, epochs + 1):
        state, params, opt_state, mean_return = train_epoch(loader, state, params, opt_state)
        if epoch % shown == 0:
            print(f"  epoch {epoch:4d}   mean return {mean_return:6.1f}   {time.perf_counter() - begun:5.1f} s")
    print(f"mean return {mean_return:.1f} of at most {STEPS}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=100)
    main(parser.parse_args().epochs)
