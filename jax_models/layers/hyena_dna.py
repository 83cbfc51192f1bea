"""Hyena as in HyenaDNA (arXiv 2306.15794) and in safari, the code of the Hyena paper."""

__all__ = ["HyenaDNABlock", "HyenaDNAMixer"]

from functools import partial
from typing import Annotated, Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.checks.arguments import Default
from jax_models.layers.activation import ACTIVATIONS, MixerActivation
from jax_models.layers.dropout import Dropout
from jax_models.layers.hyena import HyenaOperator, HyenaState
from jax_models.layers.hyena_dna_filter import HyenaDNAFilter, by_feature
from jax_models.layers.linear import Linear, torch_uniform
from jax_models.layers.norm import LayerNorm
from jax_models.layers.residual import ResidualBlock
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.options import (
    FilterOptions,
    LayerOptions,
    declared_options,
    norm_options,
    with_inits,
)
from jax_models.weights import Layouts, Weight, layer_norm, linear, nested, same
from jax_models.weights.constant import Constant
from jax_models.weights.rows import reshaped


class HyenaDNAFilterOptions(FilterOptions, total=False):
    """The keyword arguments of a `HyenaDNAMixer` that it passes on to its filter."""

    embed_features: Annotated[int, Default(5)]
    """Size of the filter's embedding of a position, odd."""
    num_filter_layers: Annotated[int, Default(4)]
    """Linear layers of the filter's network, at least 2."""
    omega: Annotated[float, Default(10.0)]
    """Initial frequency of the sines in the filter's network."""
    shift: Annotated[float, Default(0.05)]
    """The value that is added to the filter's window, and to which the sum decays."""
    modulate: Annotated[bool, Default(True)]
    """Whether the filter's window is applied."""
    normalized: Annotated[bool, Default(False)]
    """Whether the windowed taps of all filters at a step are divided by their L1 norm."""


class HyenaDNAOptions(HyenaDNAFilterOptions, LayerOptions, total=False):
    """The keyword arguments of a `HyenaDNAMixer`, which a block passes on to it."""

    order: Annotated[int, Default(2)]
    """Order N of the mixer, at least 2; there are N − 1 long convolutions."""
    kernel_size: Annotated[int, Default(3)]
    """Taps of the mixer's short convolution."""
    filter_bias: Annotated[bool, Default(True)]
    """Whether B is added. If False, B is loaded and saved, but not used."""
    activation: Annotated[MixerActivation, Default("identity")]
    """Applied to v ⊙ x_0 before the output projection."""


class HyenaDNAMixer(HyenaOperator):
    """The Hyena operator of safari and HyenaDNA, with each product before the convolution.

        >>> layer = HyenaDNAMixer(64, max_length=128, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        x_0, …, x_{N−1}, v = conv(u W + b)              conv: short, causal, depthwise
        v ← h_n ∗ (v ⊙ x_{N−n}) + B_n ⊙ v ⊙ x_{N−n}     n = 1 … N − 1; ∗: over the whole past
        y = activation(v ⊙ x_0) W_out + b_out

    x = u and y are (batch, time, features), and the state is `HyenaState(conv, long)`. h comes from
    a `HyenaDNAFilter`. A step costs O(log² max_length) on average (`ops.online_conv`). The outputs
    from step max_length on are NaN. For inference, `nnx.view(layer, fixed_filters=True)` computes
    the filters once.

    Args:
        features: size of u_t and y_t.
        max_length: the longest sequence.
        mlp_features: width of the filter's network.
        dropout_rate: dropout of the output in training.
        **options: as in `jax_models.layers.hyena_dna.HyenaDNAOptions`. W, W_out and the short
            convolution are initialized as in torch, b and b_out to zero. The initializers do not
            apply to the filters.

    Raises:
        ValueError: order is less than 2, a size is not one that the filter accepts, or (at the
            call) x is longer than max_length.
        NotImplementedError: (at the call) `reset`; give each document a batch row of its own.

    Layouts: those of `HyenaDNAFilter` (HyenaOperator of HyenaDNA's standalone file, and of safari).

    """

    def __init__(
        self,
        features: int,
        max_length: int,
        *,
        mlp_features: int = 64,
        dropout_rate: float = 0.0,
        **options: Unpack[HyenaDNAOptions],
    ):
        given: Any = options  # with defaults, which the type checker does not know
        order = given["order"]
        if order < 2:
            raise ValueError(f"order: expected at least 2, got {order}")
        super().__init__(
            features,
            max_length,
            partial(
                HyenaDNAFilter,
                features,
                max_length,
                order=order - 1,
                mlp_features=mlp_features,
                **declared_options(HyenaDNAFilterOptions, options),
            ),
            order=order,
            num_filters=order - 1,
            kernel_size=given["kernel_size"],
            dropout_rate=dropout_rate,
            **declared_options(LayerOptions, options),
        )
        self.activation: MixerActivation = given["activation"]
        self.filter_bias: bool = given["filter_bias"]
        if not self.filter_bias:
            self.B = Constant(self.B[...])

    @property
    def skip(self) -> Float[Array, "filters features"]:
        """B, or zeros if `filter_bias` is False."""
        return self.B[...] if self.filter_bias else jnp.zeros_like(self.B[...])

    def operator(self, u, gates, v, convolve):
        """`v ← h ∗ (v ⊙ x)` for each gate x, from the last to the second, then the output."""
        first, *others = gates
        for n, x in enumerate(reversed(others)):
            v = convolve(n, v * x)
        return self.output(ACTIVATIONS[self.activation](v * first))

    def torch_layouts(self) -> Layouts:
        """The layouts of the filter."""
        order, features = self.num_filters, self.in_features
        bias = reshaped(same("B", "filter_fn.bias"), (order, features), (order * features,))
        return {
            layout: [
                *linear("proj_input", "in_proj"),
                *nested(self.conv.torch_rows(), "conv", "short_filter"),
                *nested(table, "filter", "filter_fn"),
                by_feature(bias, order) if layout == "safari" else bias,
                *linear("proj_output", "out_proj"),
            ]
            for layout, table in self.filter.torch_layouts().items()
        }


