"""The parts that all versions of RWKV share."""

__all__ = ["RWKVBlockState", "RWKVChannelMixState"]

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.checks.arguments import Default
from jax_models.checks.values import check_divides
from jax_models.layers.linear import Linear
from jax_models.layers.norm import LayerNorm
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.ops import CausalConv1DState, Rows, carry_dtype
from jax_models.ops.delta import DELTA_RULE
from jax_models.options import Index, Initializer, MatrixOptions, norm_options, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, layer_norm, nested

LARGEST_DECAY = 80.0
"""The upper bound of time_decay. Larger values would overflow, and already at this one the state
forgets everything.
"""


class RWKVOptions(MatrixOptions, total=False):
    """The keyword arguments of the layers of all versions of RWKV."""

    layer_index: Annotated[Index, Default(0)]
    """The index of the layer in its model, 0 for the lowest."""
    num_layers: Annotated[int, Default(1)]
    """The number of layers of the model. Vectors such as decays, bonuses and the μ are initialized
    as in the training code, by functions of the layer and the channel.
    """


def orthogonal(
    key, shape: tuple[int, int], dtype, *, gain: float | None = None, **_
) -> Float[Array, "in out"]:
    """Draws an orthogonal matrix as RWKV-4 does, by default times √(out / in) if out > in."""
    gain = math.sqrt(max(shape[1] / shape[0], 1)) if gain is None else gain
    return nnx.initializers.orthogonal(gain)(key, shape, carry_dtype(dtype)).astype(dtype)


unit_orthogonal: Initializer = partial(orthogonal, gain=1.0)
"""Draws an orthogonal matrix, with singular values of 1 for any shape."""


def scaled_orthogonal(factor: float) -> Initializer:
    """Returns the initializer `orthogonal`, multiplied by a factor."""
    return lambda *args, **kwargs: factor * orthogonal(*args, **kwargs)


def matrix_builder(options: RWKVOptions) -> Callable[..., Linear]:
    """Returns a function that builds a `Linear` from its sizes and initializer (default: zeros)."""

    def matrix(in_features: int, out_features: int, init: Initializer = nnx.initializers.zeros):
        return Linear(in_features, out_features, **with_inits(options, init, None, use_bias=False))

    return matrix


class RWKVChannelMixState(NamedTuple):
    """The state of a channel mix: its last input."""

    last: Float[Array, "batch features"]


class ChannelMix(SequenceLayer[RWKVChannelMixState]):
    """The base class of the channel mixes, the feed-forward parts.

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
    """The prefix of the names of the μ. The first letter of the projection follows."""
    key_init = staticmethod(orthogonal)

    def __init__(self, features: int, hidden_features: int, **options: Unpack[RWKVOptions]):
        super().__init__(features, **options)
        self.hidden_features = hidden_features
        _, height = depth_and_height(options)
        start = self.first_mix(np.arange(features) / features, height)
        start = jnp.asarray(start, self.param_dtype)
        matrix = matrix_builder(options)
        for letter in "kr" if self.gated else "k":
            setattr(self, f"{self.prefix}{letter}", nnx.Param(start))
        self.key = matrix(features, hidden_features, self.key_init)
        if self.gated:
            self.receptance = matrix(features, features)
        self.value = matrix(hidden_features, features)

    def first_mix(self, channel: np.ndarray, height: float) -> np.ndarray:
        """Returns the initial μ. `channel` rises from 0 towards 1 over the features."""
        raise NotImplementedError  # a subclass defines it

    def mix_with_previous(self, letter: str, x: Array, previous: Array) -> Array:
        """The input of a projection: from RWKV-6 on, `x_t + μ ⊙ (x_{t−1} − x_t)`."""
        return lerp_to_previous(x, previous, getattr(self, f"{self.prefix}{letter}"))

    def init_state(self, batch_size: int) -> RWKVChannelMixState:
        """A last input of zeros, (batch, features), in at least float32."""
        return RWKVChannelMixState(jnp.zeros((batch_size, self.in_features), self.state_dtype))

    def sequence(self, x, state, rows):
        """Projects the squared relu of the key, and multiplies it by the receptance, if any."""
        x = x.astype(self.computation_dtype(x))
        # Each projection reads its own mixture of the current and the previous input.
        previous, last = token_shift(x, state.last, rows)
        k = self.key(self.mix_with_previous("k", x, previous))
        if not self.gated:
            return self.value(jax.nn.relu(k) ** 2), RWKVChannelMixState(last)
        r = self.receptance(self.mix_with_previous("r", x, previous))
        return jax.nn.sigmoid(r) * self.value(jax.nn.relu(k) ** 2), RWKVChannelMixState(last)


Att = TypeVar("Att")
"""The state of a time mix."""


class RWKVBlockState(NamedTuple, Generic[Att]):
    """The state of a block: the states of its time mix and its channel mix."""

    att: Att
    ffn: RWKVChannelMixState


PART_KEYS = {
    "blinkdl": ("ln0", "ln1", "ln2", "att", "ffn"),
    "fla": ("pre_norm", "attn_norm", "ffn_norm", "attn", "ffn"),
    "hf": ("pre_ln", "ln1", "ln2", "attention", "feed_forward"),
}
"""The names of `ln0`, `ln1`, `ln2`, `att` and `ffn` in each layout."""


class RWKVResidualBlock(SequenceLayer[RWKVBlockState[Att]]):
    """The base class of the blocks: a time mix, a channel mix and residuals.

    A subclass builds `att` and `ffn`. If the time mix needs further inputs beside x, its `sequence`
    takes and returns a tuple that begins with x, and the block passes on the other items.
    """

    divides_time = True

    att: SequenceLayer[Att]
    ffn: ChannelMix

    def __init__(
        self, features: int, *, in_features: int | None = None, **options: Unpack[RWKVOptions]
    ):
        super().__init__(in_features or features, **options)
        norm = partial(LayerNorm, features, **norm_options(options))
        self.ln0 = norm() if options.get("layer_index") == 0 else None
        self.ln1 = norm()
        self.ln2 = norm()

    def init_state(self, batch_size: int) -> RWKVBlockState[Att]:
        return RWKVBlockState(self.att.init_state(batch_size), self.ffn.init_state(batch_size))

    def split(self, x):
        return self.att.split(x)

    def sequence(self, x, state, rows) -> Any:
        """Runs the time mix, then the channel mix, each after a norm and added to its input."""
        # In RWKV-7, the values of the lowest layer pass through all blocks beside x. The time mix
        # reads and returns them.
        x, *others = x if isinstance(x, tuple) else (x,)
        x = x.astype(self.computation_dtype(x))
        # The lowest block also norms the token embedding.
        if self.ln0 is not None:
            x = self.ln0(x)
        # Run the time mix, which reads the past.
        normed: Any = (self.ln1(x), *others) if others else self.ln1(x)
        y, att = self.att.sequence(normed, state.att, rows)
        y, *others = y if isinstance(y, tuple) else (y,)
        x = x + y
        # Run the channel mix, which mixes the features of a step and the one before it.
        y, ffn = self.ffn.sequence(self.ln2(x), state.ffn, rows)
        return (x + y, *others) if others else x + y, RWKVBlockState(att, ffn)

    def torch_layouts(self) -> Layouts:
        """The layouts that both parts have, with the keys of a block."""
        att, ffn = self.att.torch_layouts(), self.ffn.torch_layouts()
        norms = ("ln1", "ln2") if self.ln0 is None else ("ln0", "ln1", "ln2")
        layouts = {}
        for layout in (layout for layout in PART_KEYS if layout in att and layout in ffn):
            names = dict(zip(PART_KEYS["blinkdl"], PART_KEYS[layout], strict=True))
            layouts[layout] = [
                *(row for norm in norms for row in layer_norm(norm, names[norm])),
                *nested(att[layout], "att", names["att"]),
                *nested(ffn[layout], "ffn", names["ffn"]),
            ]
        return layouts


def token_shift(
    x: Float[Array, "batch time features"],
    last: Float[Array, "batch features"],
    rows: Rows,
) -> tuple[Float[Array, "batch time features"], Float[Array, "batch features"]]:
    """Returns `x_{t−1}` at each step, zero at a `reset`, and each row's last input."""
    (previous, _), state = ops.delayed(x, CausalConv1DState(last[..., None]), rows=rows)
    return previous, state.inputs[..., 0]


