"""RWKV-4's average of the past: ours and its peers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_models.ops import wkv

SHAPES = [(8, 512, 512), (32, 128, 192)]


def inputs(shape: tuple[int, ...]) -> list[np.ndarray]:
    """k, v, w, u and the gradient of y."""
    rng = np.random.default_rng(0)
    k, v, cotangent = rng.standard_normal((3, *shape))
    return [k, v, rng.uniform(0.01, 2, shape[2]), rng.standard_normal(shape[2]), cotangent]


def oracle(k, v, w, u, cotangent) -> list[np.ndarray]:
    """Y and the gradients of k, v, w and u, by the printed formula.

    Its exponents are small enough here for float64.
    """
    decay, weight, bonus = np.exp(-w), np.exp(k), np.exp(u + k)
    num, den = np.zeros_like(v), np.zeros_like(v)
    for t in range(1, v.shape[1]):
        num[:, t] = decay * num[:, t - 1] + weight[:, t - 1] * v[:, t - 1]
        den[:, t] = decay * den[:, t - 1] + weight[:, t - 1]
    y = (num + bonus * v) / (den + bonus)
    of_num = cotangent / (den + bonus)
    of_den = -of_num * y
    after_num, after_den = np.zeros_like(v), np.zeros_like(v)
    for t in reversed(range(v.shape[1] - 1)):
        after_num[:, t] = decay * after_num[:, t + 1] + of_num[:, t + 1]
        after_den[:, t] = decay * after_den[:, t + 1] + of_den[:, t + 1]
    of_bonus = bonus * (of_num * v + of_den)
    return [
        y,
        of_bonus + weight * (after_num * v + after_den),
        bonus * of_num + weight * after_num,
        -(decay * (after_num * num + after_den * den)).sum(axis=(0, 1)),
        of_bonus.sum(axis=(0, 1)),
    ]


def ours(method: str):
    """Our operator."""
    return lambda k, v, w, u: wkv(k, v, w=w, u=u, method=method)[0]  # pyright: ignore[reportArgumentType]


def plain_scan():
    """What one writes first in JAX."""

    def step(w, u, state, inputs):
        (num, den, max), (k, v) = state, inputs
        q = jnp.maximum(max, u + k)
        past, now = jnp.exp(max - q), jnp.exp(u + k - q)
        y = (past * num + now * v) / (past * den + now)
        q = jnp.maximum(max - w, k)
        past, now = jnp.exp(max - w - q), jnp.exp(k - q)
        return (past * num + now * v, past * den + now, q), y

    def scan(k, v, w, u):
        zeros = jnp.zeros_like(k[:, 0])
        by_step = (jnp.moveaxis(k, 1, 0), jnp.moveaxis(v, 1, 0))
        _, ys = jax.lax.scan(partial(step, w, u), (zeros, zeros, zeros - 1e38), by_step)
        return jnp.moveaxis(ys, 0, 1)

    return scan


def transformers():
    """Hugging Face's loop for CPUs; it takes log w."""
    from transformers.models.rwkv import modeling_rwkv  # pyright: ignore[reportMissingImports]

    return lambda k, v, w, u: modeling_rwkv.rwkv_linear_attention_cpu(w.log(), u, k, v)[0]


def torch_loop():
    """What one writes first in torch."""

    def loop(k, v, w, u):
        num = den = torch.zeros_like(k[:, 0])
        max = torch.full_like(num, -1e38)
        ys = []
        for k_t, v_t in zip(k.unbind(1), v.unbind(1), strict=True):
            q = torch.maximum(max, u + k_t)
            past, now = torch.exp(max - q), torch.exp(u + k_t - q)
            ys.append((past * num + now * v_t) / (past * den + now))
            q = torch.maximum(max - w, k_t)
            past, now = torch.exp(max - w - q), torch.exp(k_t - q)
            num, den, max = past * num + now * v_t, past * den + now, q
        return torch.stack(ys, dim=1)

    return loop


JAX = {
    "twinscan": partial(ours, "auto"),
    "twinscan associative": partial(ours, "associative"),
    "lax.scan": plain_scan,
}
TORCH = {"transformers": transformers, "torch loop": torch_loop}
