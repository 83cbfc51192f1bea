"""The blocks of Griffin as implemented in RecurrentGemma (arXiv 2402.19427 and 2404.07839)."""

__all__ = ["GriffinBlock", "GriffinRecurrence", "GriffinRecurrenceState"]

from functools import partial
from typing import Any, Literal, NamedTuple, Unpack

from jaxtyping import Array, Int

from jax_models.checks.values import Positive
from jax_models.layers.activation import Gelu
from jax_models.layers.conv import CausalConv1D
from jax_models.layers.hawk import GatedRecurrence
from jax_models.layers.linear import normal_of_fan_in
from jax_models.layers.local_attention import LocalAttention
from jax_models.layers.mlp import GatedMLP
from jax_models.layers.norm import ZeroCenteredRMSNorm
from jax_models.layers.residual import ResidualBlock
from jax_models.layers.rg_lru import RGLRU
from jax_models.ops import CausalConv1DState, LocalAttentionState, RGLRUState
from jax_models.options import Initializer, LayerOptions, norm_options, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import (
    Layouts,
    dense,
    layouts_of,
    linear,
    nested,
    rms_norm,
    same,
    stacked,
)

CONV_VARIANCE = 0.01
"""The initial variance of a convolution's kernel, multiplied by its number of taps."""


class GriffinRecurrenceState(NamedTuple):
    """The state of the recurrent half of a block."""

    position: Int[Array, " batch"]
    """The number of steps of the document so far."""
    conv: CausalConv1DState
    rglru: RGLRUState


