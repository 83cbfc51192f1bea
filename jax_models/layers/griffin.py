"""The blocks of Griffin, as RecurrentGemma has them (arXiv 2402.19427 and 2404.07839)."""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jax_models import ops
from jax_models.layers.activation import ACTIVATIONS, Gelu
from jax_models.layers.hawk import RGLRU, CausalConv1D, GatedMLP, normal_of_fan_in
from jax_models.layers.linear import Linear
from jax_models.layers.norm import ZeroCenteredRMSNorm
from jax_models.ops import CausalConv1DState, LocalAttentionState, RGLRUState
from jax_models.ops.checks import checked_positive
from jax_models.ops.rotary import checked_rotated
from jax_models.ops.segments import positions_and_end
from jax_models.options import FloatingDtype, Initializer, refuse_unused
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, dense, linear, nested, parts, rms_norm, transposed

CONV_VARIANCE = 0.01
"""Of a convolution's kernel, times its taps, at first."""


class LocalAttention(SequenceLayer[LocalAttentionState]):
    """Attention over a window, with rotary positions.

        >>> layer = LocalAttention(64, num_heads=4, window=16, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

    Each head is softmax(q kᵀ / √(features / heads)) v over the current step and the window − 1
    steps before it, where q and k are turned by `ops.rotary`. Then follows a projection. x and y
    are (batch, time, features), the state `LocalAttentionState(position, keys, values)` with the
    keys and values of the last window − 1 steps, turned. A step costs O(window).

    Args:
        features: size of x_t and y_t.
        num_heads: heads of the queries, each of size features / num_heads.
        num_kv_heads: heads of the keys and values, a divisor of num_heads; each serves as many
            neighboring heads of the queries.
        window: steps that a step sees, itself among them.
        rotary_fraction: the part of each head that is turned, the first of its features.
        rope_theta: θ of `ops.rotary`.
        use_bias: queries, keys and values have biases.
        out_bias: the last projection has a bias.
        time_major: x and y are (time, batch, features).
        dtype: the computation's dtype. None: from x and the parameters. The softmax and the
            state are in at least float32.
        param_dtype: the parameters' dtype.
        kernel_init: draws the matrices. None: normal, with the variance 1 / inputs.
        out_init: draws the last projection's matrix. None: as the others.
        bias_init: draws the biases. None: zero.
        rngs: draws the parameters.

    Raises:
        ValueError: a size is not positive, num_heads does not divide the features, num_kv_heads
            not num_heads, the part of a head that is turned is odd, or `bias_init` is given without
            biases.

    Layouts: `hf` (transformers' RecurrentGemmaAttention). With one head of keys and no biases of
    queries: `deepmind` (recurrentgemma's LocalAttentionBlock in Flax) and `deepmind-torch`. Without
    any biases: `hippogriff` (its SlidingMQA).

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int = 1,
        window: int = 2048,
        rotary_fraction: float = 0.5,
        rope_theta: float = 10_000.0,
        use_bias: bool = False,
        out_bias: bool = True,
        time_major: bool = False,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        kernel_init: Initializer | None = None,
        out_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(features, time_major=time_major, dtype=dtype, param_dtype=param_dtype)
        for name, count, whole in (
            ("num_heads", num_heads, features),
            ("num_kv_heads", num_kv_heads, num_heads),
        ):
            if whole % count:
                raise ValueError(f"{name}: expected a divisor of {whole}, got {count}")
        self.num_heads, self.num_kv_heads, self.window = num_heads, num_kv_heads, window
        self.head_features = features // num_heads
        rotated = int(self.head_features * rotary_fraction)
        self.rotated = checked_rotated("rotary_fraction", rotated, self.head_features)
        self.rope_theta = checked_positive("rope_theta", rope_theta)
        refuse_unused(
            "bias_init",
            bias_init,
            unless=use_bias or out_bias,
            because="with use_bias=False and out_bias=False",
        )
        init = kernel_init or normal_of_fan_in()
        options: dict[str, Any] = {
            "bias_init": bias_init or nnx.initializers.zeros,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "rngs": rngs,
        }
        of_keys = num_kv_heads * self.head_features
        self.q_proj = Linear(features, features, use_bias=use_bias, kernel_init=init, **options)
        self.k_proj = Linear(features, of_keys, use_bias=use_bias, kernel_init=init, **options)
        self.v_proj = Linear(features, of_keys, use_bias=use_bias, kernel_init=init, **options)
        self.out_proj = Linear(
            features, features, use_bias=out_bias, kernel_init=out_init or init, **options
        )

    def init_state(self, batch_size: int) -> LocalAttentionState:
        """No keys yet, in at least float32."""
        shape = (batch_size, self.window - 1, self.num_kv_heads, self.head_features)
        keys, values = jnp.zeros((2, *shape), self.state_dtype)
        return LocalAttentionState(jnp.zeros(batch_size, jnp.int32), keys, values)

    def sequence(self, x, state, lengths, reset):
        """`ops.local_attention` between projections."""
        x = x.astype(self.computation_dtype(x))
        batch_size, time, _ = x.shape
        positions, _ = positions_and_end(state.position, time, lengths, reset, self.time_axis)

        def heads(projection: Linear) -> Array:
            count = projection.out_features // self.head_features
            return projection(x).reshape(batch_size, time, count, self.head_features)

        rotary = {"rotated": self.rotated, "theta": self.rope_theta}
        q = ops.rotary(heads(self.q_proj), positions, **rotary)
        k = ops.rotary(heads(self.k_proj), positions, **rotary)
        y, state = ops.local_attention(
            q,
            k,
            heads(self.v_proj),
            state,
            lengths=lengths,
            reset=reset,
            time_axis=self.time_axis,
        )
        return self.out_proj(y.reshape(x.shape)), state

    def torch_layouts(self) -> Layouts:
        """`hf`: transformers' keys; those of packages, where they have such a layer."""
        bias = self.q_proj.use_bias
        inputs = ("q_proj", "k_proj", "v_proj")
        layouts = {
            "hf": [
                *(row for p in inputs for row in linear(p, p, bias=bias)),
                *linear("out_proj", "o_proj", bias=self.out_proj.use_bias),
            ]
        }
        if not (bias or self.out_proj.use_bias):
            layouts["hippogriff"] = [
                transposed("q_proj.kernel", "q.weight"),
                parts(["k_proj.kernel", "v_proj.kernel"], "kv.weight"),
                transposed("out_proj.kernel", "output.weight"),
            ]
        elif self.num_kv_heads == 1 and not bias:
            for layout, rows in (("deepmind", dense), ("deepmind-torch", linear)):
                layouts[layout] = [
                    *(row for p in inputs for row in rows(p, f"proj_{p[0]}", bias=False)),
                    *rows("out_proj", "proj_final"),
                ]
        return layouts


