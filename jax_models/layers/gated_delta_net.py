"""Gated DeltaNet (arXiv 2412.06464), the recurrent layer of Qwen3.5 and of three other models."""

__all__ = ["GatedDeltaNet", "GatedDeltaNetState"]

import math
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.checks.values import Positive, check_divides
from jax_models.layers.conv import CausalConv1D
from jax_models.layers.linear import Linear
from jax_models.layers.norm import RMSNorm
from jax_models.mesh_axes import first_axis, last_axis, whole
from jax_models.ops import CausalConv1DState, carry_dtype
from jax_models.ops.delta import GATED_DELTA_RULE
from jax_models.options import Initializer, MatrixOptions, filter_options, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import SharedLayer


def log_of_uniform(low: float, high: float) -> Initializer:
    """Initializes A_log: the logarithm of numbers that are uniform between `low` and `high`.

    With `low` 0, the numbers are at least the smallest normal number, whose logarithm is finite.
    """

    def init(key, shape, dtype, **_) -> Array:
        wide = carry_dtype(dtype)
        least = max(low, float(jnp.finfo(wide).tiny))
        return jnp.log(jax.random.uniform(key, shape, wide, least, high)).astype(dtype)

    return init


def bias_of_log_uniform(low: float, high: float, floor: float = 0.0) -> Initializer:
    """Initializes dt_bias so that softplus(dt_bias) is log-uniform, and at least `floor`.

    The logarithm of softplus(dt_bias) is uniform between those of `low` and `high`.
    """

    def init(key, shape, dtype, **_) -> Array:
        log_dt = jax.random.uniform(key, shape, carry_dtype(dtype), math.log(low), math.log(high))
        dt = jnp.maximum(jnp.exp(log_dt), floor)
        return (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)

    return init


class GatedDeltaNetState(NamedTuple):
    """The state of a Gated DeltaNet: the convolution's inputs, and a matrix for each head."""

    conv: CausalConv1DState
    delta: Float[Array, "batch heads value key"]


