"""RWKV-4 (arXiv 2305.13048), under BlinkDL's names, and what all RWKVs share."""

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
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, ClassVar, Generic, NamedTuple, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.layers.linear import Linear
from jax_models.layers.norm import LayerNorm
from jax_models.layers.rwkv_version import foreign_to
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.ops import CausalConv1DState, Rows, WKVState, carry_dtype
from jax_models.ops.rows import Default
from jax_models.options import Index, Initializer, MatrixOptions, norm_options, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, Weight, layer_norm, linear, nested, same, squeezed

LARGEST_DECAY = 80.0
"""The largest time_decay. Beyond it nothing of the past remains, and w would overflow."""


class RWKVOptions(MatrixOptions, total=False):
    """The keyword arguments that the layers of all RWKVs take."""

    layer_index: Annotated[Index, Default(0)]
    """Which layer of a model this is, 0 for the lowest."""
    num_layers: Annotated[int, Default(1)]
    """How many layers the model has. Vectors, such as decays, bonuses and the μ, are initialized as
    in the version's training code, by functions of the layer and of the channel."""


def orthogonal(
    key, shape: tuple[int, int], dtype, *, gain: float | None = None, **_
) -> Float[Array, "in out"]:
    """RWKV-4's orthogonal (in, out) matrices, by default scaled by √(out / in) if out > in."""
    gain = math.sqrt(max(shape[1] / shape[0], 1)) if gain is None else gain
    return nnx.initializers.orthogonal(gain)(key, shape, carry_dtype(dtype)).astype(dtype)


def scaled_orthogonal(factor: float) -> Initializer:
    """`orthogonal`, times a factor."""
    return lambda *args, **kwargs: factor * orthogonal(*args, **kwargs)


def matrices(options: RWKVOptions) -> Callable[..., Linear]:
    """Returns a function that makes a `Linear` from its sizes and an initializer, or zeros."""

    def matrix(in_features: int, out_features: int, init: Initializer = nnx.initializers.zeros):
        return Linear(in_features, out_features, **with_inits(options, init, None, use_bias=False))

    return matrix


MIXES = ("key", "value", "receptance")
"""The projections of the time mix. Each reads its own mixture of the last two inputs."""


class RWKVTimeMixState(NamedTuple):
    """The state of a time mix: its last input, and the sums over the past."""

    last: Float[Array, "batch features"]
    wkv: WKVState


class RWKVTimeMix(SequenceLayer[RWKVTimeMixState]):
    """RWKV-4's attention.

        >>> layer = RWKVTimeMix(64, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        r, k, v = (μ ⊙ x_t + (1 − μ) ⊙ x_{t−1}) W, each with its own μ and W
        wkv_t = (Σ_{i<t} e^{−(t−1−i)w + k_i} v_i + e^{u + k_t} v_t)
              / (Σ_{i<t} e^{−(t−1−i)w + k_i} + e^{u + k_t})
        y_t = (σ(r) ⊙ wkv_t) W_o

    with w = exp(time_decay) and u = time_first; `ops.wkv` computes it without overflow. x and y are
    (batch, time, features), the state `RWKVTimeMixState(last, wkv)`, where wkv is
    `WKVState(num, den, max)`; each array is (batch, features).

    Args:
        features: size of x_t and y_t.
        method: how `ops.wkv` runs.
        **options: as in `RWKVOptions`. The four W start as in RWKV-4, orthogonal for v, zero for
            the others.

    Raises:
        ValueError: a size is not positive, or there is no such layer.

    Layouts: `blinkdl` (RWKV-LM's RWKV_TimeMix), `hf` (transformers' RwkvSelfAttention).

    """

    divides_time = True

    def __init__(
        self, features: int, *, method: ops.WKVMethod = "auto", **options: Unpack[RWKVOptions]
    ):
        super().__init__(features, **options)
        self.method: ops.WKVMethod = method
        depth, height = depth_and_height(options)
        channel = np.arange(features)
        width = channel / max(features - 1, 1)
        mix = (channel / features) ** height

        def param(value) -> nnx.Param:
            return nnx.Param(jnp.asarray(value, self.param_dtype))

        self.time_decay = param(8 * width ** (0.7 + 1.3 * depth) - 5)
        self.time_first = param(math.log(0.3) + 0.5 * ((channel + 1) % 3 - 1))
        self.time_mix_k = param(mix)
        self.time_mix_v = param(mix + 0.3 * depth)
        self.time_mix_r = param(mix**0.5)
        matrix = matrices(options)
        self.key = matrix(features, features)
        self.value = matrix(features, features, orthogonal)
        self.receptance = matrix(features, features)
        self.output = matrix(features, features)

    foreign_format = staticmethod(foreign_to("RWKV-4"))

    def init_state(self, batch_size: int) -> RWKVTimeMixState:
        """No last input and empty sums, in at least float32."""
        dtype = self.state_dtype
        wkv = ops.empty_wkv_state(batch_size, self.in_features, dtype)
        return RWKVTimeMixState(jnp.zeros_like(wkv.num), wkv)

    def sequence(self, x, state, rows):
        """The receptance times the weighted average of the past, `ops.wkv`, projected."""
        dtype = self.computation_dtype(x)
        x = x.astype(dtype)
        previous, last = token_shift(x, state.last, rows)
        k = self.key(mixed(self.time_mix_k, x, previous))
        v = self.value(mixed(self.time_mix_v, x, previous))
        r = self.receptance(mixed(self.time_mix_r, x, previous))
        y, wkv = ops.wkv(
            k,
            v,
            state.wkv,
            w=jnp.exp(jnp.minimum(self.time_decay[...].astype(carry_dtype(dtype)), LARGEST_DECAY)),
            u=self.time_first[...],
            rows=rows,
            method=self.method,
        )
        y = self.output(jax.nn.sigmoid(r) * y.astype(dtype))
        return y, RWKVTimeMixState(last, wkv)

    mesh_axes = last_axis(
        "features", "receptance", "key", "value", "time_decay", "time_first"
    ) | first_axis("features", "output.kernel")

    def torch_layouts(self) -> Layouts:
        """`blinkdl`: the keys of a block's `att`; `hf`: those of its `attention`."""
        return by_mixes(
            same("time_decay", "time_decay"),
            same("time_first", "time_first"),
            *(row for name in (*MIXES, "output") for row in linear(name, name, bias=False)),
            mixes=MIXES,
        )


