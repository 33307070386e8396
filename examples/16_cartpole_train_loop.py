"""Policy gradient on CartPole in `train_loop`: the policy that acts is the one that learns, and the run can be killed.

`policy=` says which part of the state acts. A step is one rollout of 32 environments and one update.

Run: pip install '.[train,rl]', then python examples/16_cartpole_train_loop.py [--epochs 60]
With --folder run it saves itself there, and continues when it is started again.
"""

import argparse

import gymnax
import jax
import jax.numpy as jnp
import optax

import millstream as ms

ENVS, STEPS, HIDDEN, GAMMA = 32, 200, 32, 0.99


def network(params, obs):
    return jnp.tanh(obs @ params["in"]) @ params["out"]


def policy(obs, params, key):
    return jax.random.categorical(key, network(params, obs))


def returns_to_go(batch):
    """Discounted rewards to the end of each episode."""

    def step(later, now):
        reward, done = now
        total = reward + GAMMA * jnp.where(done, 0.0, later)
        return total, total

    return jax.lax.scan(step, jnp.zeros(ENVS), (batch["reward"], batch["done"]), reverse=True)[1]


@ms.managed.train_step
def train_step(state, batch):
    rollout, _ = batch  # every leaf: (STEPS, ENVS, ...)
    returns = returns_to_go(rollout)
    advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
    scores = jax.nn.log_softmax(network(state.params, rollout["state"]))
    chosen = jnp.take_along_axis(scores, rollout["action"][..., None], axis=-1)[..., 0]
    logs = ms.logs().add_loss("loss", -jnp.mean(chosen * advantage))
    return logs.add_metric("mean_return", rollout["reward"].sum() / rollout["done"].sum())


def show(state, batch, elapsed, loop_state):
    print(f"  epoch {elapsed.epochs:4d}   mean return {loop_state.logs.metrics.mean_return:6.1f}")


def main(epochs, folder):
    env, env_params = gymnax.make("CartPole-v1")
    params = {"in": jax.random.normal(jax.random.key(0), (4, HIDDEN)) / 2, "out": jnp.zeros((HIDDEN, 2))}
    source = ms.rl.GymnaxSource(
        env, env_params, policy_fn=policy, policy_params=params, steps_per_epoch=STEPS, num_envs=ENVS
    )
    print(f"CartPole, {ENVS} environments, {epochs} epochs of {ENVS * STEPS:,} transitions")
    output = ms.train_loop(
        ms.managed.ManagedState.create(params, optax.adam(2e-2), strategy="jit_donate"),
        ms.DataLoader([source, ms.BatchTransform(STEPS)]),
        {ms.on_train_step: train_step, ms.every(epochs=max(1, epochs // 10)): show},
        policy=lambda state: state.params,
        stop=ms.at(epochs=epochs),
        key=jax.random.key(1),
        callbacks=[] if folder is None else [ms.checkpoint(folder)],
        resume=folder,
    )
    print(f"mean return {output.history.collect('mean_return')[-1]:.1f} of at most {STEPS}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.folder)
