"""RWKV-6, Finch (arXiv 2404.05892), with the parameter names of BlinkDL's x060 code."""

__all__ = ["RWKV6Block", "RWKV6ChannelMix", "RWKV6TimeMix", "RWKV6TimeMixState"]

from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.layers.norm import GroupNorm
from jax_models.layers.rwkv_parts import (
    LARGEST_DECAY,
    ChannelMix,
    HeadedTimeMix,
    RWKVOptions,
    RWKVResidualBlock,
    depth_and_height,
    heads_of,
    lerp_to_previous,
    low_rank,
    matrix_builder,
    orthogonal,
    scaled_orthogonal,
    token_shift,
    unit_orthogonal,
)
from jax_models.layers.rwkv_version import foreign_to
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.ops import carry_dtype
from jax_models.options import norm_options
from jax_models.weights import (
    Layouts,
    Table,
    Weight,
    layer_norm,
    linear,
    same,
    squeezed,
    stacked,
    transposed,
)

GROUP_NORM_EPSILON = 64e-5
"""The ε of each head's norm, from RWKV-6 on."""

MIXES = ("w", "k", "v", "r", "g")
"""The data-dependent mixes, in the order of BlinkDL's files."""
FLA_MIXES = ("r", "w", "k", "v", "g")
"""The same mixes, in the order of fla's files."""


class RWKV6TimeMixState(NamedTuple):
    """The state of a time mix: its last input, and a matrix for each head."""

    last: Float[Array, "batch features"]
    wkv: Float[Array, "batch heads key value"]