class GatedDeltaNet(SharedLayer, SequenceLayer[GatedDeltaNetState]):
    """Gated DeltaNet, which keeps a matrix of keys and values for each head.

        >>> sizes = {"num_key_heads": 2, "num_value_heads": 4}
        >>> sizes |= {"key_features": 16, "value_features": 16}
        >>> layer = GatedDeltaNet(64, **sizes, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        q, k, v = silu(conv(x W_q)), silu(conv(x W_k)), silu(conv(x W_v))
        q, k ← q / (‖q‖ √key_features), k / ‖k‖                      by head
        α = exp(−exp(A_log) ⊙ softplus(x W_a + dt_bias)),   β = σ(x W_b)
        S_t = α_t S_{t−1} + β_t (v_t − α_t S_{t−1} k_t) k_tᵀ,   o_t = S_t q_t
        y = (norm(o) ⊙ silu(x W_z)) W_out

    Each key head serves num_value_heads / num_key_heads consecutive value heads. The convolution
    is causal and depthwise, norms of q and k have 1e-6 under the root, and `norm` is an RMSNorm
    over each head with a scale that all heads share. x and y are (batch, time, features). The state
    is `GatedDeltaNetState(conv, delta)`: the last kernel_size − 1 inputs of the convolution, with
    the channels of q, k and v side by side, and S (batch, num_value_heads, value_features,
    key_features). `ops.gated_delta_rule` computes o.

    Args:
        features: size of x_t and y_t.
        num_key_heads: number of heads of q and k, a divisor of `num_value_heads`.
        num_value_heads: number of heads of v, and of the matrices S.
        key_features: size of each head of q and k.
        value_features: size of each head of v.
        kernel_size: taps of the convolution.
        negative_eigenvalues: whether β is 2 σ(x W_b), so that a step can flip the sign of what S
            stores under a key. In OLMo Hybrid, the config's `linear_allow_neg_eigval`.
        epsilon: ε of `norm`; in OLMo Hybrid, 1e-5.
        decay_init: initializes A_log. None: A is uniform in [0.01, 16], as in Qwen3.5.
        dt_init: initializes dt_bias. None: ones, as in Qwen3.5; most heads of a new layer then
            forget within a step or two, which `docs/guides/which_layer.md` measures and changes.
        method: the method of `ops.gated_delta_rule`.
        **options: as in `MatrixOptions`. Matrices are drawn from a normal distribution with a
            standard deviation of 0.02. The convolution is initialized as in torch, unless
            `kernel_init` is given. Decays, S and `norm` are computed in at least float32.

    Raises:
        ValueError: a size or epsilon is not positive, num_key_heads does not divide
            num_value_heads, or there is no such method.

    Layouts: those that the architectures declare.

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        *,
        num_key_heads: int,
        num_value_heads: int,
        key_features: int,
        value_features: int,
        kernel_size: int = 4,
        negative_eigenvalues: bool = False,
        epsilon: Positive = 1e-6,
        decay_init: Initializer | None = None,
        dt_init: Initializer | None = None,
        method: ops.GatedDeltaRuleMethod = "auto",
        **options: Unpack[MatrixOptions],
    ):
        super().__init__(features, **options)
        check_divides("num_key_heads", num_key_heads, "num_value_heads", num_value_heads)
        self.num_key_heads, self.num_value_heads = num_key_heads, num_value_heads
        self.key_features, self.value_features = key_features, value_features
        self.negative_eigenvalues = negative_eigenvalues
        self.method = GATED_DELTA_RULE.checked_method(method)
        # One projection for each of q, k, v, the output gate z, the rate b and the decay a.
        keys, values = num_key_heads * key_features, num_value_heads * value_features
        matrix = with_inits(options, nnx.initializers.normal(0.02), None, use_bias=False)
        self.q_proj = Linear(features, keys, **matrix)
        self.k_proj = Linear(features, keys, **matrix)
        self.v_proj = Linear(features, values, **matrix)
        self.z_proj = Linear(features, values, **matrix)
        self.b_proj = Linear(features, num_value_heads, **matrix)
        self.a_proj = Linear(features, num_value_heads, **matrix)
        self.out_proj = Linear(values, features, **matrix)
        self.conv = CausalConv1D(2 * keys + values, kernel_size, use_bias=False, **options)
        # A_log and dt_bias determine the decay. Each has one number for each value head.
        rngs, heads = options["rngs"], (num_value_heads,)
        decay_init = decay_init or log_of_uniform(0.01, 16)
        self.A_log = nnx.Param(decay_init(rngs.params(), heads, self.param_dtype))
        dt_init = dt_init or nnx.initializers.ones
        self.dt_bias = nnx.Param(dt_init(rngs.params(), heads, self.param_dtype))
        # Without a dtype, the norm keeps the precision of o, which is at least float32.
        self.norm = RMSNorm(value_features, epsilon=epsilon, **filter_options(options))

    def init_state(self, batch_size: int) -> GatedDeltaNetState:
        """Zeros, in at least float32."""
        shape = (batch_size, self.num_value_heads, self.value_features, self.key_features)
        return GatedDeltaNetState(
            self.conv.init_state(batch_size), jnp.zeros(shape, self.state_dtype)
        )

    def sequence(self, x, state, rows):
        """Runs `ops.gated_delta_rule` on convolved projections, then norms, gates and projects."""
        dtype = self.computation_dtype(x)
        x = x.astype(dtype)

        projected = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        convolved, conv = self.conv.by_parts(projected, state.conv, rows)
        sizes = self.key_features, self.key_features, self.value_features
        q, k, v = (
            jax.nn.silu(u).reshape(*u.shape[:2], u.shape[2] // size, size)
            for u, size in zip(convolved, sizes, strict=True)
        )
        o, delta = ops.gated_delta_rule(
            q,
            k,
            v,
            self.log_decay(self.a_proj(x)),
            self.rate(self.b_proj(x)),
            state.delta,
            normalize=True,
            scale=self.key_features**-0.5,
            method=self.method,
            rows=rows,
        )
        y = self.gated(o, self.z_proj(x).reshape(o.shape)).astype(dtype)
        y = y.reshape(*x.shape[:2], self.out_proj.in_features)
        return self.out_proj(y), GatedDeltaNetState(conv, delta)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes of q, k and v."""
        keys = self.num_key_heads * self.key_features
        return keys, keys, self.num_value_heads * self.value_features

    def log_decay(self, a: Float[Array, "batch time heads"]) -> Float[Array, "batch time heads"]:
        """The logarithm of the decay, in at least float32."""
        a = a.astype(carry_dtype(a.dtype))
        A_log, dt_bias = (p[...].astype(a.dtype)[None, None] for p in (self.A_log, self.dt_bias))
        return -jnp.exp(A_log) * ops.softplus(a + dt_bias)

    def rate(self, b: Float[Array, "batch time heads"]) -> Float[Array, "batch time heads"]:
        """The rate β at which a step learns, in at least float32."""
        beta = jax.nn.sigmoid(b.astype(carry_dtype(b.dtype)))
        return 2 * beta if self.negative_eigenvalues else beta

    def gated(
        self, o: Float[Array, "batch time heads value"], z: Float[Array, "batch time heads value"]
    ) -> Float[Array, "batch time heads value"]:
        """`norm(o) ⊙ silu(z)`, in at least float32."""
        return self.norm(o).astype(o.dtype) * jax.nn.silu(z.astype(o.dtype))

    mesh_axes = (
        last_axis("heads", "q_proj", "k_proj", "v_proj", "z_proj", "b_proj", "a_proj")
        | last_axis("heads", "A_log", "dt_bias")
        | first_axis("heads", "out_proj.kernel")
        | whole("conv")  # a few numbers for each of the channels of q, k and v
    )
