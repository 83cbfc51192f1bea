"""StripedHyena's Hyena block, whose filters are given by poles and residues (arXiv 2310.18780)."""

__all__ = ["ModalConvState", "StripedHyenaBlock", "StripedHyenaMixer", "StripedHyenaState"]

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jax_models import ops
from jax_models.checks.values import Positive, check_divides
from jax_models.layers.activation import GateActivation
from jax_models.layers.conv import CausalConv1D
from jax_models.layers.linear import Linear, torch_uniform
from jax_models.layers.mlp import GatedMLP
from jax_models.layers.norm import RootMeanSquareNorm
from jax_models.layers.residual import ResidualBlock
from jax_models.ops import CausalConv1DState, ModalConvState, carry_dtype
from jax_models.options import LayerOptions, norm_options, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, layouts_of, linear, nested, rms_norm, same, squeezed

SMALLEST_POLE, LARGEST_POLE = 0.9, 0.999
"""The range of the initial magnitudes of the poles."""


class StripedHyenaState(NamedTuple):
    """The state of a StripedHyena block: the short convolution's inputs, the long one's modes."""

    conv: CausalConv1DState
    modal: ModalConvState


class StripedHyenaMixer(SequenceLayer[StripedHyenaState]):
    """The Hyena operator of StripedHyena, whose long convolution is a recurrence.

        >>> layer = StripedHyenaMixer(64, num_heads=4, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        x_2, x_1, v = conv(u W + b)                     conv: short, causal, depthwise
        s_t = λ ⊙ s_{t−1} + x_1 ⊙ v                     of each feature and mode, complex
        y = (x_2 ⊙ (Re Σ_modes R ⊙ s + D ⊙ x_1 ⊙ v)) W_out + b_out

    u and y are (batch, time, features), and the state is `StripedHyenaState(conv, modal)`. λ are
    the poles and R the residues, both stored as real and imaginary parts, (features, state_size,
    2). The cost of a step, O(state_size), does not depend on the length of the sequence.
    `ops.modal_conv` computes whole sequences.

    Args:
        features: size of u_t and y_t.
        num_heads: number of heads, a divisor of `features`. The output of the projection contains
            x_2, x_1 and v of the first head, then those of the second, and so on.
        state_size: number of modes of each feature's filter.
        kernel_size: taps of the short convolution.
        **options: as in `LayerOptions`. W, W_out and the convolution are initialized as in torch, b
            and b_out to zero. The initial poles have magnitudes from 0.9 to 0.999 and any angle,
            and the residues give each filter an energy of about 1.

    Raises:
        ValueError: a size is not positive, or num_heads does not divide the features.

    Layouts: `stripedhyena` (the corresponding parts of the package's ParallelGatedConvBlock, with
    `hyena_filter_groups` 1).

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        *,
        num_heads: int = 1,
        state_size: int = 8,
        kernel_size: int = 3,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        check_divides("num_heads", num_heads, "features", features)
        self.num_heads = num_heads
        rngs, param_dtype = options["rngs"], self.param_dtype
        matrix = with_inits(options, torch_uniform(features))
        self.proj_input = Linear(features, 3 * features, **matrix)
        self.conv = CausalConv1D(3 * features, kernel_size, **options)
        poles, residues = _ring(rngs.params(), (features, state_size), carry_dtype(param_dtype))
        self.poles = nnx.Param(poles.astype(param_dtype))
        self.residues = nnx.Param(residues.astype(param_dtype))
        self.D = nnx.Param(jax.random.normal(rngs.params(), (features,), param_dtype))
        self.proj_output = Linear(features, features, **matrix)

    def init_state(self, batch_size: int) -> StripedHyenaState:
        modes = jnp.zeros((batch_size, *self.poles.shape), self.state_dtype)
        return StripedHyenaState(self.conv.init_state(batch_size), ModalConvState(modes))

    def sequence(self, x, state, rows):
        """Runs `ops.modal_conv` between its two gates and the two projections."""
        dtype = self.computation_dtype(x)
        # Project to x_2, x_1 and v of each head, and mix neighboring steps by the short
        # convolution.
        z, conv = self.conv.sequence(self.proj_input(x.astype(dtype)), state.conv, rows)
        size = self.in_features // self.num_heads
        by_head = z.reshape(*z.shape[:2], self.num_heads, 3, size)
        x2, x1, v = (by_head[:, :, :, i].reshape(x.shape) for i in range(3))
        # The long convolution runs between the two gates x_1 and x_2.
        y, modal = ops.modal_conv(
            x1 * v,
            state.modal,
            poles=self.poles[...],
            residues=self.residues[...],
            skip=self.D[...],
            rows=rows,
        )
        return self.proj_output(y * x2), StripedHyenaState(conv, modal)

    def torch_layouts(self) -> Layouts:
        """`stripedhyena`: the package's keys."""
        conv = nested(self.conv.torch_rows(), "conv", "")
        return {
            "stripedhyena": [
                *linear("proj_input", "projections"),
                *(
                    row._replace(keys=tuple(f"filter.short_filter_{key}" for key in row.keys))
                    for row in conv
                ),
                squeezed("poles", "filter.poles", (2,)),
                squeezed("residues", "filter.residues", (2,)),
                same("D", "filter.D"),
                *linear("proj_output", "out_filter_dense"),
            ]
        }


