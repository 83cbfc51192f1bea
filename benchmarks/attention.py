"""Causal attention of six heads: ours and torch's."""

import jax.numpy as jnp
import numpy as np
import torch

from jax_models.ops import attention

SHAPES = [(64, 128, 384), (4, 1024, 384)]
HEADS = 6


def inputs(shape: tuple[int, ...]) -> list[np.ndarray]:
    """q, k, v, each (batch, time, heads, features of a head), and the gradient of y."""
    *rows, features = shape
    rng = np.random.default_rng(0)
    return list(rng.standard_normal((4, *rows, HEADS, features // HEADS)))


def oracle(q, k, v, cotangent) -> list[np.ndarray]:
    """Y and the gradients of q, k and v, by the formula."""
    time, scale = q.shape[1], q.shape[-1] ** -0.5
    scores = scale * np.einsum("bthf,bshf->bhts", q, k)
    scores = np.where(np.tri(time, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    of_weights = np.einsum("bthf,bshf->bhts", cotangent, v)
    of_scores = of_weights - (weights * of_weights).sum(axis=-1, keepdims=True)
    of_scores *= scale * weights
    return [
        np.einsum("bhts,bshf->bthf", weights, v),
        np.einsum("bhts,bshf->bthf", of_scores, k),
        np.einsum("bhts,bthf->bshf", of_scores, q),
        np.einsum("bhts,bthf->bshf", weights, cotangent),
    ]


def ours():
    """Our operator."""

    def causal(q, k, v):
        mask = jnp.broadcast_to(jnp.tri(q.shape[1], dtype=bool), (len(q), q.shape[1], q.shape[1]))
        return attention(q, k, v, mask)

    return causal


def torch_sdpa():
    """`scaled_dot_product_attention`."""

    def causal(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2)

    return causal


JAX = {"twinscan": ours}
TORCH = {"torch SDPA": torch_sdpa}