class RWKV6TimeMix(HeadedTimeMix[RWKV6TimeMixState]):
    """The time mix of RWKV-6, which takes the place of attention.

        >>> layer = RWKV6TimeMix(128, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 128)))

        d_t = x_{t−1} − x_t
        m_s = tanh((x_t + d_t ⊙ μ_x) A)_s B_s,   x_s = x_t + d_t ⊙ (μ_s + m_s),   s in w, k, v, r, g
        r, k, v = x_r W_r, x_k W_k, x_v W_v,   g = silu(x_g W_g)
        w = exp(−exp(time_decay + tanh(x_w D_1) D_2))
        o_t = r_tᵀ (S_{t−1} + diag(u) k_t v_tᵀ),   S_t = diag(w_t) S_{t−1} + k_t v_tᵀ     by head
        y_t = (GroupNorm(o_t) ⊙ g) W_o

    A is time_maa_w1, B is time_maa_w2, D_1 and D_2 are time_decay_w1 and time_decay_w2, and u is
    time_faaaa. The norm's ε is 64e-5. `ops.delta_rule` computes o. x and y are (batch, time,
    features). The state is `RWKV6TimeMixState(last, wkv)`: the last x, and S (batch, heads, key,
    value).

    Args:
        features: size of x_t and y_t.
        head_size: size of each head, a divisor of `features`.
        mix_rank: the width of A for each mix. None: 32, or 64 with at least 4096 features.
        decay_rank: the width of D_1. None: 64, or 128 with at least 4096 features.
        method: the method of `ops.delta_rule`.
        **options: as in `RWKVOptions`. As in RWKV-6, W_r and W_v are initialized to orthogonal
            matrices, W_k and W_g to 0.1 times orthogonal matrices, and W_o to zero. Decays and the
            state are computed in at least float32.

    Raises:
        ValueError: a size is not positive, `head_size` does not divide `features`, or layer_index
            is not less than num_layers.

    Layouts: `blinkdl` (RWKV_Tmix_x060), `fla` (flash-linear-attention), `hf` (RWKV's own
    repositories at Hugging Face).

    """

    state_type = RWKV6TimeMixState

    def __init__(
        self,
        features: int,
        *,
        head_size: int = 64,
        mix_rank: int | None = None,
        decay_rank: int | None = None,
        method: ops.DeltaRuleMethod = "auto",
        **options: Unpack[RWKVOptions],
    ):
        super().__init__(features, features, head_size, method, **options)
        mix_rank, decay_rank = default_ranks(features, mix_rank, decay_rank)
        depth, height = depth_and_height(options)
        rngs, param_dtype = options["rngs"], self.param_dtype
        channel = np.arange(features)
        mix, width = (channel / features) ** height, channel / max(features - 1, 1)

        def param(value, **metadata: Any) -> nnx.Param:
            return nnx.Param(jnp.asarray(value, param_dtype), **metadata)

        def small(*shape: int) -> nnx.Param:
            draw = jax.random.uniform(rngs.params(), shape, carry_dtype(param_dtype), -0.01, 0.01)
            return param(draw)

        # As in RWKV-6's training code, vectors are initialized by functions of the layer and the
        # channel.
        self.time_maa_x, self.time_maa_w, self.time_maa_k = (param(1 - mix) for _ in range(3))
        self.time_maa_v = param(1 - mix - 0.3 * depth)
        self.time_maa_r, self.time_maa_g = (param(1 - mix**0.5) for _ in range(2))
        self.time_maa_w1 = param(np.zeros((features, 5 * mix_rank)))
        self.time_maa_w2 = small(5, mix_rank, features)
        self.time_decay = param(5 * width ** (0.7 + 1.3 * depth) - 6)
        self.time_decay_w1 = param(np.zeros((features, decay_rank)))
        self.time_decay_w2 = small(decay_rank, features)
        bonus = depth * (1 - width) + 0.1 * ((channel + 1) % 3 - 1)
        self.time_faaaa = param(bonus.reshape(self.heads, head_size), is_matrix=False)
        matrix = partial(matrix_builder(options), features, features)
        self.receptance = matrix(orthogonal)
        self.key = matrix(scaled_orthogonal(0.1))
        self.value = matrix(orthogonal)
        self.gate = matrix(scaled_orthogonal(0.1))
        self.output = matrix()
        self.ln_x = head_norm(features, self.heads, options)

    foreign_format = staticmethod(foreign_to("RWKV-6"))

    def sequence(self, x, state, rows):
        """Runs `ops.delta_rule`, normalizes each head's outputs, and gates and projects them."""
        dtype = self.computation_dtype(x)
        x = x.astype(dtype)
        # Each projection reads its own mixture of the current and the previous input. The weights
        # depend on the data.
        previous, last = token_shift(x, state.last, rows)
        x_w, x_k, x_v, x_r, x_g = self._mix_with_previous(x, previous)
        # Project, and split into heads.
        r, log_w, k, v = (
            heads_of(y, self.head_size)
            for y in (self.receptance(x_r), self.log_decay(x_w), self.key(x_k), self.value(x_v))
        )
        # In each step, the matrix of each head decays and stores a new pair of a key and a value.
        # RWKV stores (key, value) matrices, and the operator (value, key).
        options: dict[str, Any] = {"u": self.time_faaaa[...], "rows": rows, "method": self.method}
        o, wkv = ops.delta_rule(r, log_w, k, v, state=state.wkv.mT, **options)
        # Norm each head, then gate and project back.
        steps = o.reshape(x.shape[0] * x.shape[1], self.in_features)
        normed = self.ln_x(steps).reshape(x.shape).astype(dtype)
        y = self.output(normed * jax.nn.silu(self.gate(x_g)))
        return y, RWKV6TimeMixState(last, wkv.mT)

    def log_decay(self, x: Float[Array, "batch time features"]) -> Float[Array, "..."]:
        """`−exp(time_decay + tanh(x D_1) D_2)`, in at least float32."""
        weights = self.time_decay_w1, self.time_decay_w2
        exponent = low_rank(x, *weights, jnp.tanh, base=self.time_decay)
        return -jnp.exp(jnp.minimum(exponent, LARGEST_DECAY))

    def _mix_with_previous(self, x: Array, previous: Array) -> list[Array]:
        """For each of the `MIXES`, the mixture of x and its predecessor."""
        hidden = lerp_to_previous(x, previous, self.time_maa_x)
        hidden = jnp.tanh(ops.affine(hidden, self.time_maa_w1[...].astype(x.dtype)))
        ups = self.time_maa_w2[...].astype(x.dtype)
        return [
            lerp_to_previous(x, previous, getattr(self, f"time_maa_{name}"), ops.affine(part, up))
            for name, part, up in zip(MIXES, jnp.split(hidden, 5, axis=-1), ups, strict=True)
        ]

    mesh_axes = (
        last_axis("heads", "receptance", "key", "value", "gate", "ln_x")
        | last_axis("heads", "time_decay", "time_decay_w2")
        | first_axis("heads", "time_faaaa", "output.kernel")
    )

    def torch_layouts(self) -> Layouts:
        """`blinkdl` and `hf`: the keys of a block's time mix; `fla`: those of its `attn`."""
        vectors = ("time_decay", *(f"time_maa_{name}" for name in ("x", *MIXES)))
        whole = ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2", "time_faaaa")
        matrices = ("receptance", "key", "value", "gate", "output")
        blinkdl = [
            *(squeezed(name, name, (0, 1)) for name in vectors),
            *(same(name, name) for name in whole),
            *(row for name in matrices for row in linear(name, name, bias=False)),
            *layer_norm("ln_x", "ln_x"),
        ]
        return {"blinkdl": blinkdl, "fla": _fla_time_mix(), "hf": blinkdl}


def _fla_time_mix() -> Table:
    """The table of fla, which orders the mixes differently and transposes the low-rank matrices."""
    to_fla = [MIXES.index(name) for name in FLA_MIXES]
    from_fla = [FLA_MIXES.index(name) for name in MIXES]

    # The columns of all mixes are side by side in one matrix.
    def down(a: np.ndarray, order: list[int]) -> np.ndarray:
        return np.concatenate([np.split(a, 5, axis=-1)[i] for i in order], axis=-1)

    rows = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "gate": "g_proj"}
    return [
        same("time_maa_x", "x_proj.0.mu"),
        Weight(
            ("time_maa_w1",),
            ("x_proj.0.linear.weight",),
            lambda a: (down(a.T, from_fla),),
            lambda a: (down(a, to_fla).T,),
        ),
        Weight(
            ("time_maa_w2",),
            ("x_proj.2.weight",),
            lambda a: (a.T.reshape(5, -1, a.shape[0])[from_fla],),
            lambda a: (a[to_fla].reshape(-1, a.shape[-1]).T,),
        ),
        stacked(tuple(f"time_maa_{name}" for name in FLA_MIXES), "x_bias"),
        transposed("time_decay_w1", "w_proj.linear.lora.0.weight"),
        transposed("time_decay_w2", "w_proj.linear.lora.2.weight"),
        same("time_decay", "w_proj.linear.lora.2.bias"),
        same("time_faaaa", "bonus"),
        *(row for n, k in rows.items() for row in linear(n, f"{k}.linear", bias=False)),
        *linear("output", "o_proj", bias=False),
        *layer_norm("ln_x", "g_norm"),
    ]


