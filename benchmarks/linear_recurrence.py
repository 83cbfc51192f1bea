"""`h_t = a_t ⊙ h_{t−1} + b_t`: ours and its peers."""

from functools import partial

import jax
import numpy as np
import torch

from jax_models.ops import linear_recurrence

SHAPES = [(4, 2048, 1024), (1, 32768, 256), (1, 65536, 256), (32, 128, 192)]


def inputs(shape: tuple[int, ...]) -> list[np.ndarray]:
    """a, b and the gradient of h."""
    rng = np.random.default_rng(0)
    return [rng.uniform(0.9, 0.999, shape), rng.standard_normal(shape), rng.standard_normal(shape)]


def oracle(a, b, cotangent) -> list[np.ndarray]:
    """H and the gradients of a and b, by a loop over the steps."""
    h, g = np.empty_like(b), np.empty_like(b)
    last = carried = np.zeros_like(b[:, 0])
    for t in range(b.shape[1]):
        last = h[:, t] = a[:, t] * last + b[:, t]
    for t in reversed(range(b.shape[1])):
        g[:, t] = cotangent[:, t] + carried
        carried = a[:, t] * g[:, t]
    before = np.concatenate([np.zeros_like(h[:, :1]), h[:, :-1]], axis=1)
    return [h, g * before, g]


def ours(method: str):
    """Our operator."""
    return lambda a, b: linear_recurrence(a, b, method=method)[0]  # pyright: ignore[reportArgumentType]


def recurrentgemma():
    """DeepMind's scan."""
    import typeguard  # pyright: ignore[reportMissingImports]

    typeguard.typechecked = lambda f: f  # its annotations fail under typeguard 4
    from recurrentgemma.jax import scan  # pyright: ignore[reportMissingImports]

    return lambda a, b: scan.linear_scan(b, a)[0]


def associative_scan():
    """What one writes first in JAX."""

    def combine(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    return lambda a, b: jax.lax.associative_scan(combine, (a, b), axis=1)[1]


def torch_loop():
    """What one writes first in torch."""

    def loop(a, b):
        h, hs = torch.zeros_like(b[:, 0]), []
        for a_t, b_t in zip(a.unbind(1), b.unbind(1), strict=True):
            h = a_t * h + b_t
            hs.append(h)
        return torch.stack(hs, dim=1)

    return loop


JAX = {
    "twinscan": partial(ours, "auto"),
    "twinscan associative": partial(ours, "associative"),
    "twinscan chunked": partial(ours, "chunked"),
    "recurrentgemma": recurrentgemma,
    "lax.associative_scan": associative_scan,
}
TORCH = {"torch loop": torch_loop}
