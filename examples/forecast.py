"""Forecast time series with an RG-LRU, the linear recurrence of Griffin and Hawk.

    python examples/forecast.py

Each series is a daily plus a weekly cycle of random strengths and phases, with noise of 0.1, like
the hourly demand for electricity. After each hour, the model predicts the next 48 hours from all
hours that it has read. After five days it has to know both cycles, although it has not seen a whole
week. The forecast of one series is drawn in forecast.png.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
import tyro
from flax import nnx

from jax_models import RGLRU

HOURS, AHEAD, PERIODS, NOISE = 120, 48, (24, 168), 0.1
WINDOWS = jnp.arange(HOURS)[:, None] + 1 + jnp.arange(AHEAD)  # the hours to predict, (HOURS, AHEAD)


def make_series(key, batch_size: int):
    """Returns series (batch, HOURS + AHEAD)."""
    strength_key, phase_key, noise_key = jax.random.split(key, 3)
    phases = jax.random.uniform(phase_key, (2, batch_size, 1), maxval=2 * jnp.pi)
    strengths = jax.random.uniform(strength_key, (2, batch_size, 1), minval=0.5, maxval=1.5)
    periods = jnp.array(PERIODS).reshape(2, 1, 1)
    waves = strengths * jnp.sin(2 * jnp.pi * jnp.arange(HOURS + AHEAD) / periods + phases)
    return waves.sum(axis=0) + NOISE * jax.random.normal(noise_key, waves.shape[1:])


class Forecaster(nnx.Module):
    """Maps series (batch, time) to forecasts (batch, time, AHEAD) after each hour."""

    def __init__(self, features: int, rngs: nnx.Rngs):
        self.encoder = nnx.Linear(1, features, rngs=rngs)
        self.recurrence = RGLRU(features, rngs=rngs)
        self.hidden = nnx.Linear(features, features, rngs=rngs)
        self.out = nnx.Linear(features, AHEAD, rngs=rngs)

    def __call__(self, series, state=None):
        y, state = self.recurrence(self.encoder(series[..., None]), state)
        return self.out(nnx.gelu(self.hidden(y))), state


@nnx.jit
def train_step(model: Forecaster, optimizer: nnx.Optimizer, series):
    def loss_fn(model):
        forecasts, _ = model(series[:, :HOURS])
        return jnp.mean((forecasts - series[:, WINDOWS]) ** 2)

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def main(steps: int = 500):
    """Trains the model, and compares its forecasts with the value of the day before."""
    model = Forecaster(64, nnx.Rngs(0))
    adam = optax.adam(optax.cosine_decay_schedule(1e-2, steps))
    adam = optax.chain(optax.clip_by_global_norm(1.0), adam)
    optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
    for step, key in enumerate(jax.random.split(jax.random.key(0), steps), 1):
        loss = train_step(model, optimizer, make_series(key, 32))
        if step % (steps // 5) == 0:
            print(f"step {step:4}: root mean square error {loss**0.5:.3f}")

    series = make_series(jax.random.key(1), 256)
    known, ahead = series[:, :HOURS], series[:, HOURS:]
    forecasts = nnx.jit(Forecaster.__call__)(model, known)[0][:, -1]
    day_before = jnp.tile(known[:, -24:], AHEAD // 24)
    for name, values in (("model", forecasts), ("repeating the day before", day_before)):
        error = jnp.sqrt(jnp.mean((values - ahead) ** 2))
        print(f"root mean square error over the next {AHEAD} hours, {name}: {error:.3f}")

    plt.plot(series[0], label="series")
    plt.plot(range(HOURS, HOURS + AHEAD), forecasts[0], label="forecast")
    plt.xlabel("hour")
    plt.legend()
    plt.savefig("forecast.png")


if __name__ == "__main__":
    tyro.cli(main)
