"""Attention over a window, as in Griffin (arXiv 2402.19427)."""

__all__ = ["LocalAttention", "LocalAttentionState"]

from typing import Unpack

from jax_models.checks.values import Positive, check_divides
from jax_models.layers.attention import Attention
from jax_models.ops import LocalAttentionState
from jax_models.ops.rotary import checked_rotated
from jax_models.options import Initializer, LayerOptions


class LocalAttention(Attention):
    """Attention over a window, with rotary positions.

        >>> layer = LocalAttention(64, num_heads=4, window=16, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

    Each head computes softmax(q kᵀ / √(features / heads)) v over the current step and the
    window − 1 steps before it, where q and k are rotated by `ops.rotary`. A projection follows. x
    and y are (batch, time, features). The state is `LocalAttentionState(position, keys, values)`
    with the rotated keys and the values of the last window − 1 steps. A step costs O(window).

    Args:
        features: size of x_t and y_t.
        num_heads: number of heads of the queries, each of size features / num_heads.
        num_kv_heads: number of heads of the keys and values, a divisor of num_heads. Each is shared
            by num_heads / num_kv_heads neighboring heads of the queries.
        window: number of steps that each step sees, including itself.
        rotary_fraction: the fraction of each head's features that is rotated, starting with the
            first.
        rope_theta: θ of `ops.rotary`.
        use_bias: whether queries, keys and values have biases.
        out_bias: whether the last projection has a bias.
        out_init: initializes the last projection's matrix. None: like the others.
        **options: as in `LayerOptions`. The matrices are drawn from a normal distribution with
            variance 1 / inputs, and the biases are zero.

    Raises:
        ValueError: a size is not positive, num_heads does not divide the features, num_kv_heads
            does not divide num_heads, the number of rotated features of a head is odd, or
            `bias_init` is given without biases.

    Layouts: those that the architectures declare. `torch_layouts` lists them.

    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int = 1,
        window: int = 2048,
        rotary_fraction: float = 0.5,
        rope_theta: Positive = 10_000.0,
        use_bias: bool = False,
        out_bias: bool = True,
        out_init: Initializer | None = None,
        **options: Unpack[LayerOptions],
    ):
        check_divides("num_heads", num_heads, "features", features)
        head_features = features // num_heads
        rotated = int(head_features * rotary_fraction)
        super().__init__(
            features,
            num_heads,
            num_kv_heads=num_kv_heads,
            window=window,
            rotary_features=checked_rotated("rotary_fraction", rotated, head_features),
            rope_theta=rope_theta if rotated else None,
            use_bias=use_bias,
            out_bias=out_bias,
            out_init=out_init,
            **options,
        )
