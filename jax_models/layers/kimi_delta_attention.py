"""Kimi Delta Attention (arXiv 2510.26692), the recurrent layer of Kimi Linear and Ling 3."""

__all__ = ["KimiDeltaAttention", "KimiDeltaAttentionState"]

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.checks.values import Positive
from jax_models.layers.conv import CausalConv1D, in_thirds
from jax_models.layers.gated_delta_net import bias_of_log_uniform, log_of_uniform
from jax_models.layers.linear import Linear
from jax_models.layers.norm import RMSNorm
from jax_models.mesh_axes import first_axis, last_axis, whole
from jax_models.ops import CausalConv1DState, carry_dtype
from jax_models.ops.delta import GATED_DELTA_RULE
from jax_models.options import Initializer, MatrixOptions, filter_options, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, Table, linear, nested, rms_norm, same, squeezed


class LowRankLinear(nnx.Module):
    """`x W_a W_b`, where x W_a has only a few features."""

    def __init__(self, features: int, rank: int, out: int, **options: Unpack[MatrixOptions]):
        self.a_proj = Linear(features, rank, **options)
        self.b_proj = Linear(rank, out, **options)

    def __call__(self, x: Float[Array, "... features"]) -> Float[Array, "... out"]:
        """Applies both matrices."""
        return self.b_proj(self.a_proj(x))


class KimiDeltaAttentionState(NamedTuple):
    """The state of a Kimi Delta Attention: the convolution's inputs, and a matrix for each head."""

    conv: CausalConv1DState
    delta: Float[Array, "batch heads value key"]


