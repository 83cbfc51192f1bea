"""RWKV-7, Goose (arXiv 2503.14456), with the parameter names of BlinkDL's x070 code."""

__all__ = ["RWKV7Block", "RWKV7ChannelMix", "RWKV7TimeMix", "RWKV7TimeMixState"]

import math
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.checks.arguments import Default
from jax_models.layers.rwkv6 import head_norm
from jax_models.layers.rwkv_parts import (
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
from jax_models.options import declared_options
from jax_models.weights import Layouts, Table, layer_norm, linear, same, squeezed, transposed
from jax_models.weights.constant import Constant

LEAST_LOG_DECAY = -math.exp(-0.5)
"""The lower bound of log w."""
SMALLEST_NORM = 1e-12
"""The lower bound of the norm by which a removal key is divided."""
MIXES = ("r", "w", "k", "v", "a", "g")


class RWKV7TimeMixState(NamedTuple):
    """The state of a time mix: its last input, and a matrix for each head."""

    last: Float[Array, "batch features"]
    wkv: Float[Array, "batch heads value key"]


class RWKV7Options(RWKVOptions, total=False):
    """The keyword arguments of a `RWKV7TimeMix`, which a block passes on to it."""

    head_size: Annotated[int, Default(64)]
    """Size of each head; it divides the features."""
    decay_rank: int | None
    """The width of w_1. Each rank that is None is chosen as in RWKV-7's training code."""
    rate_rank: int | None
    """The width of a_1, which computes the in-context learning rate."""
    value_rank: int | None
    """The width of v_1."""
    gate_rank: int | None
    """The width of g_1."""
    keep_unused: Annotated[bool, Default(False)]
    """Whether the lowest layer keeps v_0, v_1 and v_2 as `Constant`s. It does not use them, but
    some checkpoints contain them.
    """


class RWKV7TimeMix(HeadedTimeMix[RWKV7TimeMixState]):
    """The time mix of RWKV-7, which takes the place of attention.

        >>> layer = RWKV7TimeMix(128, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 128)))
        >>> y.shape
        (8, 100, 256)

        x_s = x_t + μ_s ⊙ (x_{t−1} − x_t),   s in r, w, k, v, a, g
        r, k, v = x_r W_r, x_k W_k, x_v W_v
        log w = −e^{−1/2} σ(w_0 + tanh(x_w w_1) w_2)
        v_first = v in the lowest layer; above it  v ← v + (v_first − v) ⊙ σ(v_0 + x_v v_1 v_2)
        a = σ(a_0 + x_a a_1 a_2),   g = σ(x_g g_1) g_2
        κ̂ = k ⊙ k_k / max(‖k ⊙ k_k‖, 1e-12) by head,   then  k ← k ⊙ (1 + (a − 1) ⊙ k_a)
        S_t = S_{t−1} (diag(w_t) − κ̂_t (κ̂_t ⊙ a_t)ᵀ) + v_t k_tᵀ,   o_t = S_t r_t     by head
        y_t = ((GroupNorm(o_t) + (Σ r ⊙ k ⊙ r_k) v) ⊙ g) W_o

    The norm's ε is 64e-5. `ops.delta_rule` computes o. All layers read v_first, the values of the
    lowest layer, so each layer passes them on beside y: its output is (batch, time, 2 · features),
    y followed by v_first. The input of the lowest layer is x alone, and the input of every other
    layer is x followed by v_first. The state is `RWKV7TimeMixState(last, wkv)`: the last x, and S
    (batch, heads, value, key).

    Args:
        features: size of x_t and y_t.
        method: the method of `ops.delta_rule`.
        **options: as in `jax_models.layers.rwkv7.RWKV7Options`. As in RWKV-7, W_r and W_v are
            initialized to orthogonal matrices, W_k to 0.1 times an orthogonal matrix, and W_o to
            zero. Decays and the state are computed in at least float32.

    Raises:
        ValueError: a size is not positive, `head_size` does not divide `features`, or layer_index
            is not less than num_layers.

    Layouts: `blinkdl` (RWKV_Tmix_x070), `fla` (flash-linear-attention).

    """

    state_type = RWKV7TimeMixState

    def __init__(
        self,
        features: int,
        *,
        method: ops.DeltaRuleMethod = "auto",
        **options: Unpack[RWKV7Options],
    ):
        given: Any = options  # with defaults, which the type checker does not know
        head_size = given["head_size"]
        self.is_lowest = options.get("layer_index") == 0
        in_features = features if self.is_lowest else 2 * features
        super().__init__(
            in_features, features, head_size, method, **declared_options(RWKVOptions, options)
        )
        rngs, param_dtype = options["rngs"], self.param_dtype
        # As in the training code, most parameters are initialized by functions of the layer and the
        # channel.
        depth, height = depth_and_height(options)
        channel = np.arange(features)
        width = channel / max(features - 1, 1)
        in_head = 2 * (channel % head_size) / max(head_size - 1, 1) - 1
        tilt, zigzag = width - 0.5, in_head * np.abs(in_head)

        def param(value, **metadata: Any) -> nnx.Param:
            return nnx.Param(jnp.asarray(value, param_dtype), **metadata)

        def zeros_and_draw(rank: int, kind: type[nnx.Variable] = nnx.Param):
            up = scaled_orthogonal(0.1)(rngs.params(), (features, rank), carry_dtype(param_dtype)).T
            down = jnp.zeros((features, rank), param_dtype)
            return kind(down), kind(jnp.asarray(up, param_dtype))

        for name, power in (("r", 0.2), ("w", 0.9), ("k", 0.7), ("v", 0.7), ("a", 0.9), ("g", 0.2)):
            setattr(self, f"x_{name}", param(1 - (channel / features) ** (power * height)))
        start = 6 * width ** (1 + depth**0.3) - 6
        self.w0 = param(start + 0.5 + 2.5 * zigzag)
        self.a0 = param(0.3 * zigzag + 0.4 * tilt - 0.19)
        ranks = default_ranks(features, options)
        self.w1, self.w2 = zeros_and_draw(ranks["decay_rank"])
        self.a1, self.a2 = zeros_and_draw(ranks["rate_rank"])
        self.g1, self.g2 = zeros_and_draw(ranks["gate_rank"])
        # The lowest layer does not use v_0, v_1 and v_2, but some checkpoints contain them.
        self.has_values = given["keep_unused"] or not self.is_lowest
        if self.has_values:
            kind = Constant if self.is_lowest else nnx.Param
            self.v0 = kind(jnp.asarray(0.73 - 0.4 * tilt, param_dtype))
            self.v1, self.v2 = zeros_and_draw(ranks["value_rank"], kind)
        self.k_k = param(0.71 - 0.1 * tilt)
        self.k_a = param(np.full(features, 1.02))
        self.r_k = param(np.full((self.heads, head_size), -0.04), is_matrix=False)
        matrix = partial(matrix_builder(options), features, features)
        self.receptance = matrix(orthogonal)
        self.key = matrix(scaled_orthogonal(0.1))
        self.value = matrix(orthogonal)
        self.output = matrix()
        self.ln_x = head_norm(features, self.heads, options)

    foreign_format = staticmethod(foreign_to("RWKV-7"))

    def split(self, x):
        """Returns x or, above the lowest layer, the pair of x and the lowest layer's values."""
        return x if self.is_lowest else tuple(jnp.split(x, 2, axis=-1))

    def sequence(self, x, state, rows) -> Any:
        """Runs `ops.delta_rule`, normalizes each head, adds a bonus, gates and projects the sum."""
        x, v_first = x if isinstance(x, tuple) else (x, None)
        dtype = self.computation_dtype(x)
        x = x.astype(dtype)

        # Each projection reads its own mixture of the current and the previous input.
        previous, last = token_shift(x, state.last, rows)
        x_r, x_w, x_k, x_v, x_a, x_g = (
            lerp_to_previous(x, previous, getattr(self, f"x_{name}")) for name in MIXES
        )

        # Interpolate between this layer's values and those of the lowest layer. The weight depends
        # on the data.
        v = self.value(x_v)
        if v_first is None:
            v_first = v
        else:
            v_first = v_first.astype(dtype)
            share = jax.nn.sigmoid(low_rank(x_v, self.v1, self.v2, base=self.v0))
            v += (v_first - v) * share.astype(dtype)

        # The in-context learning rate, the decay and the gate are low-rank functions of the data.
        rate = jax.nn.sigmoid(low_rank(x_a, self.a1, self.a2, base=self.a0))
        log_w = LEAST_LOG_DECAY * jax.nn.sigmoid(low_rank(x_w, self.w1, self.w2, jnp.tanh, self.w0))
        gate = low_rank(x_g, self.g1, self.g2, jax.nn.sigmoid)

        # In each step, the matrix of each head decays, loses the value stored under the removal
        # key, and stores a new pair of a key and a value.
        removal, k = self.removal_and_key(self.key(x_k), rate)
        r, k, v_heads, rate, log_w = (
            heads_of(y, self.head_size) for y in (self.receptance(x_r), k, v, rate, log_w)
        )
        inputs = (r, log_w, k, v_heads, -removal, removal * rate.astype(removal.dtype), state.wkv)
        o, wkv = ops.delta_rule(*inputs, min_log_w=LEAST_LOG_DECAY, rows=rows, method=self.method)

        # The bonus adds the current value, weighted by the similarity of r and k.
        r_k = self.r_k[...].astype(o.dtype)[None, None]
        strength = jnp.sum(r.astype(o.dtype) * k * r_k, axis=-1, keepdims=True)
        read = self.normed(o, strength * v_heads.astype(o.dtype)) * gate.astype(o.dtype)
        return (self.output(read.astype(dtype)), v_first), RWKV7TimeMixState(last, wkv)

    def normed(
        self, o: Float[Array, "batch time heads value"], bonus: Float[Array, "..."]
    ) -> Float[Array, "batch time features"]:
        """`GroupNorm(o) + bonus`, with the heads side by side."""
        batch, time = o.shape[:2]
        normed = self.ln_x(o.reshape(batch * time, self.features)).astype(o.dtype)
        return (normed.reshape(o.shape) + bonus).reshape(batch, time, self.features)

    def removal_and_key(self, k: Array, rate: Array) -> tuple[Array, Array]:
        """Returns the removal key κ̂ by head, and the key under which the state stores the value."""
        k, k_k, k_a = (y.astype(rate.dtype) for y in (k, self.k_k[...], self.k_a[...]))
        removal = heads_of(k * jnp.broadcast_to(k_k, k.shape), self.head_size)
        square = jnp.sum(removal**2, axis=-1, keepdims=True)
        removal = removal / jnp.sqrt(jnp.maximum(square, SMALLEST_NORM**2))
        return removal, k * (1 + (rate - 1) * jnp.broadcast_to(k_a, k.shape))

    mesh_axes = (
        last_axis("heads", "receptance", "key", "value", "k_k", "k_a", "ln_x")
        | last_axis("heads", "w0", "w2", "a0", "a2", "v0", "v2", "g2")
        | first_axis("heads", "r_k", "output.kernel")
    )

    def torch_layouts(self) -> Layouts:
        """`blinkdl`: the keys of a block's `att`; `fla`: those of its `attn`."""
        low_ranks = ("w", "a", "v") if self.has_values else ("w", "a")
        mixes = tuple(f"x_{name}" for name in MIXES)
        names = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
        blinkdl = [
            *(squeezed(n, n, (0, 1)) for n in (*mixes, *(f"{n}0" for n in low_ranks))),
            *(same(f"{n}{i}", f"{n}{i}") for n in (*low_ranks, "g") for i in (1, 2)),
            *(squeezed(name, name, (0, 1)) for name in ("k_k", "k_a")),
            same("r_k", "r_k"),
            *(row for name in names for row in linear(name, name, bias=False)),
            *layer_norm("ln_x", "ln_x"),
        ]
        fla = [
            *(squeezed(name, name, (0, 1)) for name in mixes),
            *(row for name in low_ranks for row in _fla_low_rank(name)),
            *_fla_low_rank("g")[:2],
            *(same(name, name) for name in ("k_k", "k_a", "r_k")),
            *(row for name, key in names.items() for row in linear(name, key, bias=False)),
            *layer_norm("ln_x", "g_norm"),
        ]
        return {"blinkdl": blinkdl, "fla": fla}


def _fla_low_rank(name: str) -> Table:
    """The rows of two low-rank matrices, stored as in `torch.nn.Linear`, and of a bias."""
    return [
        transposed(f"{name}1", f"{name}_lora.lora.0.weight"),
        transposed(f"{name}2", f"{name}_lora.lora.2.weight"),
        same(f"{name}0", f"{name}_lora.lora.2.bias"),
    ]


class RWKV7ChannelMix(ChannelMix):
    """The channel mix of RWKV-7, its feed-forward part.

        >>> layer = RWKV7ChannelMix(64, 256, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        y_t = max((x_t + μ ⊙ (x_{t−1} − x_t)) W_k, 0)² W_v

    x and y are (batch, time, features), and the state is `RWKVChannelMixState(last)`, where last is
    (batch, features).

    Args:
        features: size of x_t and y_t.
        hidden_features: size of the hidden layer; four times `features` in RWKV-7.
        **options: as in `RWKVOptions`. W_k is initialized to an orthogonal matrix, W_v to zero.

    Raises:
        ValueError: a size is not positive, or layer_index is not less than num_layers.

    Layouts: `blinkdl` (RWKV_CMix_x070), `fla`.

    """

    prefix, gated = "x_", False
    key_init = staticmethod(unit_orthogonal)

    def first_mix(self, channel, height):
        return 1 - channel**height**4

    def torch_layouts(self) -> Layouts:
        """The keys of a block's `ffn`."""
        matrices = [row for name in ("key", "value") for row in linear(name, name, bias=False)]
        return {
            "blinkdl": [squeezed("x_k", "x_k", (0, 1)), *matrices],
            "fla": [same("x_k", "x_k"), *matrices],
        }


class RWKV7Block(RWKVResidualBlock[RWKV7TimeMixState]):
    """A residual block of RWKV-7.

        >>> layer = RWKV7Block(128, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 128)))
        >>> y.shape
        (8, 100, 256)

        x ← ln0(x)              in the lowest layer only
        x ← x + att(ln1(x))
        x ← x + ffn(ln2(x))

    Each block passes on the values of the lowest layer beside x, as in `RWKV7TimeMix`: the output
    is (batch, time, 2 · features), and so is the input of every block except the lowest. The state
    is `RWKVBlockState(att, ffn)`.

    Args:
        features: size of x_t.
        hidden_features: size of the channel mix's hidden layer. None: four times `features`.
        **options: as in `jax_models.layers.rwkv7.RWKV7Options`; parameters are initialized as in
            RWKV-7.

    Raises:
        ValueError: a size is not positive, `head_size` does not divide `features`, or layer_index
            is not less than num_layers.

    Layouts: `blinkdl`, `fla`, as in `RWKV7TimeMix`.

    """

    def __init__(
        self, features: int, hidden_features: int | None = None, **options: Unpack[RWKV7Options]
    ):
        shared = declared_options(RWKVOptions, options)
        is_lowest = options.get("layer_index") == 0
        super().__init__(features, in_features=(2 - is_lowest) * features, **shared)
        self.att = RWKV7TimeMix(features, **options)
        self.ffn = RWKV7ChannelMix(features, hidden_features or 4 * features, **shared)

    foreign_format = staticmethod(foreign_to("RWKV-7"))


def default_ranks(features: int, options: Mapping[str, Any]) -> dict[str, int]:
    """The given ranks, or the training code's: multiples of 32 that grow with √features."""
    factors = {"decay_rank": 2.5, "rate_rank": 2.5, "value_rank": 1.7, "gate_rank": 5.0}
    return {
        name: options.get(name) or max(32, 32 * round(factor * features**0.5 / 32))
        for name, factor in factors.items()
    }
