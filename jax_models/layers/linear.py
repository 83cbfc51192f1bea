"""Linear layers and their initializers."""

from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_models.mesh_axes import MeshAxes, first_axis, last_axis
from jax_models.ops.checks import check_divides
from jax_models.options import FilterOptions, Initializer

lecun_normal = nnx.initializers.lecun_normal()
"""The default initializer of the kernel of Flax's Linear."""


def normal_of_fan_in(variance: float = 1.0) -> Initializer:
    """The initializer of recurrentgemma's matrices: normal, with variance `variance` / inputs."""
    return nnx.initializers.variance_scaling(variance, "fan_in", "normal")


def torch_uniform(fan_in: int) -> Initializer:
    """The initializer of the matrix and the bias of `torch.nn.Linear`: uniform in ±1/√fan_in."""
    bound = fan_in**-0.5

    def init(key, shape, dtype, **_) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


PARTS = 8
"""The number of partial products of which a CPU computes the product of one row."""


class Linear(nnx.Linear):
    """`nnx.Linear` with a faster backward pass, because it flattens all axes but the last.

    The results are the same, except for rounding in the product of a single row. For a product
    (batch, time, in) × (in, out), XLA's CPU backend would first copy arrays in an order that does
    not match their memory layout to compute the kernel's gradient, which slows down a training
    step.

    A single row, as in decoding at batch size 1, takes as long as reading the kernel from memory.
    XLA's CPU backend reads a large float32 kernel faster as `PARTS` kernels, whose products are
    added.
    """

    def __call__(self, inputs, out_sharding=None):
        """Maps `inputs`, (…, in), to (…, out)."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        if out_sharding is None and self._pays_in_parts(rows):
            y = self._in_parts(rows)
        else:
            y = super().__call__(rows, out_sharding)
        return y.reshape(*inputs.shape[:-1], self.out_features)

    def _pays_in_parts(self, rows: Array) -> bool:
        """Whether partial products are likely to be faster. Measured in float32 without a mesh."""
        # Smaller kernels stay in the cache. With more outputs, the partial products do not fit.
        is_large = self.in_features * self.out_features >= 2**19 and self.out_features <= 2**13
        dtypes = {rows.dtype, self.kernel.dtype, jnp.dtype(self.dtype or jnp.float32)}
        is_plain = self.dot_general is jax.lax.dot_general and not self.preferred_element_type
        is_local = jax.default_backend() == "cpu" and jax.sharding.get_abstract_mesh().empty
        is_one_row = rows.shape[0] == 1 and self.in_features % PARTS == 0
        is_float32 = dtypes == {jnp.dtype(jnp.float32)}
        return is_one_row and is_large and is_plain and is_local and is_float32

    def _in_parts(self, row: Float[Array, "1 in"]) -> Float[Array, "1 out"]:
        kernels = self.kernel[...].reshape(PARTS, -1, self.out_features)
        parts = jnp.matmul(row.reshape(PARTS, 1, -1), kernels, precision=self.precision)
        y = jnp.sum(parts, axis=0)
        return y if self.bias is None else y + self.bias[...][None]


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
