"""The gated short convolution."""

__all__ = ["ShortConvolution"]

from typing import Unpack

from jax_models.layers.conv import CausalConv1D
from jax_models.layers.linear import Linear, torch_uniform
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.ops import CausalConv1DState
from jax_models.options import LayerOptions, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import SharedLayer


class ShortConvolution(SharedLayer, SequenceLayer[CausalConv1DState]):
    """A causal depthwise convolution between two gates.

        >>> layer = ShortConvolution(64, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        B, C, u = x W_B, x W_C, x W_u
        y = (C ⊙ conv(B ⊙ u)) W_out

    x and y are (batch, time, features). The state is `CausalConv1DState(inputs)` with the last
    kernel_size − 1 values of B ⊙ u, (batch, features, kernel_size − 1). There is no nonlinearity
    besides the gates.

    Args:
        features: size of x_t and y_t.
        kernel_size: taps of the convolution.
        use_bias: whether the projections and the convolution have biases.
        **options: as in `LayerOptions`. Matrices, the convolution and biases are initialized as in
            torch.

    Raises:
        ValueError: a size is not positive, or `bias_init` is given without biases.

    Layouts: those that the architectures declare. With biases, padding on the left changes the
    first real steps of transformers' layer. Here, mark the first real step in `reset`, and the
    padding has no influence.

    Source: transformers' implementation of Liquid AI's LFM2.

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        *,
        kernel_size: int = 3,
        use_bias: bool = False,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        self.conv = CausalConv1D(features, kernel_size, use_bias=use_bias, **options)
        uniform = torch_uniform(features)
        matrix = with_inits(options, uniform, uniform, use_bias=use_bias)
        self.in_gate_proj = Linear(features, features, **matrix)
        self.out_gate_proj = Linear(features, features, **matrix)
        self.value_proj = Linear(features, features, **matrix)
        self.out_proj = Linear(features, features, **matrix)

    def init_state(self, batch_size: int) -> CausalConv1DState:
        """Zeros, (batch, features, kernel_size − 1), in at least float32."""
        return self.conv.init_state(batch_size)

    def sequence(self, x, state, rows):
        """Runs the convolution between its two gates and the projections."""
        x = x.astype(self.computation_dtype(x))
        # The first gate multiplies the inputs of the convolution, the second its outputs.
        u, state = self.conv.sequence(self.in_gate_proj(x) * self.value_proj(x), state, rows)
        return self.out_proj(self.out_gate_proj(x) * u), state

    mesh_axes = last_axis(
        "features", "in_gate_proj", "out_gate_proj", "value_proj", "conv"
    ) | first_axis("features", "out_proj.kernel")
