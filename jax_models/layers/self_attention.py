"""The pre-norm transformer block with which The Annotated Hyena compares Hyena."""

__all__ = ["SelfAttentionBlock", "SelfAttentionState"]

from typing import Unpack

import jax.numpy as jnp
from flax import nnx

from jax_models import ops
from jax_models.checks.values import check_divides
from jax_models.layers.attention import CachedAttention
from jax_models.layers.dropout import Dropout
from jax_models.layers.linear import Linear, torch_uniform
from jax_models.layers.norm import LayerNorm
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.ops import LocalAttentionState
from jax_models.options import LayerOptions, norm_options, with_inits
from jax_models.weights import Layouts, layer_norm, linear, same, transposed

SelfAttentionState = LocalAttentionState
"""The state of `SelfAttentionBlock`, with a slot for each step up to max_length."""


class SelfAttentionBlock(CachedAttention[LocalAttentionState]):
    """A pre-norm transformer block with causal self-attention.

        >>> layer = SelfAttentionBlock(64, num_heads=4, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        z = x + attention(ln1(x))
        y = z + gelu(ln3(z) W_up + b_up) W_down + b_down

    Each head of the attention computes softmax(q kᵀ / √(features / heads)) v over the steps up to
    the current one, and a projection follows. x and y are (batch, time, features), and the state is
    `SelfAttentionState(position, keys, values)`. gelu is the exact GELU, with erf. A step costs
    O(steps of the document so far). The outputs from step max_length of a document on are NaN.

    Args:
        features: size of x_t and y_t.
        num_heads: number of heads, each of size features / num_heads.
        max_length: the length of the longest sequence, and the number of slots of the state.
        dropout_rate: rate of the dropout of the attention weights and of the MLP's output in
            training.
        **options: as in `LayerOptions`. Matrices start as in torch, biases at zero.

    Raises:
        ValueError: a size is not positive, the heads do not divide the features, or (at the call)
            x is longer than max_length.

    Layouts: `annotated-hyena` (torch_ref.SelfAttentionBlock, with a torch.nn.MultiheadAttention).

    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        max_length: int = 1024,
        dropout_rate: float = 0.0,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        check_divides("num_heads", num_heads, "features", features)
        self.num_kv_heads, self.head_features = num_heads, features // num_heads
        self.max_length = max_length
        self.ln1 = LayerNorm(features, **norm_options(options))
        self.ln3 = LayerNorm(features, **norm_options(options))
        narrow, wide = (with_inits(options, torch_uniform(n)) for n in (features, 4 * features))
        xavier = with_inits(options, nnx.initializers.xavier_uniform())
        self.in_proj = Linear(features, 3 * features, **xavier)
        self.out_proj = Linear(features, features, **narrow)
        self.up_proj = Linear(features, 4 * features, **narrow)
        self.down_proj = Linear(4 * features, features, **wide)
        self.dropout = Dropout(dropout_rate, rngs=options["rngs"])

    def sequence(self, x, state, rows):
        """Runs attention, then the MLP, each after a norm and added to its input."""
        x = x.astype(self.computation_dtype(x))
        # Project to queries, keys and values, and split each into heads.
        q, k, v = (
            part.reshape(*part.shape[:2], self.num_kv_heads, self.head_features)
            for part in jnp.split(self.in_proj(self.ln1(x)), 3, axis=-1)
        )
        # Dropout needs the attention weights as an array, so pass it on only if it drops any.
        drops = self.dropout.rate > 0 and not self.dropout.deterministic
        dropout = self.dropout if drops else None
        attended, state = self.attend(q, k, v, state, rows, dropout)
        z = x + self.out_proj(attended.reshape(x.shape))
        # The MLP follows, with its own norm and residual connection.
        mlp = self.down_proj(ops.gelu(self.up_proj(self.ln3(z))))
        return z + self.dropout(mlp), state

    mesh_axes = (
        last_axis("heads", "in_proj")
        | first_axis("heads", "out_proj.kernel")
        | last_axis("hidden", "up_proj")
        | first_axis("hidden", "down_proj.kernel")
    )

    def torch_layouts(self) -> Layouts:
        """`annotated-hyena`: the keys of torch_ref.SelfAttentionBlock."""
        return {
            "annotated-hyena": [
                *layer_norm("ln1", "ln1"),
                *layer_norm("ln3", "ln3"),
                transposed("in_proj.kernel", "self_attn.attn.in_proj_weight"),
                same("in_proj.bias", "self_attn.attn.in_proj_bias"),
                *linear("out_proj", "self_attn.attn.out_proj"),
                *linear("up_proj", "mlp.0"),
                *linear("down_proj", "mlp.2"),
            ]
        }