def lerp_to_previous(
    x: Float[Array, "batch time features"],
    previous: Float[Array, "batch time features"],
    mu: nnx.Param,
    by_data: Float[Array, "batch time features"] | None = None,
) -> Float[Array, "batch time features"]:
    """`x_t + μ ⊙ (x_{t−1} − x_t)`, the mix of RWKV-6 and later; `by_data` is added to μ."""
    weight = jnp.broadcast_to(mu[...].astype(x.dtype), x.shape)
    return x + (previous - x) * (weight if by_data is None else weight + by_data.astype(x.dtype))


def low_rank(
    x: Float[Array, "batch time features"],
    down: nnx.Variable,
    up: nnx.Variable,
    nonlinearity: Callable[[Array], Array] = lambda y: y,
    base: nnx.Variable | None = None,
) -> Float[Array, "batch time features"]:
    """`base + nonlinearity(x W₁) W₂`, in at least float32."""
    hidden = nonlinearity(ops.affine(x, down[...].astype(x.dtype)))
    y = ops.affine(hidden, up[...].astype(x.dtype))
    return y if base is None else jnp.broadcast_to(base[...].astype(y.dtype), y.shape) + y


class HeadedTimeMix(SequenceLayer[Att]):
    """The base class of the time mixes from RWKV-6 on, in which the state of each head is a matrix.

    A subclass sets `state_type`.
    """

    divides_time = True

    state_type: ClassVar[Callable[[Array, Array], Any]]

    def __init__(
        self,
        in_features: int,
        features: int,
        head_size: int,
        method: ops.DeltaRuleMethod,
        **options: Unpack[RWKVOptions],
    ):
        super().__init__(in_features, **options)
        check_divides("head_size", head_size, "features", features)
        self.features, self.heads, self.head_size = features, features // head_size, head_size
        self.method = DELTA_RULE.checked_method(method)

    def init_state(self, batch_size: int) -> Att:
        """A last input and matrices of zeros, in at least float32."""
        matrix_shape = (batch_size, self.heads, self.head_size, self.head_size)
        shapes = ((batch_size, self.features), matrix_shape)
        return self.state_type(*(jnp.zeros(shape, self.state_dtype) for shape in shapes))


def heads_of(
    x: Float[Array, "batch time features"], head_size: int
) -> Float[Array, "batch time heads head"]:
    """Splits the features into heads."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // head_size, head_size)


def depth_and_height(options: Any) -> tuple[float, float]:
    """Returns a layer's depth from 0 to 1, and the fraction of the layers from it to the top."""
    layer_index, num_layers = options["layer_index"], options["num_layers"]
    if not 0 <= layer_index < num_layers:
        raise ValueError(
            f"layer_index: expected 0 … num_layers − 1 = {num_layers - 1}, got {layer_index}"
        )
    return layer_index / max(num_layers - 1, 1), 1 - layer_index / num_layers
