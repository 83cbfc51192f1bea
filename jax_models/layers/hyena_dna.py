"""Hyena as in HyenaDNA (arXiv 2306.15794) and in safari, the code of the Hyena paper."""

__all__ = ["HyenaDNABlock", "HyenaDNAFilter", "HyenaDNAMixer"]

from functools import partial
from typing import Annotated, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jax_models.layers.activation import ACTIVATIONS, MixerActivation
from jax_models.layers.dropout import Dropout
from jax_models.layers.hyena import HyenaOperator, HyenaState
from jax_models.layers.hyena_filter import (
    FilterOptions,
    check_network,
    decays,
    draw_network,
    filter_options,
    l1_normalized,
    positions,
    run_network,
    unit_times,
    wide,
)
from jax_models.layers.linear import Linear, torch_uniform
from jax_models.layers.norm import LayerNorm
from jax_models.layers.residual import ResidualBlock
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.ops.rows import Default
from jax_models.options import CheckedOptions, LayerOptions, norm_options, only, with_inits
from jax_models.sequence import check_time
from jax_models.weights import (
    Layouts,
    Weight,
    layer_norm,
    linear,
    nested,
    same,
    squeezed,
    tied,
    transposed,
)
from jax_models.weights.constant import Constant
from jax_models.weights.rows import reshaped

LOWEST_FREQUENCY = 1e-4
"""The first of the frequencies by which a position is embedded; the last is their number − 1."""


