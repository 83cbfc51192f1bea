"""The layers of hippogriff, a package to train Griffin from scratch (arXiv 2402.19427)."""

__all__ = ["HippogriffBlock", "HippogriffHawk", "HippogriffState"]

import math
from functools import partial
from typing import Literal, NamedTuple, Unpack

import jax.numpy as jnp

from jax_models.layers.hawk import GatedRecurrence, HawkState
from jax_models.layers.linear import normal_of_fan_in, torch_uniform
from jax_models.layers.local_attention import LocalAttention
from jax_models.layers.mlp import GatedMLP
from jax_models.layers.norm import RootMeanSquareNorm
from jax_models.layers.residual import run_residual_block
from jax_models.ops import LocalAttentionState
from jax_models.options import LayerOptions, norm_options, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import (
    Layouts,
    Weight,
    layouts_of,
    nested,
    parts,
    rms_norm,
    same,
    squeezed,
    transposed,
)
from jax_models.weights.constant import Constant

SLOWEST, FASTEST = -9.0, -4.323
"""The smallest and the largest initial a_param, for which a^c is 0.999 and 0.9."""
EPSILON = 1e-6
"""Added under the square root of the RG-LRU."""

Version = Literal["0.0.2", "0.0.3"]
"""The version of hippogriff, which decides the keys, the order of a block's layers and whether c is
stored."""


class HippogriffNorm(RootMeanSquareNorm):
    """`x / √mean(x²) · scale` over the features; zeros stay zeros."""

    def scaled(self, x, square, scale):
        """Normalizes without ε."""
        return x / jnp.sqrt(jnp.where(square > 0, square, 1)) * scale


class HippogriffHawk(GatedRecurrence[HawkState]):
    """The recurrent block of hippogriff.

        >>> layer = HippogriffHawk(64, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        y = (gelu(x W_gate) ⊙ rglru(conv(x W_rec))) W_out
        a_t = e^{−c softplus(a_param) ⊙ σ(u_t W_r + b_r)}
        h_t = a_t ⊙ h_{t−1} + √(1 − a_t² + 1e-6) ⊙ σ(u_t W_i + b_i) ⊙ u_t

    u is the output of the convolution, h is the output of the RG-LRU, and c is 8. In version 0.0.3,
    c is e^log_c, where log_c is loaded and saved but not trained. x and y are (batch, time,
    features), and the state is `HawkState(conv, rglru)`. gelu is the exact GELU, with erf.

    Args:
        features: size of x_t and y_t.
        hidden_features: width of the recurrence. None: 3/2 of `features`, rounded down.
        kernel_size: taps of the causal convolution. None: no convolution, u = x W_rec.
        version: the version of hippogriff.
        **options: as in `LayerOptions`. The projections and the gate matrices are drawn from a
            normal distribution with variance 1 / inputs, and the convolution and the biases from a
            uniform one, as in torch.

    Raises:
        ValueError: a size is not positive, or there is no such version.

    Layouts: `hippogriff` (its Hawk).

    """

    def __init__(
        self,
        features: int,
        *,
        hidden_features: int | None = None,
        kernel_size: int | None = 4,
        version: Version = "0.0.2",
        **options: Unpack[LayerOptions],
    ):
        hidden = 3 * features // 2 if hidden_features is None else hidden_features
        bias_init = options.get("bias_init") or torch_uniform(hidden)
        super().__init__(
            features,
            hidden,
            kernel_size,
            matrix=with_inits(options, normal_of_fan_in(), None, use_bias=False),
            conv={**options},
            rglru={**options, "num_blocks": 1, "epsilon": EPSILON, "bias_init": bias_init},
        )
        if version == "0.0.2":
            self.log_c = None
            a_param = jnp.linspace(FASTEST, SLOWEST, hidden)
        else:
            self.log_c = Constant(jnp.asarray(math.log(self.rglru.c), self.param_dtype))
            # a_param is computed from evenly spaced values of −log a, and then rescaled to the same
            # range as in version 0.0.2.
            a_param = jnp.log(jnp.expm1(jnp.linspace(0.001, 0.1, hidden)))
            unit = (a_param - a_param[0]) / jnp.maximum(a_param[-1] - a_param[0], 1e-6)
            a_param = SLOWEST + (FASTEST - SLOWEST) * unit
        self.rglru.a_param[...] = a_param.astype(self.param_dtype)

    def recurrence(self, u, state, rows):
        """Runs the RG-LRU with the stored c, if there is one, and returns the block's new state."""
        c = None if self.log_c is None else jnp.exp(self.log_c[...].astype(self.state_dtype))
        h, rglru = self.rglru.sequence(u, state.rglru, rows, c=c)
        return h, state._replace(rglru=rglru)

    def torch_layouts(self) -> Layouts:
        """`hippogriff`: the keys of its Hawk."""
        conv = [] if self.conv is None else nested(self.conv.torch_rows(), "conv", "conv")
        return {
            "hippogriff": [
                parts(["gate_proj.kernel", "recurrent_proj.kernel"], "input.weight"),
                *conv,
                *([] if self.log_c is None else [squeezed("log_c", "alpha_log_scale", (0,))]),
                same("rglru.a_param", "forget_base"),
                _gates("kernel", "gates.weight"),
                _gates("bias", "gates.bias"),
                transposed("out_proj.kernel", "output.weight"),
            ]
        }


def _gates(part: str, key: str) -> Weight:
    """The row of both gates, which are stored side by side under one key."""
    row = parts([f"rglru.{gate}_gate.{part}" for gate in ("recurrence", "input")], key)
    return row._replace(
        to_jax=lambda a: tuple(value[None] for value in row.to_jax(a)),
        to_torch=lambda *values: row.to_torch(*(value[0] for value in values)),
    )