class StripedHyenaNorm(RootMeanSquareNorm):
    """`x / (√mean(x²) + ε) · scale` over the features, with ε outside the root."""

    def scaled(self, x, square, scale):
        """Normalizes; at x = 0, the gradient is that of `x / ε · scale`."""
        root = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
        return x / (root + self.epsilon) * scale


class StripedHyenaBlock(ResidualBlock[StripedHyenaState]):
    """The residual block of StripedHyena that contains a Hyena operator rather than attention.

        >>> layer = StripedHyenaBlock(64, 192, num_heads=4, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        x ← x + mixer(norm(x))
        x ← x + (silu(norm(x) W_gate) ⊙ norm(x) W_up) W_down

    x is (batch, time, features). The mixer is a `StripedHyenaMixer`, and its state is the state of
    the block. Each norm is x / (√mean(x²) + ε) · scale.

    Args:
        features: size of x_t.
        mlp_features: width of the gated MLP. The package uses 8/3 of `features`, rounded up to a
            multiple of 64.
        num_heads: number of heads of the mixer, a divisor of `features`.
        state_size: modes of each feature's filter.
        kernel_size: taps of the short convolution.
        activation: activation of the MLP's gate.
        epsilon: ε of the norms.
        **options: as in `LayerOptions`; the MLP is initialized as in torch, and all other
            parameters as in the mixer.

    Raises:
        ValueError: a size or epsilon is not positive, or num_heads does not divide the features.

    Layouts: `stripedhyena` (the package's ParallelGatedConvBlock, with `hyena_filter_groups` 1).

    """

    parts = ("pre_norm", "mixer", "post_norm", "mlp")

    def __init__(
        self,
        features: int,
        mlp_features: int,
        *,
        num_heads: int = 1,
        state_size: int = 8,
        kernel_size: int = 3,
        activation: GateActivation = "silu",
        epsilon: Positive = 1e-5,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        norm_args = (features, epsilon)
        self.pre_norm = StripedHyenaNorm(*norm_args, **norm_options(options))
        self.mixer = StripedHyenaMixer(
            features,
            num_heads=num_heads,
            state_size=state_size,
            kernel_size=kernel_size,
            **options,
        )
        self.post_norm = StripedHyenaNorm(*norm_args, **norm_options(options))
        down_init = options.get("kernel_init") or torch_uniform(mlp_features)
        matrix = with_inits(options, torch_uniform(features), None)
        self.mlp = GatedMLP(
            features, mlp_features, activation=activation, down_init=down_init, **matrix
        )

    def torch_layouts(self) -> Layouts:
        """`stripedhyena`: the package's keys."""
        return {
            "stripedhyena": [
                *rms_norm("pre_norm", "pre_norm", "scale"),
                *nested(self.mixer.torch_layouts()["stripedhyena"], "mixer", ""),
                *rms_norm("post_norm", "post_norm", "scale"),
                *nested(self.mlp.torch_layouts()["stripedhyena"], "mlp", "mlp"),
            ]
        }


@layouts_of(GatedMLP)
def mlp_layouts(mlp: GatedMLP) -> Layouts:
    """`stripedhyena`: the keys of the package's ParallelGatedMLP, which has no biases."""
    return {} if mlp.use_bias else {"stripedhyena": mlp.rows("l1", "l2", "l3")}


def _ring(key: Array, shape: tuple[int, int], dtype) -> tuple[Array, Array]:
    """Draws poles from a ring, as in arXiv 2303.06349, and normal residues times √(1 − |λ|²)."""
    magnitude_key, angle_key, residue_key = jax.random.split(key, 3)
    # Uniform squares of the magnitudes spread the poles evenly over the area of the ring.
    square = jax.random.uniform(magnitude_key, shape, dtype, SMALLEST_POLE**2, LARGEST_POLE**2)
    angle = jax.random.uniform(angle_key, shape, dtype, -jnp.pi, jnp.pi)
    poles = jnp.sqrt(square)[..., None] * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)
    # The factor √(1 − |λ|²) gives every mode the same energy, however slowly it decays.
    residues = jax.random.normal(residue_key, (*shape, 2), dtype) * shape[1] ** -0.5
    return poles, residues * jnp.sqrt(1 - square)[..., None]
