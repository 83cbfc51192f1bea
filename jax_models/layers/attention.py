"""The pre-norm transformer block with which The Annotated Hyena compares Hyena."""

__all__ = ["SelfAttentionBlock", "SelfAttentionState"]

from typing import NamedTuple, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_models import ops
from jax_models.layers.dropout import Dropout
from jax_models.layers.linear import Linear, torch_uniform
from jax_models.layers.norm import LayerNorm
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.ops.checks import check_divides
from jax_models.ops.rows import Rows, at_end
from jax_models.options import LayerOptions, norm_options, with_inits
from jax_models.sequence import SequenceLayer, check_time
from jax_models.weights import Layouts, layer_norm, linear, same, transposed


class SelfAttentionState(NamedTuple):
    """The state of attention: the keys and values of the document so far, starting at slot 0."""

    position: Int[Array, " batch"]
    """The number of keys so far."""
    keys: Float[Array, "batch max_length heads head_features"]
    values: Float[Array, "batch max_length heads head_features"]


class SelfAttentionBlock(SequenceLayer[SelfAttentionState]):
    """A pre-norm transformer block with causal self-attention.

        >>> layer = SelfAttentionBlock(64, num_heads=4, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        z = x + attention(ln1(x))
        y = z + gelu(ln3(z) W_up + b_up) W_down + b_down

    Each head of the attention computes softmax(q kᵀ / √(features / heads)) v over the steps up to
    the current one, and a projection follows. x and y are (batch, time, features), and the state is
    `SelfAttentionState(position, keys, values)`. gelu is the exact GELU, with erf. A step costs
    O(max_length). The outputs from step max_length of a document on are NaN.

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
        self.num_heads = num_heads
        check_divides("num_heads", num_heads, "features", features)
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

    def init_state(self, batch_size: int) -> SelfAttentionState:
        """An empty cache of keys and values, in at least float32."""
        head_features = self.in_features // self.num_heads
        shape = (batch_size, self.max_length, self.num_heads, head_features)
        keys, values = jnp.zeros((2, *shape), self.state_dtype)
        return SelfAttentionState(jnp.zeros(batch_size, jnp.int32), keys, values)

    def start(self, batch_size: int) -> None:
        """None: at the beginning, there is nothing to attend to except x."""
        return None

    def sequence(self, x, state, rows):
        """Attention, then the MLP, each after a norm and added to its input."""
        x = x.astype(self.computation_dtype(x))
        heads = (self.num_heads, self.in_features // self.num_heads)
        q, k, v = (
            part.reshape(*part.shape[:2], *heads)
            for part in jnp.split(self.in_proj(self.ln1(x)), 3, axis=-1)
        )
        attended, state = self.attend(q, k, v, state, rows)
        z = x + self.out_proj(attended.reshape(x.shape).astype(x.dtype))
        mlp = self.down_proj(ops.gelu(self.up_proj(self.ln3(z))))
        return z + self.dropout(mlp), state

    def attend(
        self,
        q: Float[Array, "batch time heads head_features"],
        k: Float[Array, "batch time heads head_features"],
        v: Float[Array, "batch time heads head_features"],
        state: SelfAttentionState | None,
        rows: Rows,
    ) -> tuple[Float[Array, "batch time heads head_features"], SelfAttentionState]:
        """Attends to the keys of the state and of the sequence, and returns the state after it."""
        batch_size, time = q.shape[:2]
        if rows.reset is None:
            check_time("x", time, self.max_length)

        # Write the keys and values into the cache.
        before = self.init_state(batch_size) if state is None else state
        positions, end = rows.positions(before.position, time)
        document = None
        if rows.reset is not None:
            document = jnp.cumsum(rows.reset, axis=1, dtype=jnp.int32)
        after = _written(before, k, v, positions, end, document, rows)
        # A single step reads the updated cache. A sequence reads the old cache and its own keys,
        # because the updated cache no longer holds the keys of documents that ended in the
        # sequence.
        slots = jnp.arange(self.max_length, dtype=jnp.int32)[None, None]
        if state is not None and time == 1 and rows == Rows():
            k, v = after.keys, after.values
            mask = slots <= positions[..., None]
        else:
            steps = jnp.arange(time, dtype=jnp.int32)
            mask = jnp.broadcast_to(steps[:, None] >= steps[None], (batch_size, time, time))
            if document is not None:
                mask = mask & (document[:, :, None] == document[:, None])
            if state is not None:
                cached = slots < state.position[:, None, None]
                cached = jnp.broadcast_to(cached, (batch_size, time, self.max_length))
                if document is not None:
                    cached = cached & (document == 0)[:, :, None]
                mask = jnp.concatenate([cached, mask], axis=2)
                k = jnp.concatenate([state.keys.astype(k.dtype), k], axis=1)
                v = jnp.concatenate([state.values.astype(v.dtype), v], axis=1)
        drops = self.dropout.rate > 0 and not self.dropout.deterministic
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        y = ops.attention(q, k, v, mask, dropout=self.dropout if drops else None)
        return jnp.where((positions < self.max_length)[..., None, None], y, jnp.nan), after

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


def _written(
    state: SelfAttentionState,
    k: Float[Array, "batch time heads head_features"],
    v: Float[Array, "batch time heads head_features"],
    positions: Int[Array, "batch time"],
    end: Int[Array, " batch"],
    document: Int[Array, "batch time"] | None,
    rows: Rows,
) -> SelfAttentionState:
    """Writes the keys and values of each row's last document into the state."""
    batch_size, time = positions.shape
    cache = {"keys": state.keys, "values": state.values}
    kept = jnp.ones((batch_size, time), bool) if rows.active is None else rows.active
    if document is not None:
        last = at_end(jnp.zeros(batch_size, jnp.int32), document, rows.lengths)
        kept = kept & (document == last[:, None])
        carried = (last == 0)[:, None, None, None]
        cache = {name: jnp.where(carried, array, 0) for name, array in cache.items()}
    row = jnp.arange(batch_size, dtype=jnp.int32)[:, None]
    slots = jnp.where(kept, positions, state.keys.shape[1])
    for name, new in {"keys": k, "values": v}.items():
        new = new.astype(cache[name].dtype)
        cache[name] = cache[name].at[row, slots].set(new, mode="drop")
    return SelfAttentionState(end, **cache)