class RWKVChannelMixState(NamedTuple):
    """What a channel mix carries: its last input."""

    last: Float[Array, "batch features"]


class ChannelMix(SequenceLayer[RWKVChannelMixState]):
    """The base class of the feed-forward parts of all RWKVs.

        k, r = mix(x_t, x_{t−1}) W, each with its own μ and W
        y_t = σ(r) ⊙ (max(k, 0)² W_v)                   without σ(r) if not `gated`

    A subclass defines the names and the initial values of the μ, and the initializer of W_k.
    """

    divides_time = True

    mesh_axes = (
        last_axis("hidden", "key")
        | first_axis("hidden", "value.kernel")
        | last_axis("features", "receptance")
    )

    gated: ClassVar[bool] = True
    prefix: ClassVar[str]
    """The names of the μ, up to the first letter of the projection."""
    key_init = staticmethod(orthogonal)

    def __init__(self, features: int, hidden_features: int, **options: Unpack[RWKVOptions]):
        super().__init__(features, **options)
        self.hidden_features = hidden_features
        _, height = depth_and_height(options)
        start = self.first_mix(np.arange(features) / features, height)
        start = jnp.asarray(start, self.param_dtype)
        matrix = matrices(options)
        for letter in "kr" if self.gated else "k":
            setattr(self, f"{self.prefix}{letter}", nnx.Param(start))
        self.key = matrix(features, hidden_features, self.key_init)
        if self.gated:
            self.receptance = matrix(features, features)
        self.value = matrix(hidden_features, features)

    def first_mix(self, channel: np.ndarray, height: float) -> np.ndarray:
        """The initial μ, by a subclass. `channel` runs from 0 to 1 over the features."""
        raise NotImplementedError  # a subclass defines it

    def mixed(self, letter: str, x: Array, previous: Array) -> Array:
        """The input of a projection: from RWKV-6 on, `x_t + μ ⊙ (x_{t−1} − x_t)`."""
        return lerp_to_previous(x, previous, getattr(self, f"{self.prefix}{letter}"))

    def init_state(self, batch_size: int) -> RWKVChannelMixState:
        """No last input: zeros, (batch, features), in at least float32."""
        return RWKVChannelMixState(jnp.zeros((batch_size, self.in_features), self.state_dtype))

    def sequence(self, x, state, rows):
        """The squared relu of the key, projected, times the receptance if there is one."""
        x = x.astype(self.computation_dtype(x))
        previous, last = token_shift(x, state.last, rows)
        k = self.key(self.mixed("k", x, previous))
        if not self.gated:
            return self.value(jax.nn.relu(k) ** 2), RWKVChannelMixState(last)
        r = self.receptance(self.mixed("r", x, previous))
        return jax.nn.sigmoid(r) * self.value(jax.nn.relu(k) ** 2), RWKVChannelMixState(last)


