"""The causal depthwise convolution."""

__all__ = ["CausalConv1D", "CausalConv1DState"]

import itertools
from collections.abc import Sequence
from typing import Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.layers.linear import torch_uniform
from jax_models.ops import CausalConv1DState, Rows
from jax_models.options import LayerOptions, refuse_unused, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, SharedLayer, Table, Weight, same
from jax_models.weights.rows import namespace


class CausalConv1D(SharedLayer, SequenceLayer[CausalConv1DState]):
    """A depthwise convolution that sees the current input and the kernel_size − 1 before it.

        >>> layer = CausalConv1D(64, kernel_size=4, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        y_t = Σ_j kernel_j ⊙ x_{t−K+1+j} + bias,    j = 0 … K−1

    x and y are (batch, time, features). The state is `CausalConv1DState(inputs)` with the last
    K − 1 inputs, (batch, features, K − 1), initially zeros. Inputs from before a `reset` count as
    zero.

    Args:
        features: size of x_t and y_t.
        kernel_size: K, the number of taps.
        use_bias: whether there is a bias.
        **options: as in `LayerOptions`. The (kernel_size, features) kernel and the bias start
            uniform in ±1/√K, as in torch.

    Raises:
        ValueError: a size is not positive, or `bias_init` is given without a bias.

    Layouts: `hf` (a depthwise torch.nn.Conv1d), and those that the architectures declare. The first
    is `hawk` (torch_ref.CausalConv1d).

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        kernel_size: int,
        *,
        use_bias: bool = True,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        refuse_unused(
            "bias_init", options.get("bias_init"), unless=use_bias, because="with use_bias=False"
        )
        self.kernel_size = kernel_size
        uniform = torch_uniform(kernel_size)
        inits, rngs = with_inits(options, uniform, uniform), options["rngs"]
        kernel = inits["kernel_init"](rngs.params(), (kernel_size, features), self.param_dtype)
        self.kernel = nnx.Param(kernel)
        bias = inits["bias_init"](rngs.params(), (features,), self.param_dtype)
        self.bias = nnx.Param(bias) if use_bias else None

    def init_state(self, batch_size: int) -> CausalConv1DState:
        """Zeros, (batch, features, kernel_size − 1), in at least float32."""
        shape = (batch_size, self.in_features, self.kernel_size - 1)
        return CausalConv1DState(jnp.zeros(shape, self.state_dtype))

    def sequence(self, x, state, rows):
        dtype = self.computation_dtype(x)
        kernel = self.kernel[...].astype(dtype)
        bias = None if self.bias is None else self.bias[...].astype(dtype)
        return ops.causal_conv(x.astype(dtype), state, kernel=kernel, bias=bias, rows=rows)

    def by_parts(
        self, parts: Sequence[Float[Array, "batch time part"]], state: CausalConv1DState, rows: Rows
    ) -> tuple[list[Float[Array, "batch time part"]], CausalConv1DState]:
        """Convolves parts of the channels one by one, so that a mesh can divide each by its heads.

        Returns the convolved parts, and the state of all channels.
        """
        ends = [*itertools.accumulate(part.shape[2] for part in parts)][:-1]
        windows = jnp.split(state.inputs, ends, axis=1)
        kernels = jnp.split(self.kernel[...], ends, axis=1)
        biases = [None] * len(parts) if self.bias is None else jnp.split(self.bias[...], ends)
        convolved, inputs = [], []
        for x, window, kernel, bias in zip(parts, windows, kernels, biases, strict=True):
            y, last = ops.causal_conv(
                x,
                CausalConv1DState(window),
                kernel=kernel.astype(x.dtype),
                bias=None if bias is None else bias.astype(x.dtype),
                rows=rows,
            )
            convolved.append(y)
            inputs.append(last.inputs)
        return convolved, CausalConv1DState(jnp.concatenate(inputs, axis=1))

    def torch_rows(self) -> Table:
        """The rows of a depthwise `torch.nn.Conv1d`."""
        kernel = Weight(("kernel",), ("weight",), lambda a: (a[:, 0].T,), lambda a: (a.T[:, None],))
        return [kernel] if self.bias is None else [kernel, same("bias", "bias")]

    def torch_layouts(self) -> Layouts:
        """`hf`: a depthwise `torch.nn.Conv1d`; and the layouts that the architectures declare."""
        return super().torch_layouts() | {"hf": self.torch_rows()}


def in_thirds(kernel: str, keys: Sequence[str]) -> Weight:
    """The row of a kernel that is exported in equal thirds and imported from parts of any size.

    transformers divides the channels into equal thirds, even if q, k and v have other sizes.
    """

    def to_torch(a):
        third = -(-a.shape[1] // 3)
        return tuple(namespace(a).split(a.T[:, None], [third, 2 * third]))

    return Weight(
        (kernel,),
        tuple(keys),
        lambda *parts: (namespace(parts[0]).concat([part[:, 0].T for part in parts], axis=1),),
        to_torch,
        any_division=True,
    )