class RWKV6ChannelMix(ChannelMix):
    """The channel mix of RWKV-6, its feed-forward part.

        >>> layer = RWKV6ChannelMix(64, 224, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        k, r = (x_t + μ ⊙ (x_{t−1} − x_t)) W, each with its own μ and W
        y_t = σ(r) ⊙ (max(k, 0)² W_v)

    x and y are (batch, time, features), and the state is `RWKVChannelMixState(last)`, where last is
    (batch, features).

    Args:
        features: size of x_t and y_t.
        hidden_features: size of k; in RWKV-6, 3.5 times `features`, rounded down to
            a multiple of 32.
        **options: as in `RWKVOptions`. W_k is initialized to an orthogonal matrix, the others to
            zero.

    Raises:
        ValueError: a size is not positive, or layer_index is not less than num_layers.

    Layouts: `blinkdl` (RWKV_CMix_x060), `fla`, `hf`.

    """

    prefix = "time_maa_"
    key_init = staticmethod(unit_orthogonal)

    def first_mix(self, channel, height):
        return 1 - channel**height

    def torch_layouts(self) -> Layouts:
        """The keys of a block's `ffn`, or `feed_forward`."""
        blinkdl = [
            *(squeezed(name, name, (0, 1)) for name in ("time_maa_k", "time_maa_r")),
            *(row for n in ("key", "receptance", "value") for row in linear(n, n, bias=False)),
        ]
        fla = [
            same("time_maa_k", "key.mu"),
            same("time_maa_r", "receptance.mu"),
            *linear("key", "key.linear", bias=False),
            *linear("receptance", "receptance.linear", bias=False),
            *linear("value", "value", bias=False),
        ]
        return {"blinkdl": blinkdl, "fla": fla, "hf": blinkdl}


class RWKV6Block(RWKVResidualBlock[RWKV6TimeMixState]):
    """A residual block of RWKV-6.

        >>> layer = RWKV6Block(128, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 128)))

        x ← ln0(x)              in the lowest layer only
        x ← x + att(ln1(x))
        x ← x + ffn(ln2(x))

    x is (batch, time, features), and the state is `RWKVBlockState(att, ffn)`.

    Args:
        features: size of x_t.
        hidden_features: size of the channel mix's k. None: 3.5 times `features`, rounded down to a
            multiple of 32.
        head_size: size of each head, a divisor of `features`.
        mix_rank: as in `RWKV6TimeMix`.
        decay_rank: as in `RWKV6TimeMix`.
        **options: as in `RWKVOptions`; parameters are initialized as in RWKV-6.

    Raises:
        ValueError: a size is not positive, `head_size` does not divide `features`, or layer_index
            is not less than num_layers.

    Layouts: `blinkdl`, `fla`, `hf`, as in `RWKV6TimeMix`.

    """

    def __init__(
        self,
        features: int,
        hidden_features: int | None = None,
        *,
        head_size: int = 64,
        mix_rank: int | None = None,
        decay_rank: int | None = None,
        **options: Unpack[RWKVOptions],
    ):
        super().__init__(features, **options)
        self.att = RWKV6TimeMix(
            features, head_size=head_size, mix_rank=mix_rank, decay_rank=decay_rank, **options
        )
        hidden_features = hidden_features or default_hidden_features(features)
        self.ffn = RWKV6ChannelMix(features, hidden_features, **options)

    foreign_format = staticmethod(foreign_to("RWKV-6"))


def default_ranks(features: int, mix_rank: int | None, decay_rank: int | None) -> tuple[int, int]:
    """The given ranks, or by default those of the released models of this width."""
    scale = 2 if features >= 4096 else 1
    return mix_rank or 32 * scale, decay_rank or 64 * scale


def default_hidden_features(features: int) -> int:
    """3.5 times the features, rounded down to a multiple of 32, and at least 32."""
    return max(int(3.5 * features) // 32 * 32, 32)


def head_norm(features: int, heads: int, options: Any) -> GroupNorm:
    """The norm of each head. Its initial scale grows with the layer: ((1 + layer) / layers)^0.7."""
    epsilon = GROUP_NORM_EPSILON
    norm = GroupNorm(features, num_groups=heads, epsilon=epsilon, **norm_options(options))
    height = (1 + options["layer_index"]) / options["num_layers"]
    norm.scale = nnx.Param(jnp.full(features, height**0.7, options["param_dtype"]))
    return norm
