"""RWKV-4 (arXiv 2305.13048), with the parameter names of BlinkDL's code."""

__all__ = [
    "RWKVBlock",
    "RWKVBlockState",
    "RWKVChannelMix",
    "RWKVChannelMixState",
    "RWKVTimeMix",
    "RWKVTimeMixState",
    "WKVState",
]

import math
from collections.abc import Iterable
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.layers.rwkv_parts import (
    LARGEST_DECAY,
    ChannelMix,
    RWKVBlockState,
    RWKVChannelMixState,
    RWKVOptions,
    RWKVResidualBlock,
    depth_and_height,
    matrix_builder,
    orthogonal,
    token_shift,
)
from jax_models.layers.rwkv_version import foreign_to
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.ops import WKVState, carry_dtype
from jax_models.ops.linear.wkv import WKV
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, Weight, linear, same, squeezed

MIXES = ("key", "value", "receptance")
"""The projections of the time mix. Each reads its own mixture of the last two inputs."""


class RWKVTimeMixState(NamedTuple):
    """The state of a time mix: its last input, and the sums over the past."""

    last: Float[Array, "batch features"]
    wkv: WKVState


class RWKVTimeMix(SequenceLayer[RWKVTimeMixState]):
    """The time mix of RWKV-4, which takes the place of attention.

        >>> layer = RWKVTimeMix(64, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        r, k, v = (μ ⊙ x_t + (1 − μ) ⊙ x_{t−1}) W, each with its own μ and W
        wkv_t = (Σ_{i<t} e^{−(t−1−i)w + k_i} v_i + e^{u + k_t} v_t)
              / (Σ_{i<t} e^{−(t−1−i)w + k_i} + e^{u + k_t})
        y_t = (σ(r) ⊙ wkv_t) W_o

    Here w = exp(time_decay) and u = time_first. `ops.wkv` computes wkv_t without overflow. x and y
    are (batch, time, features). The state is `RWKVTimeMixState(last, wkv)`, where wkv is a
    `WKVState(num, den, max)`, and each array is (batch, features).

    Args:
        features: size of x_t and y_t.
        method: the method of `ops.wkv`.
        **options: as in `RWKVOptions`. As in RWKV-4, W_v is initialized to an orthogonal matrix and
            the other three W to zero.

    Raises:
        ValueError: a size is not positive, or layer_index is not less than num_layers.

    Layouts: `blinkdl` (RWKV-LM's RWKV_TimeMix), `hf` (transformers' RwkvSelfAttention).

    """

    divides_time = True

    def __init__(
        self, features: int, *, method: ops.WKVMethod = "auto", **options: Unpack[RWKVOptions]
    ):
        super().__init__(features, **options)
        self.method = WKV.checked_method(method)
        depth, height = depth_and_height(options)
        channel = np.arange(features)
        width = channel / max(features - 1, 1)
        mix = (channel / features) ** height

        def param(value) -> nnx.Param:
            return nnx.Param(jnp.asarray(value, self.param_dtype))

        # As in RWKV-4's training code, vectors are initialized by functions of the layer and the
        # channel.
        self.time_decay = param(8 * width ** (0.7 + 1.3 * depth) - 5)
        self.time_first = param(math.log(0.3) + 0.5 * ((channel + 1) % 3 - 1))
        self.time_mix_k = param(mix)
        self.time_mix_v = param(mix + 0.3 * depth)
        self.time_mix_r = param(mix**0.5)
        matrix = matrix_builder(options)
        self.key = matrix(features, features)
        self.value = matrix(features, features, orthogonal)
        self.receptance = matrix(features, features)
        self.output = matrix(features, features)

    foreign_format = staticmethod(foreign_to("RWKV-4"))

    def init_state(self, batch_size: int) -> RWKVTimeMixState:
        """A last input of zeros and empty sums, in at least float32."""
        dtype = self.state_dtype
        wkv = ops.empty_wkv_state(batch_size, self.in_features, dtype)
        return RWKVTimeMixState(jnp.zeros_like(wkv.num), wkv)

    def sequence(self, x, state, rows):
        """Multiplies the weighted average of the past by the receptance, and projects it."""
        dtype = self.computation_dtype(x)
        x = x.astype(dtype)
        # Each projection reads its own mixture of the current and the previous input.
        previous, last = token_shift(x, state.last, rows)
        k = self.key(mix_with_previous(self.time_mix_k, x, previous))
        v = self.value(mix_with_previous(self.time_mix_v, x, previous))
        r = self.receptance(mix_with_previous(self.time_mix_r, x, previous))
        # Average the values of the past with weights e^k, which decay with time. The current value
        # has a bonus u instead of the decay.
        y, wkv = ops.wkv(
            k,
            v,
            state.wkv,
            w=jnp.exp(jnp.minimum(self.time_decay[...].astype(carry_dtype(dtype)), LARGEST_DECAY)),
            u=self.time_first[...],
            rows=rows,
            method=self.method,
        )
        # Gate by the receptance, and project back.
        y = self.output(jax.nn.sigmoid(r) * y.astype(dtype))
        return y, RWKVTimeMixState(last, wkv)

    mesh_axes = last_axis(
        "features", "receptance", "key", "value", "time_decay", "time_first"
    ) | first_axis("features", "output.kernel")

    def torch_layouts(self) -> Layouts:
        """`blinkdl`: the keys of a block's `att`; `hf`: those of its `attention`."""
        return mix_layouts(
            same("time_decay", "time_decay"),
            same("time_first", "time_first"),
            *(row for name in (*MIXES, "output") for row in linear(name, name, bias=False)),
            mixes=MIXES,
        )