class HyenaDNABlock(ResidualBlock[HyenaState]):
    """The residual block of HyenaDNA.

        >>> layer = HyenaDNABlock(64, 256, max_length=128, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        x ← x + mixer(norm1(x))
        x ← x + gelu(norm2(x) W_up + b_up) W_down + b_down

    x is (batch, time, features). The mixer is a `HyenaDNAMixer`, and its state is the state of the
    block. gelu is the approximation with tanh.

    Args:
        features: size of x_t.
        mlp_features: width of the MLP.
        max_length: the longest sequence.
        filter_features: width of the filter's network.
        dropout_rate: rate of the dropout of the outputs of the mixer and the MLP in training.
        **options: as in `jax_models.layers.hyena_dna.HyenaDNAOptions`; the MLP's matrices are
            initialized as in torch, its biases to zero, and all others as in the mixer.

    Raises:
        ValueError: a size is not one that the mixer accepts.
        NotImplementedError: (at the call) `reset`; give each document a batch row of its own.

    Layouts: those of `HyenaDNAFilter` (Block of HyenaDNA's standalone file, and of safari), and
    `safari-checkpointed` (safari's with checkpoint_mixer and checkpoint_mlp).

    """

    parts = ("norm1", "mixer", "norm2", "mlp")

    def __init__(
        self,
        features: int,
        mlp_features: int,
        max_length: int,
        *,
        filter_features: int = 64,
        dropout_rate: float = 0.0,
        **options: Unpack[HyenaDNAOptions],
    ):
        shared = declared_options(LayerOptions, options)
        super().__init__(features, **shared)
        self.max_length = max_length
        self.norm1 = LayerNorm(features, **norm_options(options))
        self.mixer = HyenaDNAMixer(
            features,
            max_length,
            mlp_features=filter_features,
            dropout_rate=dropout_rate,
            **options,
        )
        self.norm2 = LayerNorm(features, **norm_options(options))
        narrow, wide = (with_inits(shared, torch_uniform(n)) for n in (features, mlp_features))
        self.up_proj = Linear(features, mlp_features, **narrow)
        self.down_proj = Linear(mlp_features, features, **wide)
        self.dropout = Dropout(dropout_rate, rngs=options["rngs"])

    def mlp(self, x: Float[Array, "batch time features"]) -> Float[Array, "batch time features"]:
        """The MLP, with dropout in training."""
        return self.dropout(self.down_proj(jax.nn.gelu(self.up_proj(x))))

    mesh_axes = last_axis("hidden", "up_proj") | first_axis("hidden", "down_proj.kernel")

    def torch_layouts(self) -> Layouts:
        """The mixer's layouts, and `safari-checkpointed`, where mixer and MLP are in a `layer`."""
        mixer_layouts = self.mixer.torch_layouts()

        def table(layout: str, wrapper: str = "") -> list[Weight]:
            return [
                *layer_norm("norm1", "norm1"),
                *nested(mixer_layouts[layout], "mixer", f"mixer{wrapper}"),
                *layer_norm("norm2", "norm2"),
                *linear("up_proj", f"mlp{wrapper}.fc1"),
                *linear("down_proj", f"mlp{wrapper}.fc2"),
            ]

        return {
            **{layout: table(layout) for layout in mixer_layouts},
            "safari-checkpointed": table("safari", ".layer"),
        }