class GriffinRecurrenceState(NamedTuple):
    """What the recurrent half of a block carries."""

    position: Int[Array, " batch"]
    """Steps of the document so far."""
    conv: CausalConv1DState
    rglru: RGLRUState


class GriffinRecurrence(SequenceLayer[GriffinRecurrenceState]):
    """The recurrent block of RecurrentGemma.

        >>> layer = GriffinRecurrence(64, num_blocks=4, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        y = (gelu(x W_gate + b_gate) ⊙ rglru(conv(x W_rec + b_rec))) W_out + b_out

    x and y are (batch, time, features), the state
    `GriffinRecurrenceState(position, conv, rglru)`. `rglru` is
    `RGLRU(num_blocks=…, scale_first_step=False)`, whose position is the `position` of this state.

    Args:
        features: size of x_t and y_t.
        num_blocks: blocks of the gates of the RG-LRU.
        hidden_features: width of the recurrence. None: `features`.
        kernel_size: taps of the causal convolution.
        activation: which gelu.
        time_major: x and y are (time, batch, features).
        dtype: the computation's dtype. None: from x and the parameters.
        param_dtype: the parameters' dtype.
        kernel_init: draws the matrices and the convolution's kernel. None: as recurrentgemma does.
        out_init: draws W_out. None: as the other matrices.
        bias_init: draws the biases. None: zero.
        rngs: draws the parameters.

    Raises:
        ValueError: a size is not positive, or num_blocks does not divide hidden_features.

    Layouts: `hf` (transformers' RecurrentGemmaRecurrentBlock), `deepmind` (recurrentgemma's
    RecurrentBlock in Flax) and `deepmind-torch`.

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        num_blocks: int,
        *,
        hidden_features: int | None = None,
        kernel_size: int = 4,
        activation: Gelu = "gelu_tanh",
        time_major: bool = False,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        kernel_init: Initializer | None = None,
        out_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(features, time_major=time_major, dtype=dtype, param_dtype=param_dtype)
        hidden = features if hidden_features is None else hidden_features
        self.activation: Gelu = activation
        init = kernel_init or normal_of_fan_in()
        options: dict[str, Any] = {
            "bias_init": bias_init or nnx.initializers.zeros,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "rngs": rngs,
        }
        self.gate_proj = Linear(features, hidden, kernel_init=init, **options)
        self.recurrent_proj = Linear(features, hidden, kernel_init=init, **options)
        self.conv = CausalConv1D(
            hidden,
            kernel_size,
            kernel_init=kernel_init or normal_of_fan_in(CONV_VARIANCE),
            **options,
        )
        self.rglru = RGLRU(
            hidden,
            num_blocks=num_blocks,
            scale_first_step=False,
            kernel_init=kernel_init,
            **options,
        )
        self.out_proj = Linear(hidden, features, kernel_init=out_init or init, **options)

    def init_state(self, batch_size: int) -> GriffinRecurrenceState:
        """Zeros, in at least float32."""
        return GriffinRecurrenceState(
            jnp.zeros(batch_size, jnp.int32),
            self.conv.init_state(batch_size),
            self.rglru.init_state(batch_size)._replace(position=None),
        )

    def sequence(self, x, state, lengths, reset):
        """The gate times the recurrence of the convolution, projected."""
        x = x.astype(self.computation_dtype(x))
        gate = ACTIVATIONS[self.activation](self.gate_proj(x))
        u, conv = self.conv.sequence(self.recurrent_proj(x), state.conv, lengths, reset)
        rglru = state.rglru._replace(position=state.position)
        h, (last, position) = self.rglru.sequence(u, rglru, lengths, reset)
        state = state._replace(position=position, conv=conv, rglru=RGLRUState(last))
        return self.out_proj(gate * h), state

    def torch_layouts(self) -> Layouts:
        """`hf`: transformers' keys; recurrentgemma's."""
        projections = {
            "gate_proj": "linear_y",
            "recurrent_proj": "linear_x",
            "out_proj": "linear_out",
        }
        layouts = {}
        for layout, of_parts, rows in (
            ("hf", "hf", linear),
            ("deepmind", "deepmind", dense),
            ("deepmind-torch", "deepmind", linear),
        ):
            layouts[layout] = [
                *(row for param, key in projections.items() for row in rows(param, key)),
                *nested(self.conv.torch_layouts()[of_parts], "conv", "conv_1d"),
                *nested(self.rglru.torch_layouts()[of_parts], "rglru", "rg_lru"),
            ]
        return layouts


GriffinMixing = Literal["recurrent", "attention"]
"""What a block mixes the steps by."""


class GriffinBlock(SequenceLayer[GriffinRecurrenceState | LocalAttentionState]):
    """The residual block of RecurrentGemma.

        >>> layer = GriffinBlock(64, 96, num_heads=4, mixing="attention", rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        x ← x + mixing(norm(x))
        x ← x + mlp(norm(x))

    x is (batch, time, features). The mixing is a `GriffinRecurrence` or a `LocalAttention`, whose
    state is the block's; the norms are `ZeroCenteredRMSNorm`s, the MLP is a `GatedMLP` with biases.

    Args:
        features: size of x_t.
        mlp_features: width of the gated MLP.
        num_heads: heads of the attention, or blocks of the RG-LRU's gates.
        mixing: which of the two.
        recurrent_features: width of the recurrence. None: `features`.
        kernel_size: taps of the causal convolution.
        num_kv_heads: heads of the keys and values.
        window: steps that a step of the attention sees, itself among them.
        rotary_fraction: the part of each head that is turned by its position.
        rope_theta: θ of `ops.rotary`.
        attention_bias: queries, keys and values have biases.
        activation: which gelu.
        epsilon: ε of the norms.
        out_variance: the variance of W_out and W_down at first, times their inputs;
            2 / layers in recurrentgemma.
        time_major: x and y are (time, batch, features).
        dtype: the computation's dtype. None: from x and the parameters.
        param_dtype: the parameters' dtype.
        kernel_init: draws the matrices and the convolution's kernel. None: as recurrentgemma does.
        bias_init: draws the biases. None: zero.
        rngs: draws the parameters.

    Raises:
        ValueError: as `GriffinRecurrence` and `LocalAttention`, or `out_variance` is given with
            `kernel_init`, which draws these matrices, too.

    Layouts: `hf` (transformers' RecurrentGemmaDecoderLayer), `deepmind` (recurrentgemma's
    ResidualBlock in Flax) and `deepmind-torch`, where the mixing has them.

    """

    divides_time = True

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
        out_variance: float = 1.0,
        time_major: bool = False,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(features, time_major=time_major, dtype=dtype, param_dtype=param_dtype)
        self.mixing: GriffinMixing = mixing
        checked_positive("out_variance", out_variance)
        if kernel_init is not None and out_variance != 1:
            raise ValueError(
                "out_variance: expected 1 with a kernel_init, which draws W_out and W_down, too, "
                f"got {out_variance}"
            )
        out_init = kernel_init or normal_of_fan_in(out_variance)
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        init: dict[str, Any] = {"kernel_init": kernel_init, "bias_init": bias_init}
        self.temporal_pre_norm = ZeroCenteredRMSNorm(features, epsilon=epsilon, **options)
        self.temporal_block: SequenceLayer[Any]
        if mixing == "recurrent":
            self.temporal_block = GriffinRecurrence(
                features,
                num_heads,
                hidden_features=recurrent_features,
                kernel_size=kernel_size,
                activation=activation,
                out_init=out_init,
                **init,
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
                **init,
                **options,
            )
        self.channel_pre_norm = ZeroCenteredRMSNorm(features, epsilon=epsilon, **options)
        init["kernel_init"] = kernel_init or normal_of_fan_in()
        self.mlp = GatedMLP(
            features,
            mlp_features,
            use_bias=True,
            activation=activation,
            down_init=out_init,
            **init,
            **options,
        )

    def init_state(self, batch_size: int) -> GriffinRecurrenceState | LocalAttentionState:
        """The state of the mixing."""
        return self.temporal_block.init_state(batch_size)

    def sequence(self, x, state, lengths, reset):
        """The mixing, then the gated MLP, each after a norm and added to its input."""
        x = x.astype(self.computation_dtype(x))
        y, state = self.temporal_block.sequence(self.temporal_pre_norm(x), state, lengths, reset)
        x = x + y
        return x + self.mlp(self.channel_pre_norm(x)), state

    def torch_layouts(self) -> Layouts:
        """`hf`: transformers' keys; recurrentgemma's, where the mixing has them."""
        of_mixing, of_mlp = self.temporal_block.torch_layouts(), self.mlp.torch_layouts()
        layouts = {}
        for layout, mixing in of_mixing.items():
            hf = layout == "hf"
            layouts[layout] = [
                *nested(
                    mixing, "temporal_block", "temporal_block" if hf else f"{self.mixing}_block"
                ),
                *nested(of_mlp[layout], "mlp", "mlp_block"),
                *(
                    row
                    for norm in ("temporal_pre_norm", "channel_pre_norm")
                    for row in rms_norm(norm, norm, "weight" if hf else "scale")
                ),
            ]
        return layouts
