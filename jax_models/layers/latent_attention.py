"""Multi-head latent attention (arXiv 2405.04434), the attention of Kimi Linear and Ling 3."""

__all__ = ["LatentAttention", "LatentAttentionState"]

import math
from functools import partial
from typing import Unpack

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.checks.values import Positive
from jax_models.layers.attention import CachedAttention
from jax_models.layers.linear import Linear, normal_of_fan_in
from jax_models.layers.norm import RMSNorm
from jax_models.mesh_axes import first_axis, last_axis, whole
from jax_models.ops.attention.latent_attention import LatentAttentionState, latent_attention
from jax_models.options import LayerOptions, norm_options, refuse_unused, with_inits
from jax_models.weights import Layouts, SharedLayer, Table, linear, rms_norm


class LatentAttention(SharedLayer, CachedAttention[LatentAttentionState]):
    """Multi-head latent attention (MLA): keys and values are computed from a few latent features.

        >>> layer = LatentAttention(64, 4, latent_features=32, key_features=16, shared_features=8,
        ...                         value_features=16, max_length=256, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        q = x W_q,   c = norm(x W_c),   κ = x W_κ
        k = c W_k,   v = c W_v                                     by head
        a = softmax((q₁ kᵀ + rotary(q₂) rotary(κ)ᵀ) / √(key_features + shared_features))
        y = (a v ⊙ σ(x W_g)) W_out

    Each head's query has two parts: q₁, as large as k, and q₂, as large as κ. All heads share κ.
    The softmax of each head is over the steps up to the current one. x and y are (batch, time,
    features). The state is `LatentAttentionState(position, latents)`, where the latents of a step
    are c and the rotated κ. They are much smaller than the keys and values of all heads. The state
    has `max_length` slots, and the outputs from step max_length of a document on are NaN.

    A single step multiplies q₁ by W_k and the weighted sum of c by W_v, instead of computing the
    keys and values of all earlier steps. Longer sequences are computed this way, too, if it takes
    fewer multiplications.

    Args:
        features: size of x_t and y_t.
        num_heads: number of heads.
        latent_features: size of c.
        key_features: size of the part of the query and the key of which each head has its own.
        shared_features: size of κ.
        value_features: size of the value of a head.
        query_features: if given, q = norm(x W_a) W_b, with this number of columns of W_a.
        rope_theta: θ of `ops.rotary`, which rotates neighboring features. None: no rotation.
        output_gate: whether each head's result is multiplied by a gate, the number σ(x W_g).
        use_bias: whether W_a, W_c, W_κ and W_out have biases.
        epsilon: ε of the norms.
        max_length: the length of the longest document that a state can hold, as in `Attention`.
        **options: as in `LayerOptions`. The matrices are drawn from a normal distribution with
            variance 1 / inputs, and the biases are zero.

    Raises:
        ValueError: a size or epsilon is not positive, shared_features is odd although it is
            rotated, or `bias_init` is given without biases. At the call: x is longer than
            max_length, or a state is given without a `max_length`.

    Layouts: `deepseek` (the modules of Kimi Linear and Ling 3 in transformers), and those that the
        architectures declare.

    Source: DeepSeek-AI 2024 (DeepSeek-V2, arXiv 2405.04434).

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        latent_features: int,
        key_features: int,
        shared_features: int,
        value_features: int,
        query_features: int | None = None,
        rope_theta: Positive | None = None,
        output_gate: bool = False,
        use_bias: bool = False,
        epsilon: Positive = 1e-6,
        max_length: int | None = None,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        if rope_theta is not None and shared_features % 2:
            raise ValueError(
                "shared_features: expected an even number, because rope_theta rotates pairs of "
                f"features, got {shared_features}"
            )
        refuse_unused(
            "bias_init", options.get("bias_init"), unless=use_bias, because="with use_bias=False"
        )
        self.num_heads, self.latent_features = num_heads, latent_features
        self.key_features, self.shared_features = key_features, shared_features
        self.value_features, self.rope_theta = value_features, rope_theta
        self.max_length = max_length
        plain = with_inits(options, normal_of_fan_in(), None, use_bias=False)
        biased = with_inits(options, normal_of_fan_in(), use_bias=use_bias)
        # The queries, in one product or two.
        queries = num_heads * (key_features + shared_features)
        low_rank = query_features is not None
        self.q_a_proj = Linear(features, query_features, **biased) if low_rank else None
        self.q_proj = Linear(query_features or features, queries, **plain)
        # c and κ side by side, and the keys and values of all heads.
        self.latent_proj = Linear(features, latent_features + shared_features, **biased)
        self.kv_proj = Linear(latent_features, num_heads * (key_features + value_features), **plain)
        self.g_proj = Linear(features, num_heads, **plain) if output_gate else None
        self.out_proj = Linear(num_heads * value_features, features, **biased)
        norm = partial(RMSNorm, epsilon=epsilon, **norm_options(options))
        self.q_norm = norm(query_features) if low_rank else None
        self.latent_norm = norm(latent_features)

    def cache(self, batch_size: int, max_length: int) -> LatentAttentionState:
        """An empty cache of c and κ, with `max_length` slots."""
        shape = batch_size, max_length, self.latent_features + self.shared_features
        position = jnp.zeros(batch_size, jnp.int32)
        return LatentAttentionState(position, jnp.zeros(shape, self.state_dtype))

    def sequence(self, x, state, rows):
        """Projects to queries and latents, attends, gates, and projects back."""
        x = x.astype(self.computation_dtype(x))
        batch_size, time, _ = x.shape
        start = jnp.zeros(batch_size, jnp.int32) if state is None else state.position
        positions, _ = rows.positions(start, time)

        # The queries and latents of the steps, with rotated parts.
        q = x
        if self.q_a_proj is not None and self.q_norm is not None:
            q = self.q_norm(self.q_a_proj(x))
        head_features = self.key_features + self.shared_features
        q = self.q_proj(q).reshape(batch_size, time, self.num_heads, head_features)
        q1, q2 = jnp.split(q, [self.key_features], axis=-1)
        c, shared = jnp.split(self.latent_proj(x), [self.latent_features], axis=-1)
        q2, shared = self.rotated(q2, positions), self.rotated(shared[:, :, None], positions)
        q = jnp.concatenate([q1, q2], axis=-1)
        latents = jnp.concatenate([self.latent_norm(c), shared[:, :, 0]], axis=-1)
        # Attend to keys and values, or directly to the latents.
        slots = 0 if state is None else state.latents.shape[1]
        absorbs = self.absorbs(time, slots)
        run = partial(
            latent_attention,
            self.absorbed(q) if absorbs else q,
            latents,
            keys_and_values=as_one_head if absorbs else partial(self.keys_and_values, q.dtype),
        )
        y, state = self.with_cache(run, batch_size, time, state, rows)
        if absorbs:
            _, W_v = self.kernels(q.dtype)
            y = jnp.einsum("bthr,rhv->bthv", y[..., : self.latent_features], W_v)
        if self.g_proj is not None:
            y = y * jax.nn.sigmoid(self.g_proj(x))[..., None]
        return self.out_proj(y.reshape(batch_size, time, self.out_proj.in_features)), state

    def rotated(
        self, x: Float[Array, "batch time heads shared"], positions: Array
    ) -> Float[Array, "batch time heads shared"]:
        """Rotates q₂ or κ by the positions."""
        if self.rope_theta is None:
            return x
        options = {"rotated": self.shared_features, "theta": self.rope_theta}
        return ops.rotary(x, positions, **options, interleaved=True)

    def keys_and_values(
        self, dtype: jnp.dtype, latents: Float[Array, "batch steps latent"]
    ) -> tuple[Float[Array, "batch steps heads _"], Float[Array, "batch steps heads value"]]:
        """Computes the keys, with κ at the end of those of each head, and the values."""
        c, shared = jnp.split(latents.astype(dtype), [self.latent_features], axis=-1)
        sizes = *c.shape[:2], self.num_heads
        kv = self.kv_proj(c).reshape(*sizes, self.key_features + self.value_features)
        k, v = jnp.split(kv, [self.key_features], axis=-1)
        shared = jnp.broadcast_to(shared[:, :, None], (*sizes, self.shared_features))
        return jnp.concatenate([k, shared], axis=-1), v

    def kernels(self, dtype: jnp.dtype) -> list[Float[Array, "latent heads _"]]:
        """W_k and W_v, by head."""
        sizes = self.latent_features, self.num_heads, self.key_features + self.value_features
        kernel = self.kv_proj.kernel[...].astype(dtype).reshape(sizes)
        return jnp.split(kernel, [self.key_features], axis=-1)

    def absorbs(self, time: int, slots: int) -> bool:
        """Whether fewer multiplications are needed if the queries are multiplied by W_k.

        Either each query and each result, or each latent is multiplied by the matrices of a head.
        The former makes each pair of a query and a key longer.
        """
        if is_symbolic_dim(time):
            return False
        steps, latent = slots + time, self.latent_features + self.shared_features
        matrices = self.latent_features * (self.key_features + self.value_features)
        head = self.key_features + self.shared_features + self.value_features
        return time * (matrices + 2 * latent * steps) < steps * (matrices + head * time)

    def absorbed(
        self, q: Float[Array, "batch time heads head"]
    ) -> Float[Array, "batch time heads latent"]:
        """Returns queries of latents: q₁ W_kᵀ and q₂.

        They are scaled so that attention divides by √(key_features + shared_features).
        """
        q1, q2 = jnp.split(q, [self.key_features], axis=-1)
        W_k, _ = self.kernels(q.dtype)
        q = jnp.concatenate([jnp.einsum("bthn,rhn->bthr", q1, W_k), q2], axis=-1)
        return q * math.sqrt(q.shape[-1] / (self.key_features + self.shared_features))

    mesh_axes = (
        last_axis("heads", "q_proj", "kv_proj", "g_proj")
        | first_axis("heads", "out_proj.kernel")
        | whole("q_a_proj", "latent_proj")  # all heads read their few outputs
    )

    def rows(self, out_proj: str) -> Table:
        """The rows of the modules in transformers, whose last projection has this key."""
        bias = self.out_proj.use_bias
        table = [
            *linear("latent_proj", "kv_a_proj_with_mqa", bias=bias),
            *rms_norm("latent_norm", "kv_a_layernorm"),
            *linear("kv_proj", "kv_b_proj", bias=False),
            *linear("out_proj", out_proj, bias=bias),
        ]
        if self.q_a_proj is None:
            table += linear("q_proj", "q_proj", bias=False)
        else:
            table += linear("q_a_proj", "q_a_proj", bias=bias)
            table += rms_norm("q_norm", "q_a_layernorm") + linear("q_proj", "q_b_proj", bias=False)
        if self.g_proj is not None:
            table += linear("g_proj", "g_proj", bias=False)
        return table

    def torch_layouts(self) -> Layouts:
        """`deepseek`: the keys of the modules in transformers; and those of the architectures."""
        return super().torch_layouts() | {"deepseek": self.rows("o_proj")}


def as_one_head(latents: Float[Array, "batch steps latent"]) -> tuple[Array, Array]:
    """Returns the latents as the keys of a single head, and as its values."""
    return latents[:, :, None], latents[:, :, None]