class RWKVChannelMix(ChannelMix):
    """The channel mix of RWKV-4, its feed-forward part.

        >>> layer = RWKVChannelMix(64, 256, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        r, k = (μ ⊙ x_t + (1 − μ) ⊙ x_{t−1}) W, each with its own μ and W
        y_t = σ(r) ⊙ (max(k, 0)² W_v)

    x and y are (batch, time, features), and the state is `RWKVChannelMixState(last)`, where last is
    (batch, features).

    Args:
        features: size of x_t and y_t.
        hidden_features: size of k; four times `features` in RWKV-4.
        **options: as in `RWKVOptions`. W_k is initialized to an orthogonal matrix, the others to
            zero.

    Raises:
        ValueError: a size is not positive, or layer_index is not less than num_layers.

    Layouts: `blinkdl` (RWKV-LM's RWKV_ChannelMix), `hf` (transformers' RwkvFeedForward).

    """

    prefix = "time_mix_"

    def first_mix(self, channel, height):
        return channel**height

    def mix_with_previous(self, letter, x, previous):
        """`μ ⊙ x_t + (1 − μ) ⊙ x_{t−1}`."""
        return mix_with_previous(getattr(self, f"{self.prefix}{letter}"), x, previous)

    def torch_layouts(self) -> Layouts:
        """`blinkdl`: the keys of a block's `ffn`; `hf`: those of its `feed_forward`."""
        rows = (row for name in MIXES for row in linear(name, name, bias=False))
        return mix_layouts(*rows, mixes=("key", "receptance"))


def mix_layouts(*rows: Weight, mixes: Iterable[str]) -> Layouts:
    """The layouts of a mix. BlinkDL names each μ by the first letter of its projection."""
    letters = {"blinkdl": 1, "hf": None}
    return {
        layout: [
            *(squeezed(f"time_mix_{m[0]}", f"time_mix_{m[:count]}", (0, 1)) for m in mixes),
            *rows,
        ]
        for layout, count in letters.items()
    }


class RWKVBlock(RWKVResidualBlock[RWKVTimeMixState]):
    """A residual block of RWKV-4.

        >>> layer = RWKVBlock(64, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        x ← ln0(x)              in the lowest layer only
        x ← x + att(ln1(x))
        x ← x + ffn(ln2(x))

    x is (batch, time, features), and the state is `RWKVBlockState(att, ffn)`.

    Args:
        features: size of x_t.
        hidden_features: size of the channel mix's k. None: four times `features`.
        **options: as in `RWKVOptions`; parameters are initialized as in RWKV-4.

    Raises:
        ValueError: a size is not positive, or layer_index is not less than num_layers.

    Layouts: `blinkdl` (RWKV-LM's Block), `hf` (transformers' RwkvBlock).

    """

    def __init__(
        self, features: int, hidden_features: int | None = None, **options: Unpack[RWKVOptions]
    ):
        super().__init__(features, **options)
        self.att = RWKVTimeMix(features, **options)
        self.ffn = RWKVChannelMix(features, hidden_features or 4 * features, **options)

    foreign_format = staticmethod(foreign_to("RWKV-4"))


def mix_with_previous(mu: nnx.Param, x, previous) -> Float[Array, "batch time features"]:
    """`μ ⊙ x_t + (1 − μ) ⊙ x_{t−1}`."""
    weight = jnp.broadcast_to(mu[...].astype(x.dtype), x.shape)
    return x * weight + previous * (1 - weight)
