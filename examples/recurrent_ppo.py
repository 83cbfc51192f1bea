"""Solve a task that needs memory with PPO and a GRU. A policy without memory cannot solve it.

    python examples/recurrent_ppo.py

An agent walks through a corridor of 4 to 10 steps and sees a sign, −1 or 1, on its first step.
At the end it must turn to that side: the reward is 1 if it does, and −1 if not. The feed-forward
policy is the same network, but its state is reset at every step, so on average it earns nothing.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax import nnx

from jax_models import GRU, ops

ENVS, STEPS, EPOCHS, DISCOUNT, GAE_LAMBDA, CLIP = 128, 32, 4, 0.99, 0.95, 0.2


def new_episodes(keys):
    """Returns the sign, the steps left, and whether the next observation is an episode's first."""
    signs = jax.random.rademacher(keys[0], (ENVS,), float)
    return signs, jax.random.randint(keys[1], (ENVS,), 3, 10), jnp.ones(ENVS, bool)


def env_step(keys, env, action):
    """Returns the environments after an action (0: turn to −1, 1: to 1), rewards and ends."""
    sign, left, _ = env
    done, walked = left == 0, (sign, left - 1, jnp.zeros(ENVS, bool))
    env = jax.tree.map(lambda new, old: jnp.where(done, new, old), new_episodes(keys), walked)
    return env, done * sign * (2 * action - 1), done


class Policy(nnx.Module):
    def __init__(self, *, memory: bool, rngs: nnx.Rngs):
        self.memory = memory
        self.gru = GRU(2, 32, time_major=True, rngs=rngs)  # time comes first, as in `lax.scan`
        self.head = nnx.Linear(32, 3, rngs=rngs)  # logits of the two actions, and the value

    def act(self, carry, keys):
        (sign, left, first), state = carry
        x, reset = jnp.stack([first * sign, left == 0], axis=-1), first | (not self.memory)
        y, state = self.gru.step(x, state, reset=reset)
        out = self.head(y)
        action = jax.random.categorical(keys[0], out[:, :2])
        env, reward, done = env_step(keys[1:], carry[0], action)
        return (env, state), (x, reset, action, out, reward, done)


@nnx.jit
def train_step(policy: Policy, optimizer: nnx.Optimizer, start, keys):
    """Acts for STEPS steps and learns from them. Returns where to continue, and the mean reward."""
    end, (x, reset, action, old, reward, done) = jax.lax.scan(policy.act, start, keys)
    value, after = old[..., 2], policy.act(end, keys[0])[1][3][None, :, 2]  # after the last step
    # The advantage A_t = δ_t + γλ A_{t+1} is a linear recurrence that runs backward in time.
    discount = DISCOUNT * (1.0 - done)
    delta = reward + discount * jnp.concatenate([value[1:], after]) - value
    (advantage,), _ = ops.linear_recurrence(GAE_LAMBDA * discount[None], delta[None], reverse=True)

    def loss_fn(policy):
        new = policy.head(policy.gru(x, start[1], reset=reset)[0])  # all steps in one call
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        ratio = jnp.exp(cross_entropy(old[..., :2], action) - cross_entropy(new[..., :2], action))
        scaled = advantage / (advantage.std() + 1e-6)
        gain = jnp.minimum(ratio * scaled, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * scaled)
        return jnp.mean((new[..., 2] - value - advantage) ** 2) - jnp.mean(gain)

    for _ in range(EPOCHS):
        optimizer.update(policy, nnx.grad(loss_fn)(policy))
    return end, reward.sum() / done.sum()


def main(iterations: int = 150):
    for name in ("GRU", "feed-forward"):
        policy, rewards = Policy(memory=name == "GRU", rngs=nnx.Rngs(0)), []
        optimizer = nnx.Optimizer(policy, optax.adam(3e-3), wrt=nnx.Param)
        start = new_episodes(jax.random.split(jax.random.key(1))), policy.gru.init_state(ENVS)
        for keys in jax.random.split(jax.random.key(0), (iterations, STEPS, 3)):
            start, reward = train_step(policy, optimizer, start, keys)
            rewards.append(float(reward))
        print(f"{name}: mean reward {rewards[0]:.2f} at first, {rewards[-1]:.2f} at the end")
        plt.plot(rewards, label=name)
    plt.gca().set(xlabel="iteration", ylabel="mean reward of an episode")
    plt.legend()
    plt.savefig("recurrent_ppo.png")


if __name__ == "__main__":
    main()
