"""Linear layers and their initializers."""

from collections.abc import Callable, Sequence
from typing import Unpack

import jax
from flax import nnx
from jaxtyping import Array

from jax_models.checks.values import check_divides
from jax_models.mesh_axes import MeshAxes, first_axis, last_axis
from jax_models.ops.affine import dot_general
from jax_models.options import FilterOptions, Initializer

lecun_normal = nnx.initializers.lecun_normal()
"""The default initializer of the kernel of Flax's Linear."""


def normal_of_fan_in(variance: float = 1.0, *, in_blocks: bool = False) -> Initializer:
    """The initializer of recurrentgemma's matrices: normal, with variance `variance` / inputs.

    If `in_blocks`, the shape is (blocks, inputs, outputs).
    """
    batch_axis = 0 if in_blocks else ()
    return nnx.initializers.variance_scaling(variance, "fan_in", "normal", batch_axis=batch_axis)


def torch_uniform(fan_in: float) -> Initializer:
    """The initializer of the matrix and the bias of `torch.nn.Linear`: uniform in ±1/√fan_in."""
    bound = fan_in**-0.5

    def init(key, shape, dtype, **_) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class Linear(nnx.Linear):
    """`nnx.Linear` with a faster backward pass, because it flattens all axes but the last.

    The results are the same, except for rounding in a product with a single row, which is faster on
    a CPU, too. For a product (batch, time, in) × (in, out), XLA's CPU backend would first copy
    arrays in an order that does not match their memory layout to compute the kernel's gradient,
    which slows down a training step.
    """

    scale: float = 1.0
    """The factor by which outputs are multiplied, in models that have multipliers beside their
    weights.
    """

    def __init__(self, in_features, out_features, *, dot_general=dot_general, **options):
        """Takes the arguments of `nnx.Linear`."""
        super().__init__(in_features, out_features, dot_general=dot_general, **options)

    def __call__(self, inputs, out_sharding=None):
        """Maps `inputs`, (…, in), to (…, out)."""
        y = super().__call__(inputs.reshape(-1, inputs.shape[-1]), out_sharding)
        if self.scale != 1:
            y = self.scale * y
        return y.reshape(*inputs.shape[:-1], self.out_features)


Adapter = Callable[[Array], Sequence[Array]]
"""A function of the input of several projections that returns what is added to each of them."""


def adapted(projected: list[Array], x: Array, adapter: Adapter | None) -> list[Array]:
    """Returns the results of projections of x, to which the terms of an adapter are added."""
    if adapter is None:
        return projected
    return [y + term for y, term in zip(projected, adapter(x), strict=True)]


class BlockDiagonal(nnx.Module):
    """The blocks of a block-diagonal matrix, and a bias, as arguments of `ops.affine`."""

    def __init__(
        self,
        features: int,
        num_blocks: int,
        *,
        kernel_init: Initializer,
        bias_init: Initializer,
        **options: Unpack[FilterOptions],
    ):
        check_divides("num_blocks", num_blocks, "features", features)
        size = features // num_blocks
        rngs, dtype = options["rngs"], options.get("param_dtype")
        self.kernel = nnx.Param(kernel_init(rngs.params(), (num_blocks, size, size), dtype))
        self.bias = nnx.Param(bias_init(rngs.params(), (num_blocks, size), dtype))

    @property
    def mesh_axes(self) -> MeshAxes:
        """Several blocks are divided by block, and a single block is divided by its outputs."""
        axis = last_axis if self.kernel.shape[0] == 1 else first_axis
        return axis("features", "kernel", "bias")