class KimiDeltaAttention(SequenceLayer[KimiDeltaAttentionState]):
    """Kimi Delta Attention, a Gated DeltaNet in which each feature of a key has its own decay.

        >>> layer = KimiDeltaAttention(64, num_heads=4, head_features=16, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        q, k, v = silu(conv(x W_q)), silu(conv(x W_k)), silu(conv(x W_v))
        q, k ← q / (‖q‖ √head_features), k / ‖k‖                            by head
        log α = −exp(A_log) ⊙ softplus(x W_f + dt_bias),   β = σ(x W_b)
        S_t = S_{t−1} diag(α_t) + β_t (v_t − S_{t−1} diag(α_t) k_t) k_tᵀ,   o_t = S_t q_t
        y = (norm(o) ⊙ σ(x W_g)) W_o

    α and dt_bias have a number for each feature of each head, and A_log has one for each head. With
    a `min_log_decay`, log α = min_log_decay · σ(exp(A_log) ⊙ (x W_f + dt_bias)). With `low_rank`,
    W_f and W_g are products of two matrices, with head_features columns between them. The
    convolution is causal and depthwise, norms of q and k have 1e-6 under the root, and `norm` is an
    RMSNorm over each head with a scale that all heads share. x and y are (batch, time, features).
    The state is `KimiDeltaAttentionState(conv, delta)`: the last kernel_size − 1 inputs of the
    convolution, with the channels of q, k and v side by side, and S (batch, num_heads,
    head_features, head_features). `ops.gated_delta_rule` computes o.

    Args:
        features: size of x_t and y_t.
        num_heads: number of heads, each with a matrix S.
        head_features: size of each head of q, k and v.
        kernel_size: taps of the convolution.
        low_rank: whether W_f and W_g are products of two matrices. True in Kimi Linear, False in
            Ling 3.
        min_log_decay: the lower bound of log α, a negative number; −5 in Ling 3. None: no bound, as
            in Kimi Linear.
        epsilon: ε of `norm`.
        decay_init: initializes A_log. None: exp(A_log) is uniform in [1, 16], as in Kimi Linear.
        dt_init: initializes dt_bias. None: softplus(dt_bias) is log-uniform in [0.001, 0.1], as in
            Kimi Linear.
        method: the method of `ops.gated_delta_rule`.
        **options: as in `MatrixOptions`. Matrices are drawn from a normal distribution with a
            standard deviation of 0.02. The convolution is initialized as in torch, unless
            `kernel_init` is given. Decays, S and `norm` are computed in at least float32.

    Raises:
        ValueError: a size or epsilon is not positive, min_log_decay is not negative, or there is no
            such method.

    Layouts: `kimi_linear` if `low_rank`, else `bailing_hybrid` (Ling 3): the modules of
    transformers. `kimi_linear-file`: its files, which have three convolutions.

    Source: Kimi Team 2025 (Kimi Linear, arXiv 2510.26692).

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        head_features: int,
        kernel_size: int = 4,
        low_rank: bool = True,
        min_log_decay: float | None = None,
        epsilon: Positive = 1e-5,
        decay_init: Initializer | None = None,
        dt_init: Initializer | None = None,
        method: ops.GatedDeltaRuleMethod = "auto",
        **options: Unpack[MatrixOptions],
    ):
        super().__init__(features, **options)
        if min_log_decay is not None and min_log_decay >= 0:
            raise ValueError(f"min_log_decay: expected a negative number, got {min_log_decay}")
        self.num_heads, self.head_features = num_heads, head_features
        self.low_rank, self.min_log_decay = low_rank, min_log_decay
        self.method = GATED_DELTA_RULE.checked_method(method)
        inner = num_heads * head_features
        matrix = with_inits(options, nnx.initializers.normal(0.02), None, use_bias=False)
        self.q_proj = Linear(features, inner, **matrix)
        self.k_proj = Linear(features, inner, **matrix)
        self.v_proj = Linear(features, inner, **matrix)
        self.b_proj = Linear(features, num_heads, **matrix)
        # The decays f and the output gates g have a number for each feature of each head.
        self.f_proj, self.g_proj = (
            LowRankLinear(features, head_features, inner, **matrix)
            if low_rank
            else Linear(features, inner, **matrix)
            for _ in range(2)
        )
        self.o_proj = Linear(inner, features, **matrix)
        self.conv = CausalConv1D(3 * inner, kernel_size, use_bias=False, **options)
        rngs, dtype = options["rngs"], self.param_dtype
        decay_init = decay_init or log_of_uniform(1, 16)
        self.A_log = nnx.Param(decay_init(rngs.params(), (num_heads,), dtype))
        dt_init = dt_init or bias_of_log_uniform(1e-3, 0.1, 1e-4)
        self.dt_bias = nnx.Param(dt_init(rngs.params(), (inner,), dtype))
        # Without a dtype, the norm keeps the precision of o, which is at least float32.
        self.norm = RMSNorm(head_features, epsilon=epsilon, **filter_options(options))

    def init_state(self, batch_size: int) -> KimiDeltaAttentionState:
        """Zeros, in at least float32."""
        shape = batch_size, self.num_heads, self.head_features, self.head_features
        return KimiDeltaAttentionState(
            self.conv.init_state(batch_size), jnp.zeros(shape, self.state_dtype)
        )

    def sequence(self, x, state, rows):
        """Runs `ops.gated_delta_rule` on convolved projections, then norms, gates and projects."""
        dtype = self.computation_dtype(x)
        x = x.astype(dtype)

        projected = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        convolved, conv = self.conv.by_parts(projected, state.conv, rows)
        q, k, v = (self.by_head(jax.nn.silu(u)) for u in convolved)
        b = self.b_proj(x)
        o, delta = ops.gated_delta_rule(
            q,
            k,
            v,
            self.log_decay(self.f_proj(x)),
            jax.nn.sigmoid(b.astype(carry_dtype(dtype))),
            state.delta,
            normalize=True,
            scale=self.head_features**-0.5,
            method=self.method,
            rows=rows,
        )
        y = self.gated(o, self.by_head(self.g_proj(x))).astype(dtype)
        y = y.reshape(*x.shape[:2], self.o_proj.in_features)
        return self.o_proj(y), KimiDeltaAttentionState(conv, delta)

    def by_head(
        self, x: Float[Array, "batch time inner"]
    ) -> Float[Array, "batch time heads features"]:
        """Splits the last axis into heads."""
        return x.reshape(*x.shape[:2], self.num_heads, self.head_features)

    def log_decay(
        self, f: Float[Array, "batch time inner"]
    ) -> Float[Array, "batch time heads features"]:
        """The logarithms of the decays, in at least float32."""
        f = f.astype(carry_dtype(f.dtype))
        A_log, dt_bias = (p[...].astype(f.dtype) for p in (self.A_log, self.dt_bias))
        rate, f = jnp.exp(A_log)[None, None, :, None], self.by_head(f + dt_bias[None, None])
        if self.min_log_decay is None:
            return -rate * ops.softplus(f)
        return self.min_log_decay * jax.nn.sigmoid(rate * f)

    def gated(
        self, o: Float[Array, "batch time heads value"], g: Float[Array, "batch time heads value"]
    ) -> Float[Array, "batch time heads value"]:
        """`norm(o) ⊙ σ(g)`, in at least float32."""
        return self.norm(o).astype(o.dtype) * jax.nn.sigmoid(g.astype(o.dtype))

    mesh_axes = (
        last_axis("heads", "q_proj", "k_proj", "v_proj", "b_proj", "f_proj", "g_proj")
        | last_axis("heads", "A_log", "dt_bias")
        | first_axis("heads", "o_proj.kernel")
        | whole("f_proj.a_proj", "g_proj.a_proj")  # all heads read their few outputs
        | whole("conv")  # a few numbers for each of the channels of q, k and v
    )

    def torch_layouts(self) -> Layouts:
        """`kimi_linear` or `bailing_hybrid`: the keys of the modules in transformers, and files."""
        convs = [f"{name}_conv1d.weight" for name in "qkv"]
        of_modules = nested(self.conv.torch_rows(), "conv", "conv1d")
        if not self.low_rank:
            return {"bailing_hybrid": [*self._rows("forget_gate."), *of_modules]}
        return {
            "kimi_linear": [*self._rows("forget_gate."), *of_modules],
            "kimi_linear-file": [*self._rows(""), in_thirds("conv.kernel", convs)],
        }

    def _rows(self, forget_gate: str) -> Table:
        """The rows of all but the convolution. The keys of decays begin with `forget_gate`."""
        matrices = [(f"{name}_proj", f"{name}_proj") for name in "qkvbo"]
        gates = ("f_proj", f"{forget_gate}f"), ("g_proj", "g")
        if self.low_rank:
            A_log = squeezed("A_log", f"{forget_gate}A_log", (0, 1, 3))
            matrices += [
                (f"{name}.{i}_proj", f"{key}_{i}_proj") for name, key in gates for i in "ab"
            ]
        else:
            A_log = same("A_log", f"{forget_gate}A_log")
            matrices += [(name, f"{key}_proj") for name, key in gates]
        return [
            A_log,
            same("dt_bias", f"{forget_gate}dt_bias"),
            *(row for names in matrices for row in linear(*names, bias=False)),
            *rms_norm("norm", "o_norm"),
        ]
