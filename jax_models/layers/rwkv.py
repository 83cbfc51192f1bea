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
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_models import ops
from jax_models.layers.linear import Linear
from jax_models.layers.norm import LayerNorm
from jax_models.layers.rwkv_version import foreign_to
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.ops import CausalConv1DState, WKVState, carry_dtype
from jax_models.options import FloatingDtype, Index, Initializer
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, Weight, layer_norm, linear, nested, same, squeezed

LARGEST_DECAY = 80.0
"""The largest time_decay. Beyond it nothing of the past remains, and w would overflow."""


MIXES = ("key", "value", "receptance")
"""The projections of the time mix, each of its own mixture of the last two inputs."""


class RWKVTimeMixState(NamedTuple):
    """What a time mix carries: its last input, and the sums over the past."""

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
        layer_index: which layer of a model this is, 0 for the lowest.
        num_layers: how many layers the model has. The decays w, the bonuses u and the μ start as
            RWKV-4's do in this layer; each channel has its own.
        method: how `ops.wkv` runs.
        time_major: x and y are (time, batch, features).
        dtype: the computation's dtype. None: from x and the parameters. The sums are kept in at
            least float32.
        param_dtype: the parameters' dtype.
        kernel_init: draws the four W. None: as RWKV-4, orthogonal for v, zero for the others.
        rngs: draws the parameters.

    Raises:
        ValueError: a size is not positive, or there is no such layer.

    Layouts: `blinkdl` (RWKV-LM's RWKV_TimeMix), `hf` (transformers' RwkvSelfAttention).

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        *,
        layer_index: Index = 0,
        num_layers: int = 1,
        method: ops.WKVMethod = "auto",
        time_major: bool = False,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(features, time_major=time_major, dtype=dtype, param_dtype=param_dtype)
        self.method: ops.WKVMethod = method
        depth, height = depth_and_height(layer_index, num_layers)
        channel = np.arange(features)
        width = channel / max(features - 1, 1)
        mix = (channel / features) ** height

        def param(value) -> nnx.Param:
            return nnx.Param(jnp.asarray(value, param_dtype))

        self.time_decay = param(8 * width ** (0.7 + 1.3 * depth) - 5)
        self.time_first = param(math.log(0.3) + 0.5 * ((channel + 1) % 3 - 1))
        self.time_mix_k = param(mix)
        self.time_mix_v = param(mix + 0.3 * depth)
        self.time_mix_r = param(mix**0.5)
        options = {"use_bias": False, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        small = kernel_init or nnx.initializers.zeros
        large = kernel_init or orthogonal
        self.key = Linear(features, features, kernel_init=small, **options)
        self.value = Linear(features, features, kernel_init=large, **options)
        self.receptance = Linear(features, features, kernel_init=small, **options)
        self.output = Linear(features, features, kernel_init=small, **options)

    foreign_format = staticmethod(foreign_to("RWKV-4"))

    def init_state(self, batch_size: int) -> RWKVTimeMixState:
        """No last input and empty sums, in at least float32."""
        dtype = self.state_dtype
        wkv = ops.empty_wkv_state(batch_size, self.in_features, dtype)
        return RWKVTimeMixState(jnp.zeros_like(wkv.num), wkv)

    def sequence(self, x, state, lengths, reset):
        """The receptance times the weighted average of the past, `ops.wkv`, projected."""
        dtype = self.computation_dtype(x)
        x = x.astype(dtype)
        previous, last = token_shift(x, state.last, lengths, reset, self.time_axis)
        k = self.key(mixed(self.time_mix_k, x, previous))
        v = self.value(mixed(self.time_mix_v, x, previous))
        r = self.receptance(mixed(self.time_mix_r, x, previous))
        y, wkv = ops.wkv(
            k,
            v,
            state.wkv,
            w=jnp.exp(jnp.minimum(self.time_decay[...].astype(carry_dtype(dtype)), LARGEST_DECAY)),
            u=self.time_first[...],
            lengths=lengths,
            reset=reset,
            method=self.method,
            time_axis=self.time_axis,
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


class RWKVChannelMix(SequenceLayer[RWKVChannelMixState]):
    """RWKV-4's feed-forward part.

        >>> layer = RWKVChannelMix(64, 256, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        r, k = (μ ⊙ x_t + (1 − μ) ⊙ x_{t−1}) W, each with its own μ and W
        y_t = σ(r) ⊙ (max(k, 0)² W_v)

    x and y are (batch, time, features), the state `RWKVChannelMixState(last)`, (batch, features).

    Args:
        features: size of x_t and y_t.
        hidden_features: size of k; four times `features` in RWKV-4.
        layer_index: which layer of a model this is, 0 for the lowest.
        num_layers: how many layers the model has; the μ start as RWKV-4's do in this layer.
        time_major: x and y are (time, batch, features).
        dtype: the computation's dtype. None: from x and the parameters.
        param_dtype: the parameters' dtype.
        kernel_init: draws the three W. None: as RWKV-4, orthogonal for k, zero for the others.
        rngs: draws the parameters.

    Raises:
        ValueError: a size is not positive, or there is no such layer.

    Layouts: `blinkdl` (RWKV-LM's RWKV_ChannelMix), `hf` (transformers' RwkvFeedForward).

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        layer_index: Index = 0,
        num_layers: int = 1,
        time_major: bool = False,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(features, time_major=time_major, dtype=dtype, param_dtype=param_dtype)
        self.hidden_features = hidden_features
        _, height = depth_and_height(layer_index, num_layers)
        start = jnp.asarray((np.arange(features) / features) ** height, param_dtype)
        self.time_mix_k = nnx.Param(start)
        self.time_mix_r = nnx.Param(start)
        options = {"use_bias": False, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        small = kernel_init or nnx.initializers.zeros
        large = kernel_init or orthogonal
        self.key = Linear(features, hidden_features, kernel_init=large, **options)
        self.receptance = Linear(features, features, kernel_init=small, **options)
        self.value = Linear(hidden_features, features, kernel_init=small, **options)

    def init_state(self, batch_size: int) -> RWKVChannelMixState:
        """No last input: zeros, (batch, features), in at least float32."""
        dtype = self.state_dtype
        return RWKVChannelMixState(jnp.zeros((batch_size, self.in_features), dtype))

    def sequence(self, x, state, lengths, reset):
        """The receptance times the squared relu of the key, projected."""
        x = x.astype(self.computation_dtype(x))
        previous, last = token_shift(x, state.last, lengths, reset, self.time_axis)
        k = self.key(mixed(self.time_mix_k, x, previous))
        r = self.receptance(mixed(self.time_mix_r, x, previous))
        y = jax.nn.sigmoid(r) * self.value(jax.nn.relu(k) ** 2)
        return y, RWKVChannelMixState(last)

    mesh_axes = (
        last_axis("hidden", "key")
        | first_axis("hidden", "value.kernel")
        | last_axis("features", "receptance")
    )

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
    """What a block carries."""

    att: Att
    ffn: RWKVChannelMixState


PARTS = {
    "blinkdl": ("ln0", "ln1", "ln2", "att", "ffn"),
    "fla": ("pre_norm", "attn_norm", "ffn_norm", "attn", "ffn"),
    "hf": ("pre_ln", "ln1", "ln2", "attention", "feed_forward"),
}
"""What the layouts call `ln0`, `ln1`, `ln2`, `att` and `ffn`."""


class ResidualMixes(SequenceLayer[RWKVBlockState[Att]]):
    """What the blocks of all RWKVs are: a time mix and a channel mix, each added to its input.

        x ← ln0(x)              in the lowest layer only
        x ← x + att(ln1(x))
        x ← x + ffn(ln2(x))

    A subclass makes `att` and `ffn`.
    """

    divides_time = True

    att: SequenceLayer[Att]
    ffn: SequenceLayer[RWKVChannelMixState]

    def __init__(
        self,
        features: int,
        *,
        layer_index: Index,
        in_features: int | None = None,
        time_major: bool,
        dtype: FloatingDtype | None,
        param_dtype: FloatingDtype,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features or features, time_major=time_major, dtype=dtype, param_dtype=param_dtype
        )
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.ln0 = LayerNorm(features, **options) if layer_index == 0 else None
        self.ln1 = LayerNorm(features, **options)
        self.ln2 = LayerNorm(features, **options)

    def init_state(self, batch_size: int) -> RWKVBlockState[Att]:
        """The initial states of the two parts."""
        return RWKVBlockState(self.att.init_state(batch_size), self.ffn.init_state(batch_size))

    def sequence(self, x, state, lengths, reset):
        """The time mix, then the channel mix, each after a norm and added to its input."""
        x = x.astype(self.computation_dtype(x))
        if self.ln0 is not None:
            x = self.ln0(x)
        y, att = self.att.sequence(self.ln1(x), state.att, lengths, reset)
        x = x + y
        y, ffn = self.ffn.sequence(self.ln2(x), state.ffn, lengths, reset)
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
        layer_index: which layer of a model this is, 0 for the lowest.
        num_layers: how many layers the model has.
        time_major: x and y are (time, batch, features).
        dtype: the computation's dtype. None: from x and the parameters.
        param_dtype: the parameters' dtype.
        kernel_init: draws the matrices. None: as RWKV-4 does.
        rngs: draws the parameters.

    Raises:
        ValueError: a size is not positive, or there is no such layer.

    Layouts: `blinkdl` (RWKV-LM's Block), `hf` (transformers' RwkvBlock).

    """

    def __init__(
        self,
        features: int,
        hidden_features: int | None = None,
        *,
        layer_index: Index = 0,
        num_layers: int = 1,
        time_major: bool = False,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        shared: dict[str, Any] = {
            "layer_index": layer_index,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "rngs": rngs,
        }
        super().__init__(features, time_major=time_major, **shared)
        shared |= {"num_layers": num_layers, "kernel_init": kernel_init}
        self.att = RWKVTimeMix(features, **shared)
        self.ffn = RWKVChannelMix(features, hidden_features or 4 * features, **shared)

    foreign_format = staticmethod(foreign_to("RWKV-4"))


def token_shift(
    x: Float[Array, "batch time features"],
    last: Float[Array, "batch features"],
    lengths: Int[Array, " batch"] | None,
    reset: Bool[Array, "batch time"] | None,
    time_axis: str | None,
) -> tuple[Float[Array, "batch time features"], Float[Array, "batch features"]]:
    """`x_{t−1}` at each step, zero at a `reset`, and each row's last input."""
    (previous, _), state = ops.delayed(
        x,
        CausalConv1DState(last[..., None]),
        lengths=lengths,
        reset=reset,
        time_axis=time_axis,
    )
    return previous, state.inputs[..., 0]


def toward(
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
    """The features by head."""
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


def orthogonal(
    key, shape: tuple[int, int], dtype, *, gain: float | None = None, **_
) -> Float[Array, "in out"]:
    """RWKV-4's orthogonal (in, out) matrices: by default, where out > in, longer by √(out / in)."""
    gain = math.sqrt(max(shape[1] / shape[0], 1)) if gain is None else gain
    return nnx.initializers.orthogonal(gain)(key, shape, carry_dtype(dtype)).astype(dtype)


def depth_and_height(layer_index: int, num_layers: int) -> tuple[float, float]:
    """How far up a layer is, 0 (lowest) to 1 (highest), and what remains, 1 to almost 0."""
    if not 0 <= layer_index < num_layers:
        raise ValueError(
            f"layer_index: expected 0 … num_layers − 1 = {num_layers - 1}, got {layer_index}"
        )
    return layer_index / max(num_layers - 1, 1), 1 - layer_index / num_layers