class GriffinRecurrence(GatedRecurrence[GriffinRecurrenceState]):
    """The recurrent block of RecurrentGemma.

        >>> layer = GriffinRecurrence(64, num_blocks=4, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        y = (gelu(x W_gate + b_gate) ⊙ rglru(conv(x W_rec + b_rec))) W_out + b_out

    x and y are (batch, time, features), and the state is
    `GriffinRecurrenceState(position, conv, rglru)`. `rglru` is an
    `RGLRU(num_blocks=…, scale_first_step=False)`, whose position is stored as the `position` of
    this state.

    Args:
        features: size of x_t and y_t.
        num_blocks: number of diagonal blocks of the RG-LRU's gate matrices.
        hidden_features: width of the recurrence. None: `features`.
        kernel_size: taps of the causal convolution.
        activation: which gelu.
        out_init: initializes W_out. None: like the other matrices.
        **options: as in `LayerOptions`. As in recurrentgemma, matrices are drawn from a normal
            distribution with variance 1 / inputs, the convolution's kernel with variance
            0.01 / taps, and biases are zero.

    Raises:
        ValueError: a size is not positive, or num_blocks does not divide hidden_features.

    Layouts: `hf` (transformers' RecurrentGemmaRecurrentBlock), `deepmind` (recurrentgemma's
    RecurrentBlock in Flax) and `deepmind-torch`.

    """

    def __init__(
        self,
        features: int,
        num_blocks: int,
        *,
        hidden_features: int | None = None,
        kernel_size: int = 4,
        activation: Gelu = "gelu_tanh",
        out_init: Initializer | None = None,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(
            features,
            features if hidden_features is None else hidden_features,
            kernel_size,
            matrix=with_inits(options, normal_of_fan_in()),
            conv=with_inits(options, normal_of_fan_in(CONV_VARIANCE)),
            rglru={**options, "num_blocks": num_blocks, "scale_first_step": False},
            out_init=out_init,
            activation=activation,
        )

    def init_state(self, batch_size: int) -> GriffinRecurrenceState:
        conv, (h, position) = super().init_state(batch_size)
        return GriffinRecurrenceState(position, conv, RGLRUState(h))

    def recurrence(self, u, state, rows):
        """Runs the RG-LRU from the block's position, and returns the block's new state."""
        before = state.rglru._replace(position=state.position)
        h, (last, position) = self.rglru.sequence(u, before, rows)
        return h, state._replace(position=position, rglru=RGLRUState(last))

    def torch_layouts(self) -> Layouts:
        """`hf` has the keys of transformers, the others those of recurrentgemma."""
        projections = {
            "gate_proj": "linear_y",
            "recurrent_proj": "linear_x",
            "out_proj": "linear_out",
        }
        layouts = {}
        for layout, part_layout, rows in (
            ("hf", "hf", linear),
            ("deepmind", "deepmind", dense),
            ("deepmind-torch", "deepmind", linear),
        ):
            layouts[layout] = [
                *(row for param, key in projections.items() for row in rows(param, key)),
                *self.part_rows(part_layout, "conv_1d", "rg_lru"),
            ]
        return layouts


GriffinMixing = Literal["recurrent", "attention"]
"""The kinds of layer that mix the steps of a block."""


class GriffinBlock(ResidualBlock[GriffinRecurrenceState | LocalAttentionState]):
    """The residual block of RecurrentGemma.

        >>> layer = GriffinBlock(64, 96, num_heads=4, mixing="attention", rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        x ← x + mixing(norm(x))
        x ← x + mlp(norm(x))

    x is (batch, time, features). The mixing layer is a `GriffinRecurrence` or a `LocalAttention`,
    and its state is the state of the block. The norms are `ZeroCenteredRMSNorm`s, and the MLP is a
    `GatedMLP` with biases.

    Args:
        features: size of x_t.
        mlp_features: width of the gated MLP.
        num_heads: number of heads of the attention, or of diagonal blocks of the RG-LRU's gates.
        mixing: whether the mixing layer is a recurrence or attention.
        recurrent_features: width of the recurrence. None: `features`.
        kernel_size: taps of the causal convolution.
        num_kv_heads: number of heads of the keys and values.
        window: number of steps that the attention sees from each step, including the step itself.
        rotary_fraction: the fraction of each head that is rotated by its position.
        rope_theta: θ of `ops.rotary`.
        attention_bias: whether queries, keys and values have biases.
        activation: which gelu.
        epsilon: ε of the norms.
        out_variance: the initial variance of W_out and W_down, multiplied by their number of
            inputs. recurrentgemma uses 2 / layers.
        **options: as in `LayerOptions`; parameters are initialized as in recurrentgemma.

    Raises:
        ValueError: as for `GriffinRecurrence` and `LocalAttention`, or `out_variance` is given with
            `kernel_init`, which also initializes these matrices.

    Layouts: `hf` (transformers' RecurrentGemmaDecoderLayer), and if the mixing layer has them,
    `deepmind` (recurrentgemma's ResidualBlock in Flax) and `deepmind-torch`.

    """

    parts = ("temporal_pre_norm", "temporal_block", "channel_pre_norm", "mlp")

    def __init__(
        self,
        features: int,
        mlp_features: int,
        num_heads: int,
        *,
        mixing: GriffinMixing = "recurrent",
        recurrent_features: int | None = None,
        kernel_size: int = 4,
        num_kv_heads: int = 1,
        window: int = 2048,
        rotary_fraction: float = 0.5,
        rope_theta: float = 10_000.0,
        attention_bias: bool = False,
        activation: Gelu = "gelu_tanh",
        epsilon: float = 1e-6,
        out_variance: Positive = 1.0,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        self.mixing: GriffinMixing = mixing
        kernel_init = options.get("kernel_init")
        if kernel_init is not None and out_variance != 1:
            raise ValueError(
                "out_variance: expected 1 with a kernel_init, which also sets W_out and W_down, "
                f"got {out_variance}"
            )
        # W_out and W_down start smaller in deep models, so that the residuals stay small.
        out_init = kernel_init or normal_of_fan_in(out_variance)
        norm = partial(ZeroCenteredRMSNorm, features, epsilon=epsilon, **norm_options(options))
        self.temporal_pre_norm = norm()
        # Each kind of mixing layer takes some arguments that the other lacks.
        self.temporal_block: SequenceLayer[Any]
        if mixing == "recurrent":
            self.temporal_block = GriffinRecurrence(
                features,
                num_heads,
                hidden_features=recurrent_features,
                kernel_size=kernel_size,
                activation=activation,
                out_init=out_init,
                **options,
            )
        else:
            self.temporal_block = LocalAttention(
                features,
                num_heads,
                num_kv_heads=num_kv_heads,
                window=window,
                rotary_fraction=rotary_fraction,
                rope_theta=rope_theta,
                use_bias=attention_bias,
                out_init=out_init,
                **options,
            )
        self.channel_pre_norm = norm()
        self.mlp = GatedMLP(
            features,
            mlp_features,
            use_bias=True,
            activation=activation,
            down_init=out_init,
            **with_inits(options, normal_of_fan_in()),
        )

    def torch_layouts(self) -> Layouts:
        """`hf` has the keys of transformers, the others those of recurrentgemma."""
        mixing_layouts, mlp_layouts = self.temporal_block.torch_layouts(), self.mlp.torch_layouts()
        layouts = {}
        for layout, mixing in mixing_layouts.items():
            hf = layout == "hf"
            layouts[layout] = [
                *nested(
                    mixing, "temporal_block", "temporal_block" if hf else f"{self.mixing}_block"
                ),
                *nested(mlp_layouts[layout], "mlp", "mlp_block"),
                *(
                    row
                    for norm in ("temporal_pre_norm", "channel_pre_norm")
                    for row in rms_norm(norm, norm, "weight" if hf else "scale")
                ),
            ]
        return layouts


@layouts_of(RGLRU)
def rglru_layouts(rglru: RGLRU) -> Layouts:
    """`hf` and `deepmind`: the keys of transformers and of recurrentgemma, with blocks."""
    if rglru.num_blocks is None:
        return {}
    gates = ("input_gate", "recurrence_gate")
    params = ("a_param", *(f"{gate}.{part}" for gate in gates for part in ("kernel", "bias")))
    names = {
        "hf": (
            "recurrent_param",
            "input_gate_weight",
            "input_gate_bias",
            "recurrent_gate_weight",
            "recurrent_gate_bias",
        ),
        "deepmind": ("a_param", "input_gate.w", "input_gate.b", "a_gate.w", "a_gate.b"),
    }
    return {
        layout: [same(param, key) for param, key in zip(params, keys, strict=True)]
        for layout, keys in names.items()
    }


@layouts_of(CausalConv1D)
def conv_layouts(conv: CausalConv1D) -> Layouts:
    """`deepmind`: the keys of recurrentgemma's Conv1D."""
    bias = [] if conv.bias is None else [same("bias", "b")]
    return {"deepmind": [same("kernel", "w"), *bias]}


@layouts_of(LocalAttention)
def attention_layouts(attention: LocalAttention) -> Layouts:
    """`hf`: the keys of transformers. With one head of keys, those of recurrentgemma."""
    names = ("q_proj", "k_proj", "v_proj")
    layouts = {"hf": attention.rows(*names, "o_proj", "q_norm", "k_norm")}
    has_bias = attention.q_proj.use_bias
    if attention.num_kv_heads == 1 and attention.out_proj.use_bias and not has_bias:
        for layout, rows in (("deepmind", dense), ("deepmind-torch", linear)):
            layouts[layout] = [
                *(row for n in "qkv" for row in rows(f"{n}_proj", f"proj_{n}", bias=False)),
                *rows("out_proj", "proj_final"),
            ]
    return layouts


@layouts_of(GatedMLP)
def mlp_layouts(mlp: GatedMLP) -> Layouts:
    """`hf` has the keys of transformers, the others those of recurrentgemma; all have biases."""
    if not mlp.use_bias:
        return {}
    up = [
        stacked(("gate_proj.kernel", "up_proj.kernel"), "ffw_up.w"),
        stacked(("gate_proj.bias", "up_proj.bias"), "ffw_up.b", (1, 2)),
    ]
    return {
        "hf": mlp.rows("gate_proj", "up_proj", "down_proj"),
        "deepmind": [*up, *dense("down_proj", "ffw_down")],
        "deepmind-torch": [*up, *linear("down_proj", "ffw_down")],
    }