class RWKVChannelMix(ChannelMix):
    """RWKV-4's feed-forward part.

        >>> layer = RWKVChannelMix(64, 256, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        r, k = (μ ⊙ x_t + (1 − μ) ⊙ x_{t−1}) W, each with its own μ and W
        y_t = σ(r) ⊙ (max(k, 0)² W_v)

    x and y are (batch, time, features), the state `RWKVChannelMixState(last)`, (batch, features).

    Args:
        features: size of x_t and y_t.
        hidden_features: size of k; four times `features` in RWKV-4.
        **options: as in `RWKVOptions`. W_k starts orthogonal, the others at zero.

    Raises:
        ValueError: a size is not positive, or there is no such layer.

    Layouts: `blinkdl` (RWKV-LM's RWKV_ChannelMix), `hf` (transformers' RwkvFeedForward).

    """

    prefix = "time_mix_"

    def first_mix(self, channel, height):
        """As in RWKV-4."""
        return channel**height

    def mixed(self, letter, x, previous):
        """`μ ⊙ x_t + (1 − μ) ⊙ x_{t−1}`."""
        return mixed(getattr(self, f"{self.prefix}{letter}"), x, previous)

    def torch_layouts(self) -> Layouts:
        """`blinkdl`: the keys of a block's `ffn`; `hf`: those of its `feed_forward`."""
        rows = (row for name in MIXES for row in linear(name, name, bias=False))
        return by_mixes(*rows, mixes=("key", "receptance"))


def by_mixes(*rows: Weight, mixes: Iterable[str]) -> Layouts:
    """The layouts of a mix of RWKV-4: BlinkDL names a μ by the first letter of its projection."""
    letters = {"blinkdl": 1, "hf": None}
    return {
        layout: [
            *(squeezed(f"time_mix_{m[0]}", f"time_mix_{m[:count]}", (0, 1)) for m in mixes),
            *rows,
        ]
        for layout, count in letters.items()
    }


Att = TypeVar("Att")


class RWKVBlockState(NamedTuple, Generic[Att]):
    """The state of a block: those of its time mix and of its channel mix."""

    att: Att
    ffn: RWKVChannelMixState


PARTS = {
    "blinkdl": ("ln0", "ln1", "ln2", "att", "ffn"),
    "fla": ("pre_norm", "attn_norm", "ffn_norm", "attn", "ffn"),
    "hf": ("pre_ln", "ln1", "ln2", "attention", "feed_forward"),
}
"""What the layouts call `ln0`, `ln1`, `ln2`, `att` and `ffn`."""


class ResidualMixes(SequenceLayer[RWKVBlockState[Att]]):
    """The base class of the blocks of all RWKVs: a time mix, a channel mix and residuals.

        x ← ln0(x)              in the lowest layer only
        x ← x + att(ln1(x))
        x ← x + ffn(ln2(x))

    A subclass makes `att` and `ffn`.
    """

    divides_time = True

    att: SequenceLayer[Att]
    ffn: SequenceLayer[RWKVChannelMixState]

    def __init__(
        self, features: int, *, in_features: int | None = None, **options: Unpack[RWKVOptions]
    ):
        super().__init__(in_features or features, **options)
        norm = partial(LayerNorm, features, **norm_options(options))
        self.ln0 = norm() if options.get("layer_index", 0) == 0 else None
        self.ln1 = norm()
        self.ln2 = norm()

    def init_state(self, batch_size: int) -> RWKVBlockState[Att]:
        """The initial states of the two parts."""
        return RWKVBlockState(self.att.init_state(batch_size), self.ffn.init_state(batch_size))

    def sequence(self, x, state, rows):
        """The time mix, then the channel mix, each after a norm and added to its input."""
        x = x.astype(self.computation_dtype(x))
        if self.ln0 is not None:
            x = self.ln0(x)
        y, att = self.att.sequence(self.ln1(x), state.att, rows)
        x = x + y
        y, ffn = self.ffn.sequence(self.ln2(x), state.ffn, rows)
        return x + y, RWKVBlockState(att, ffn)

    def torch_layouts(self) -> Layouts:
        """The layouts that both parts have: the keys of a block."""
        att, ffn = self.att.torch_layouts(), self.ffn.torch_layouts()
        norms = ("ln1", "ln2") if self.ln0 is None else ("ln0", "ln1", "ln2")
        layouts = {}
        for layout in (layout for layout in PARTS if layout in att and layout in ffn):
            names = dict(zip(PARTS["blinkdl"], PARTS[layout], strict=True))
            layouts[layout] = [
                *(row for norm in norms for row in layer_norm(norm, names[norm])),
                *nested(att[layout], "att", names["att"]),
                *nested(ffn[layout], "ffn", names["ffn"]),
            ]
        return layouts


