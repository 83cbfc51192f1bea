"""Lightning attention (arXiv 2401.04658), the recurrent layer of MiniMax-Text-01."""

__all__ = ["LightningAttention", "LightningAttentionState"]

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.checks.values import Positive, check_divides
from jax_models.layers.linear import Linear
from jax_models.layers.norm import RMSNorm
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.ops import carry_dtype
from jax_models.ops.delta import GATED_DELTA_RULE
from jax_models.options import Index, MatrixOptions, filter_options, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import SharedLayer


def slopes(num_heads: int, layer_index: int, num_layers: int) -> np.ndarray:
    """The rate at which each head forgets, in float64.

    Heads forget at rates in a geometric sequence, and a model's higher layers forget more slowly.
    """
    rates = 2.0 ** (-8 * np.arange(1, num_heads + 1) / num_heads)
    return rates * (1 - layer_index / (num_layers - 1 + 1e-5) + 1e-5)


class LightningAttentionState(NamedTuple):
    """The state of a lightning attention: a matrix for each head."""

    kv: Float[Array, "batch heads value key"]


class LightningAttention(SharedLayer, SequenceLayer[LightningAttentionState]):
    """Lightning attention: linear attention in which each head forgets at a fixed rate.

        >>> layer = LightningAttention(64, num_heads=4, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        q, k, v = silu(x W_q), silu(x W_k), silu(x W_v)
        S_t = exp(−s) S_{t−1} + v_t k_tᵀ,   o_t = S_t q_t                              by head
        s = 2^{−8 (h + 1) / num_heads} (1 − layer_index / (num_layers − 1 + 10⁻⁵) + 10⁻⁵)
        y = (norm(o) ⊙ σ(x W_g)) W_out

    h is the number of the head, from 0. `norm` is an RMSNorm over all heads together. x and y are
    (batch, time, features). The state is `LightningAttentionState(kv)`, which holds S (batch,
    num_heads, head_features, head_features). `ops.gated_delta_rule` computes o.

    Args:
        features: size of x_t and y_t.
        num_heads: number of heads, each with a matrix S.
        head_features: size of each head of q, k and v. None: features / num_heads.
        layer_index: the index of the layer among all layers of its model, 0 for the lowest.
        num_layers: the number of all layers of the model, of any kind.
        epsilon: ε of `norm`.
        method: the method of `ops.gated_delta_rule`.
        **options: as in `MatrixOptions`. Matrices are drawn from a normal distribution with a
            standard deviation of 0.02. S and `norm` are computed in at least float32.

    Raises:
        ValueError: a size or epsilon is not positive, num_heads does not divide the features and
            `head_features` is None, layer_index is not less than num_layers, or there is no such
            method.

    Layouts: `minimax` (the modules of MiniMax in transformers).

    Source: Qin et al. 2024 (arXiv 2401.04658); MiniMax 2025 (MiniMax-01, arXiv 2501.08313).

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        head_features: int | None = None,
        layer_index: Index = 0,
        num_layers: int = 1,
        epsilon: Positive = 1e-6,
        method: ops.GatedDeltaRuleMethod = "auto",
        **options: Unpack[MatrixOptions],
    ):
        super().__init__(features, **options)
        if head_features is None:
            check_divides("num_heads", num_heads, "features", features)
            head_features = features // num_heads
        if layer_index >= num_layers:
            raise ValueError(
                f"layer_index: expected less than num_layers = {num_layers}, got {layer_index}"
            )
        self.num_heads, self.head_features = num_heads, head_features
        self.slopes = tuple(slopes(num_heads, layer_index, num_layers).tolist())
        self.method = GATED_DELTA_RULE.checked_method(method)
        inner = num_heads * head_features
        matrix = with_inits(options, nnx.initializers.normal(0.02), None, use_bias=False)
        self.q_proj = Linear(features, inner, **matrix)
        self.k_proj = Linear(features, inner, **matrix)
        self.v_proj = Linear(features, inner, **matrix)
        self.g_proj = Linear(features, inner, **matrix)
        self.out_proj = Linear(inner, features, **matrix)
        # Without a dtype, the norm keeps the precision of o, which is at least float32.
        self.norm = RMSNorm(inner, epsilon=epsilon, **filter_options(options))

    def init_state(self, batch_size: int) -> LightningAttentionState:
        """Zeros, in at least float32."""
        shape = batch_size, self.num_heads, self.head_features, self.head_features
        return LightningAttentionState(jnp.zeros(shape, self.state_dtype))

    def sequence(self, x, state, rows):
        """Runs `ops.gated_delta_rule` without a correction, then norms, gates and projects."""
        dtype = self.computation_dtype(x)
        x = x.astype(dtype)
        shape = *x.shape[:2], self.num_heads, self.head_features
        q, k, v = (
            jax.nn.silu(projection(x)).reshape(shape)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        log_decay = jnp.broadcast_to(-jnp.asarray(self.slopes, carry_dtype(dtype)), shape[:3])
        o, kv = ops.gated_delta_rule(
            q, k, v, log_decay, None, state.kv, method=self.method, rows=rows
        )
        g = self.g_proj(x)
        y = self.gated(o.reshape(g.shape), g).astype(dtype)
        return self.out_proj(y), LightningAttentionState(kv)

    def gated(
        self, o: Float[Array, "batch time inner"], g: Float[Array, "batch time inner"]
    ) -> Float[Array, "batch time inner"]:
        """`norm(o) ⊙ σ(g)`, in at least float32."""
        return self.norm(o).astype(o.dtype) * jax.nn.sigmoid(g.astype(o.dtype))

    mesh_axes = last_axis("heads", "q_proj", "k_proj", "v_proj", "g_proj") | first_axis(
        "heads", "out_proj.kernel"
    )
