"""Give both sides the same dropout: the n-th mask of a step is the same on both."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
BERNOULLI = (aten.bernoulli_.float, aten.bernoulli.p, aten.bernoulli.default)


class MasksDifferError(ValueError):
    """The two sides do not draw equally many masks of the same shapes."""

    def __init__(self, difference: str):
        super().__init__(f"dropout: {difference}: give both sides the same masks in the batch")


class TorchMasks(TorchDispatchMode):
    """Within this mode, each dropout mask is seeded by its step and index, and kept for JAX."""

    def __init__(self, step: int):
        super().__init__()
        self._step = step
        self.masks: list[np.ndarray] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation; a Bernoulli draw returns the mask of its seed, which is kept."""
        kwargs = kwargs or {}
        if func not in BERNOULLI:
            return func(*args, **kwargs)
        like, given = args[0], args[1:] or kwargs.get("p", 0.5)
        probability = like.detach().numpy() if func is BERNOULLI[2] else given
        rng = np.random.default_rng([self._step, len(self.masks)])
        self.masks.append(rng.random(tuple(like.shape)) < probability)
        mask = torch.tensor(self.masks[-1]).to(like)
        return like.copy_(mask) if func is BERNOULLI[0] else mask


@contextlib.contextmanager
def jax_masks(masks: list[jax.Array]) -> Iterator[None]:
    """A context in which `jax.random.bernoulli` returns these masks to Flax, Equinox and haiku.

    If the channels are the last axis in JAX and the second axis in torch, the mask's axis is moved.
    """
    count = 0

    def bernoulli(key: Any, p: Any = 0.5, shape: Any = None, *args: Any, **kwargs: Any):
        nonlocal count
        count += 1
        shape = np.shape(p) if shape is None else tuple(shape)
        if count > len(masks):
            raise MasksDifferError(
                f"torch draws {len(masks)} masks a step, JAX draws more, the next of shape {shape}"
            )
        mask = masks[count - 1]
        for each in (mask, jnp.moveaxis(mask, 1, -1)) if mask.ndim > 2 else (mask,):
            if each.shape == shape:
                return each
        raise MasksDifferError(
            f"mask {count} of a step is of shape {mask.shape} in torch, {shape} in JAX"
        )

    with mock.patch.object(jax.random, "bernoulli", bernoulli):
        yield
    if count < len(masks):
        raise MasksDifferError(
            f"torch draws {len(masks)} masks a step, JAX {count} (one for all steps of a scan)"
        )