class HippogriffState(NamedTuple):
    """The state of a block of hippogriff."""

    hawk: HawkState
    attention: LocalAttentionState | None
    """None in a block without attention."""


class HippogriffBlock(SequenceLayer[HippogriffState]):
    """The block of hippogriff: a recurrence and attention, each followed by an MLP.

        >>> layer = HippogriffBlock(64, 128, num_heads=4, window=17, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        x ← x + hawk(norm(x)),         x ← x + mlp(norm(x))
        x ← x + attention(norm(x)),    x ← x + mlp(norm(x))

    This is the order of version 0.0.2; in version 0.0.3 the second line comes first. x is (batch,
    time, features), and the state is `HippogriffState(hawk, attention)`. The layers are a
    `HippogriffHawk`, two `GatedMLP`s and a `LocalAttention` that has no biases and applies rotary
    positions to whole heads. The norms are `HippogriffNorm`s.

    Args:
        features: size of x_t.
        mlp_features: width of the gated MLPs; twice `features` in hippogriff.
        num_heads: number of heads of the queries. None: no attention, so the block is only the
            first line above.
        hidden_features: width of the recurrence. None: 3/2 of `features`, rounded down.
        kernel_size: taps of the causal convolution. None: no convolution.
        num_kv_heads: number of heads of the keys and values.
        window: number of steps that the attention sees from each step, including the step itself.
            This is hippogriff's smqa_window_size plus one.
        version: the version of hippogriff.
        **options: as in `LayerOptions`; parameters are initialized as in `HippogriffHawk`.

    Raises:
        ValueError: as for `HippogriffHawk` and `LocalAttention`, or the size of a head is odd.

    Layouts: `hippogriff` (its Griffin).

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        mlp_features: int,
        num_heads: int | None,
        *,
        hidden_features: int | None = None,
        kernel_size: int | None = 4,
        num_kv_heads: int = 1,
        window: int = 513,
        version: Version = "0.0.2",
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        if num_heads is not None and features % (2 * num_heads):
            raise ValueError(f"num_heads: expected heads of an even size, got {num_heads} of them")
        matrix = with_inits(options, normal_of_fan_in(), None)
        norm = partial(HippogriffNorm, features, **norm_options(options))
        # Each mixer comes after a norm, and is followed by an MLP with its own norm.
        self.version = version
        self.hawk_norm = norm()
        self.hawk = HippogriffHawk(
            features,
            hidden_features=hidden_features,
            kernel_size=kernel_size,
            version=version,
            **options,
        )
        self.hawk_mlp_norm = norm()
        self.hawk_mlp = GatedMLP(features, mlp_features, **matrix)
        if num_heads is None:
            self.attention = None
            return
        self.attention_norm = norm()
        self.attention = LocalAttention(
            features,
            num_heads,
            num_kv_heads=num_kv_heads,
            window=window,
            rotary_fraction=1.0,
            out_bias=False,
            **matrix,
        )
        self.attention_mlp_norm = norm()
        self.attention_mlp = GatedMLP(features, mlp_features, **matrix)

    def init_state(self, batch_size: int) -> HippogriffState:
        """Zeros, and an empty cache of keys and values."""
        attention = None if self.attention is None else self.attention.init_state(batch_size)
        return HippogriffState(self.hawk.init_state(batch_size), attention)

    def sequence(self, x, state, rows):
        """Runs the mixers and their MLPs, each after a norm and added to its input."""
        x = x.astype(self.computation_dtype(x))
        # Run the mixers in the version's order, each with its norm and followed by its MLP. Each
        # has its own part of the state.
        mixers = ["hawk"] if self.attention is None else ["hawk", "attention"]
        for name in mixers if self.version == "0.0.2" else reversed(mixers):
            block = (getattr(self, f"{name}{part}") for part in ("_norm", "", "_mlp_norm", "_mlp"))
            x, last = run_residual_block(x, getattr(state, name), rows, *block)
            state = state._replace(**{name: last})
        return x, state

    def torch_layouts(self) -> Layouts:
        """`hippogriff`: the keys of its Griffin."""
        names = {"hawk": "hawk", "hawk_mlp": "hawk_gmlp"}
        if self.version == "0.0.3":
            names = {"hawk": "time", "hawk_mlp": "gmlp"}
        if self.attention is not None:
            names |= {"attention": "smqa", "attention_mlp": "smqa_gmlp"}
        rows = []
        for part, key in names.items():
            table = getattr(self, part).torch_layouts()["hippogriff"]
            rows += [*rms_norm(f"{part}_norm", f"{key}_norm", "gamma"), *nested(table, part, key)]
        return {"hippogriff": rows}


@layouts_of(LocalAttention)
def attention_layouts(attention: LocalAttention) -> Layouts:
    """`hippogriff`: the keys of its SlidingMQA, which has no biases."""
    if attention.q_proj.use_bias or attention.out_proj.use_bias:
        return {}
    return {
        "hippogriff": [
            transposed("q_proj.kernel", "q.weight"),
            parts(["k_proj.kernel", "v_proj.kernel"], "kv.weight"),
            transposed("out_proj.kernel", "output.weight"),
        ]
    }


@layouts_of(GatedMLP)
def mlp_layouts(mlp: GatedMLP) -> Layouts:
    """`hippogriff`: the keys of its GatedMLP, which has no biases."""
    if mlp.use_bias:
        return {}
    return {
        "hippogriff": [
            parts(["gate_proj.kernel", "up_proj.kernel"], "grow.weight"),
            transposed("down_proj.kernel", "shrink.weight"),
        ]
    }
