"""The linear layer, in the shape in which it trains fastest."""

import jax
from flax import nnx
from jaxtyping import Array

from jax_models.options import Initializer


def torch_uniform(fan_in: int) -> Initializer:
    """How `torch.nn.Linear` draws its matrix and its bias: uniform in ±1/√fan_in."""
    bound = fan_in**-0.5

    def init(key, shape, dtype, **_) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class Linear(nnx.Linear):
    """`nnx.Linear` with all axes but the last as one: the same numbers, a faster backward pass.

    Of a product (batch, time, in) × (in, out) XLA's CPU backend computes the kernel's gradient from
    copies that it fills against the order of memory, which slows down a training step.
    """

    def __call__(self, inputs, out_sharding=None):
        """`inputs` (…, in) → (…, out)."""
        y = super().__call__(inputs.reshape(-1, inputs.shape[-1]), out_sharding)
        return y.reshape(*inputs.shape[:-1], self.out_features)