class RWKVBlock(ResidualMixes[RWKVTimeMixState]):
    """A residual block of RWKV-4.

        >>> layer = RWKVBlock(64, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        x ← ln0(x)              in the lowest layer only
        x ← x + att(ln1(x))
        x ← x + ffn(ln2(x))

    x is (batch, time, features), the state `RWKVBlockState(att, ffn)`.

    Args:
        features: size of x_t.
        hidden_features: size of the channel mix's k. None: four times `features`.
        **options: as in `RWKVOptions`; parameters start as in RWKV-4.

    Raises:
        ValueError: a size is not positive, or there is no such layer.

    Layouts: `blinkdl` (RWKV-LM's Block), `hf` (transformers' RwkvBlock).

    """

    def __init__(
        self, features: int, hidden_features: int | None = None, **options: Unpack[RWKVOptions]
    ):
        super().__init__(features, **options)
        self.att = RWKVTimeMix(features, **options)
        self.ffn = RWKVChannelMix(features, hidden_features or 4 * features, **options)

    foreign_format = staticmethod(foreign_to("RWKV-4"))


def token_shift(
    x: Float[Array, "batch time features"],
    last: Float[Array, "batch features"],
    rows: Rows,
) -> tuple[Float[Array, "batch time features"], Float[Array, "batch features"]]:
    """`x_{t−1}` at each step, zero at a `reset`, and each row's last input."""
    (previous, _), state = ops.delayed(x, CausalConv1DState(last[..., None]), rows=rows)
    return previous, state.inputs[..., 0]


def lerp_to_previous(
    x: Float[Array, "batch time features"],
    previous: Float[Array, "batch time features"],
    mu: nnx.Param,
    by_data: Float[Array, "batch time features"] | None = None,
) -> Float[Array, "batch time features"]:
    """`x_t + μ ⊙ (x_{t−1} − x_t)`, as from RWKV-6 on; `by_data` is added to μ."""
    weight = jnp.broadcast_to(mu[...].astype(x.dtype), x.shape)
    return x + (previous - x) * (weight if by_data is None else weight + by_data.astype(x.dtype))


def low_rank(
    x: Float[Array, "batch time features"],
    down: nnx.Variable,
    up: nnx.Variable,
    nonlinearity: Callable[[Array], Array] = lambda y: y,
) -> Float[Array, "batch time features"]:
    """`nonlinearity(x W₁) W₂`, in at least float32."""
    hidden = nonlinearity(ops.affine(x, down[...].astype(x.dtype)))
    return ops.affine(hidden, up[...].astype(x.dtype))


def heads_of(
    x: Float[Array, "batch time features"], head_size: int
) -> Float[Array, "batch time heads head"]:
    """Splits the features into heads."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // head_size, head_size)


def checked_heads(features: int, head_size: int) -> int:
    """How many heads of this size the features have."""
    if features % head_size:
        raise ValueError(f"head_size: expected a divisor of features={features}, got {head_size}")
    return features // head_size


def mixed(mu: nnx.Param, x, previous) -> Float[Array, "batch time features"]:
    """`μ ⊙ x_t + (1 − μ) ⊙ x_{t−1}`."""
    weight = jnp.broadcast_to(mu[...].astype(x.dtype), x.shape)
    return x * weight + previous * (1 - weight)


def depth_and_height(options: RWKVOptions) -> tuple[float, float]:
    """How far up a layer is, from 0 to 1, and the fraction of the layers from it to the top."""
    layer_index, num_layers = options.get("layer_index", 0), options.get("num_layers", 1)
    if not 0 <= layer_index < num_layers:
        raise ValueError(
            f"layer_index: expected 0 … num_layers − 1 = {num_layers - 1}, got {layer_index}"
        )
    return layer_index / max(num_layers - 1, 1), 1 - layer_index / num_layers
