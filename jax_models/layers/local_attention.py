"""Attention over a window, as in Griffin (arXiv 2402.19427)."""

__all__ = ["LocalAttention", "LocalAttentionState"]

from typing import Unpack

import jax.numpy as jnp
from jaxtyping import Array

from jax_models import ops
from jax_models.layers.linear import Linear, normal_of_fan_in
from jax_models.mesh_axes import MeshAxes, first_axis, last_axis
from jax_models.ops import LocalAttentionState
from jax_models.ops.checks import Positive, check_divides
from jax_models.ops.rotary import checked_rotated
from jax_models.options import Initializer, LayerOptions, refuse_unused, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, dense, linear, parts, transposed


class LocalAttention(SequenceLayer[LocalAttentionState]):
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

    Layouts: `hf` (transformers' RecurrentGemmaAttention). With a single head of keys and values,
    and a bias only in the last projection: `deepmind` (recurrentgemma's LocalAttentionBlock in
    Flax) and `deepmind-torch`. Without any biases: `hippogriff` (its SlidingMQA).

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
        rope_theta: Positive = 10_000.0,
        use_bias: bool = False,
        out_bias: bool = True,
        out_init: Initializer | None = None,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        check_divides("num_heads", num_heads, "features", features)
        check_divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)
        self.num_heads, self.num_kv_heads, self.window = num_heads, num_kv_heads, window
        self.head_features = features // num_heads
        rotated = int(self.head_features * rotary_fraction)
        self.rotated = checked_rotated("rotary_fraction", rotated, self.head_features)
        self.rope_theta = rope_theta
        refuse_unused(
            "bias_init",
            options.get("bias_init"),
            unless=use_bias or out_bias,
            because="with use_bias=False and out_bias=False",
        )
        matrix = with_inits(options, normal_of_fan_in())
        of_keys = num_kv_heads * self.head_features
        self.q_proj = Linear(features, features, use_bias=use_bias, **matrix)
        self.k_proj = Linear(features, of_keys, use_bias=use_bias, **matrix)
        self.v_proj = Linear(features, of_keys, use_bias=use_bias, **matrix)
        matrix["kernel_init"] = out_init or matrix["kernel_init"]
        self.out_proj = Linear(features, features, use_bias=out_bias, **matrix)

    def init_state(self, batch_size: int) -> LocalAttentionState:
        """An empty cache of keys and values, in at least float32."""
        shape = (batch_size, self.window - 1, self.num_kv_heads, self.head_features)
        keys, values = jnp.zeros((2, *shape), self.state_dtype)
        return LocalAttentionState(jnp.zeros(batch_size, jnp.int32), keys, values)

    def sequence(self, x, state, rows):
        """Runs `ops.local_attention` between the projections."""
        x = x.astype(self.computation_dtype(x))
        batch_size, time, _ = x.shape
        positions, _ = rows.positions(state.position, time)

        def heads(projection: Linear) -> Array:
            count = projection.out_features // self.head_features
            return projection(x).reshape(batch_size, time, count, self.head_features)

        rotary = {"rotated": self.rotated, "theta": self.rope_theta}
        q = ops.rotary(heads(self.q_proj), positions, **rotary)
        k = ops.rotary(heads(self.k_proj), positions, **rotary)
        y, state = ops.local_attention(q, k, heads(self.v_proj), state, rows=rows)
        return self.out_proj(y.reshape(x.shape)), state

    @property
    def mesh_axes(self) -> MeshAxes:
        """The heads are divided. Keys and values that several heads share stay whole."""
        of_keys = ("k_proj", "v_proj") if self.num_kv_heads == self.num_heads else ()
        return last_axis("heads", "q_proj", *of_keys) | first_axis("heads", "out_proj.kernel")

    def torch_layouts(self) -> Layouts:
        """`hf`, and the layouts of recurrentgemma or hippogriff if it has such a layer."""
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