class HyenaDNAFilter(CheckedOptions, nnx.Module):
    """The filters of HyenaDNA: a network of the position with trained sines, times a window.

        >>> taps = HyenaDNAFilter(64, max_length=128, rngs=nnx.Rngs(0))(100)
        >>> taps.shape
        (1, 64, 100)

        h_t = (sin(f ⊙ (… sin(f ⊙ (z_t W_1 + b_1)) …)) W_last) ⊙ (exp(−t/(L−1) |δ|) + shift)

    z (max_length, embed_features) is trained, and so is f, one for all sines; δ (order, features)
    and t are constants. All of them depend on max_length: taps of a model of another length differ.

    Args:
        features: D.
        max_length: L, the longest sequence.
        order: the number of filters, one less than the operator's order.
        embed_features: size of z_t, odd: t/(L−1), then cosines and sines of 1e-4, …, K − 1
            periods, K of them in equal steps.
        mlp_features: width of the network.
        num_filter_layers: linear layers of the network, at least 2; all but the last have a bias
            and a sine.
        omega: f at first.
        shift: what the window falls to: 0.05 in HyenaDNA, 0 in safari, by default.
        modulate: whether the window is applied.
        normalized: whether the network's outputs at a step, of all filters together, are divided
            by their L1 norm before the window is applied.
        **options: as in `FilterOptions`; matrices and biases start as in torch.

    Raises:
        ValueError: a size is not positive, embed_features is even or less than 3, or there are
            fewer than 2 layers.

    Layouts: `hyena-dna` (HyenaFilter of HyenaDNA's standalone file), `hyena-dna-file` (the same
    with f under one key, as safetensors has it), `safari` (HyenaFilter of safari, which numbers
    several filters' features in another order).

    """

    def __init__(
        self,
        features: int,
        max_length: int,
        *,
        order: int = 1,
        embed_features: int = 5,
        mlp_features: int = 64,
        num_filter_layers: int = 4,
        omega: float = 10.0,
        shift: float = 0.05,
        modulate: bool = True,
        normalized: bool = False,
        **options: Unpack[FilterOptions],
    ):
        rngs, param_dtype = options["rngs"], options.get("param_dtype", jnp.float32)
        check_network(embed_features, num_filter_layers)
        self.shape, self.shift = (order, features, max_length), shift
        self.modulate, self.normalized = modulate, normalized
        widths = [embed_features, *[mlp_features] * (num_filter_layers - 1), order * features]
        frequencies = np.linspace(LOWEST_FREQUENCY, embed_features // 2 - 1, embed_features // 2)
        self.z = nnx.Param(positions(max_length, frequencies, param_dtype, sign=-1))
        self.kernels, self.biases = draw_network(widths, rngs, param_dtype)
        self.freq = nnx.Param(jnp.full((1, mlp_features), omega, param_dtype))
        self.t = Constant(unit_times(max_length, param_dtype))
        self.deltas = Constant(decays(order * features, param_dtype).reshape(order, features))

    def __call__(self, length: int) -> Float[Array, "order features length"]:
        """The first `length` taps, in at least float32."""
        order, features, max_length = self.shape
        check_time("length", length, max_length)
        freqs = [self.freq] * len(self.biases)
        h = run_network(wide(self.z)[:length], self.kernels, self.biases, freqs)
        if self.normalized:
            h = l1_normalized(h, axis=-1)
        h = h.T.reshape(order, features, length)
        if not self.modulate:
            return h
        decay = jnp.abs(wide(self.deltas))[..., None] * wide(self.t)[None, None, :length]
        return h * (jnp.exp(-decay) + self.shift)

    def torch_layouts(self) -> Layouts:
        """`hyena-dna`; `hyena-dna-file`, whose sines have one key; `safari`."""
        order, features, _ = self.shape
        last = len(self.biases)
        freqs = tuple(f"implicit_filter.{2 * i + 1}.freq" for i in range(last))
        common = [
            squeezed("z", "pos_emb.z", (0,)),
            squeezed("t", "pos_emb.t", (0, 2)),
            *(transposed(f"kernels.{i}", f"implicit_filter.{2 * i}.weight") for i in range(last)),
            *(same(f"biases.{i}", f"implicit_filter.{2 * i}.bias") for i in range(last)),
        ]
        deltas = squeezed("deltas", "modulation.deltas", (0, 1))
        deltas = reshaped(deltas, (order, features), (order * features,))
        outputs = transposed(f"kernels.{last}", f"implicit_filter.{2 * last}.weight")
        return {
            "hyena-dna": [*common, tied("freq", freqs), outputs, deltas],
            "hyena-dna-file": [*common, same("freq", freqs[0]), outputs, deltas],
            "safari": [
                *common,
                tied("freq", freqs),
                by_feature(outputs, order),
                by_feature(deltas, order, axis=2),
            ],
        }


def by_feature(row: Weight, order: int, axis: int = 0) -> Weight:
    """The row of a key that numbers the filters' features by feature first, then by filter."""

    def turned(a, rows: int, columns: int):
        shape = (*a.shape[:axis], rows, columns, *a.shape[axis + 1 :])
        return a.reshape(shape).swapaxes(axis, axis + 1).reshape(a.shape)

    return row._replace(
        to_jax=lambda a: row.to_jax(turned(a, -1, order)),
        to_torch=lambda a: (turned(row.to_torch(a)[0], order, -1),),
    )


class HyenaDNAMixer(HyenaOperator):
    """The Hyena operator of order N as safari and HyenaDNA have it, products before convolutions.

        >>> layer = HyenaDNAMixer(64, max_length=128, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        x_0, …, x_{N−1}, v = conv(u W + b)              conv: short, causal, depthwise
        v ← h_n ∗ (v ⊙ x_{N−n}) + B_n ⊙ v ⊙ x_{N−n}     n = 1 … N − 1; ∗: over the whole past
        y = activation(v ⊙ x_0) W_out + b_out

    x = u and y are (batch, time, features), the state `HyenaState(conv, long)`; h is
    `HyenaDNAFilter`. A step costs O(log² max_length) on average (`ops.online_conv`); outputs from
    step max_length on are NaN. For inference, `nnx.view(layer, fixed_filters=True)` computes the
    filters once.

    Args:
        features: size of u_t and y_t.
        max_length: the longest sequence.
        order: N, at least 2; there are N − 1 long convolutions.
        kernel_size: taps of the short convolution.
        dropout_rate: dropout of the output in training.
        embed_features: size of the filter's embedding of a position, odd.
        mlp_features: width of the filter's network.
        num_filter_layers: linear layers of the filter's network, at least 2.
        omega: frequency of the sines in the filter's network at first.
        shift: what the filter's window falls to.
        modulate: whether the filter's window is applied.
        normalized: whether the filter network's outputs at a step are divided by their L1 norm.
        filter_bias: whether B is added; if not, it is loaded and saved, but not used.
        activation: applied to v ⊙ x_0 before the output projection.
        **options: as in `LayerOptions`. W, W_out and the short convolution start as in torch, b and
            b_out at zero. The filters ignore both initializers.

    Raises:
        ValueError: order is less than 2, a size is not as the filter needs it, or (at the call) x
            is longer than max_length.
        NotImplementedError: (at the call) `reset`; give each document a batch row of its own.

    Layouts: those of `HyenaDNAFilter` (HyenaOperator of HyenaDNA's standalone file, and of safari).

    """

    def __init__(
        self,
        features: int,
        max_length: int,
        *,
        order: int = 2,
        kernel_size: int = 3,
        dropout_rate: float = 0.0,
        embed_features: int = 5,
        mlp_features: int = 64,
        num_filter_layers: int = 4,
        omega: float = 10.0,
        shift: float = 0.05,
        modulate: bool = True,
        normalized: bool = False,
        filter_bias: bool = True,
        activation: MixerActivation = "identity",
        **options: Unpack[LayerOptions],
    ):
        if order < 2:
            raise ValueError(f"order: expected at least 2, got {order}")
        make_filter = partial(
            HyenaDNAFilter,
            features,
            max_length,
            order=order - 1,
            embed_features=embed_features,
            mlp_features=mlp_features,
            num_filter_layers=num_filter_layers,
            omega=omega,
            shift=shift,
            modulate=modulate,
            normalized=normalized,
            **filter_options(options),
        )
        super().__init__(
            features,
            max_length,
            make_filter,
            order=order,
            num_filters=order - 1,
            kernel_size=kernel_size,
            dropout_rate=dropout_rate,
            **options,
        )
        self.activation: MixerActivation = activation
        self.filter_bias = filter_bias
        if not filter_bias:
            self.B = Constant(self.B[...])

    @property
    def skip(self) -> Float[Array, "filters features"]:
        """B, or zeros if `filter_bias` is False."""
        return self.B[...] if self.filter_bias else jnp.zeros_like(self.B[...])

    def operator(self, u, gates, v, convolve):
        """`v ← h ∗ (v ⊙ x)` for each gate x but the first, from the last on, then the output."""
        first, *others = gates
        for n, x in enumerate(reversed(others)):
            v = convolve(n, v * x)
        return self.output(ACTIVATIONS[self.activation](v * first))

    def torch_layouts(self) -> Layouts:
        """Those of the filter."""
        order, features = self.num_filters, self.in_features
        bias = reshaped(same("B", "filter_fn.bias"), (order, features), (order * features,))
        return {
            layout: [
                *linear("proj_input", "in_proj"),
                *nested(self.conv.torch_layouts()["hf"], "conv", "short_filter"),
                *nested(table, "filter", "filter_fn"),
                by_feature(bias, order) if layout == "safari" else bias,
                *linear("proj_output", "out_proj"),
            ]
            for layout, table in self.filter.torch_layouts().items()
        }


class HyenaDNAOptions(LayerOptions, total=False):
    """The keyword arguments that a block of HyenaDNA passes to its `HyenaDNAMixer`."""

    order: Annotated[int, Default(2)]
    """Order of the mixer, at least 2."""
    kernel_size: Annotated[int, Default(3)]
    """Taps of the mixer's short convolution."""
    embed_features: Annotated[int, Default(5)]
    """Size of the filter's embedding of a position, odd."""
    num_filter_layers: Annotated[int, Default(4)]
    """Linear layers of the filter's network, at least 2."""
    omega: Annotated[float, Default(10.0)]
    """Initial frequency of the sines in the filter's network."""
    shift: Annotated[float, Default(0.05)]
    """The value to which the filter's window falls."""
    modulate: Annotated[bool, Default(True)]
    """Whether the filter's window is applied."""
    normalized: Annotated[bool, Default(False)]
    """Whether the filter network's outputs at a step are divided by their L1 norm."""
    filter_bias: Annotated[bool, Default(True)]
    """Whether B is added. If False, B is loaded and saved, but not used."""
    activation: Annotated[MixerActivation, Default("identity")]
    """Applied to v ⊙ x_0 before the output projection."""


class HyenaDNABlock(ResidualBlock[HyenaState]):
    """The residual block of HyenaDNA.

        >>> layer = HyenaDNABlock(64, 256, max_length=128, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        x ← x + mixer(norm1(x))
        x ← x + gelu(norm2(x) W_up + b_up) W_down + b_down

    x is (batch, time, features). The mixer is a `HyenaDNAMixer`, whose state is the block's; gelu
    is the one by tanh.

    Args:
        features: size of x_t.
        mlp_features: width of the MLP.
        max_length: the longest sequence.
        filter_features: width of the filter's network.
        dropout_rate: dropout, in training, of what the mixer and the MLP add.
        **options: as in `HyenaDNAOptions` and `LayerOptions`; parameters start as in the mixer, the
            MLP's as in torch, its biases at zero.

    Raises:
        ValueError: a size is not as the mixer needs it.
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
        shared = only(LayerOptions, options)
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
        """Those of the mixer; `safari-checkpointed`, whose mixer and MLP are in a `layer`."""
        of_mixer = self.mixer.torch_layouts()

        def table(layout: str, wrapper: str = "") -> list[Weight]:
            return [
                *layer_norm("norm1", "norm1"),
                *nested(of_mixer[layout], "mixer", f"mixer{wrapper}"),
                *layer_norm("norm2", "norm2"),
                *linear("up_proj", f"mlp{wrapper}.fc1"),
                *linear("down_proj", f"mlp{wrapper}.fc2"),
            ]

        return {
            **{layout: table(layout) for layout in of_mixer},
            "safari-checkpointed": table("safari", ".layer"),
        }
