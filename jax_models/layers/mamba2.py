"""Mamba-2 (arXiv 2405.21060), the recurrent layer of Granite 4, Nemotron-H, Falcon-H1 and Bamba."""

__all__ = ["Mamba2", "Mamba2State"]

import math
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.checks.values import Positive, check_divides, described
from jax_models.layers.conv import CausalConv1D
from jax_models.layers.gated_delta_net import bias_of_log_uniform
from jax_models.layers.linear import Linear, torch_uniform
from jax_models.layers.norm import RMSNorm
from jax_models.mesh_axes import first_axis, last_axis, whole
from jax_models.ops import CausalConv1DState, carry_dtype
from jax_models.ops.delta import GATED_DELTA_RULE
from jax_models.options import Initializer, LayerOptions, filter_options, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, linear, nested, parts, rms_norm, same


def log_of_count(key, shape, dtype, **_) -> Array:
    """Initializes A_log: the logarithms of 1, 2, 3, …"""
    return jnp.log(jnp.arange(1, 1 + math.prod(shape), dtype=carry_dtype(dtype))).astype(dtype)


def checked_limits(name: str, limits: Any) -> tuple[float, float]:
    """Returns the least and the greatest Δ, or raises an error."""
    if not isinstance(limits, tuple | list) or {*map(type, limits)} - {int, float}:
        raise TypeError(f"{name}: expected two numbers, got {described(limits)}")
    if len(limits) != 2 or not 0 <= limits[0] < limits[1]:
        raise ValueError(f"{name}: expected 0 ≤ least < greatest, got {limits}")
    least, greatest = map(float, limits)
    return least, greatest


class Mamba2State(NamedTuple):
    """The state of a Mamba-2: the convolution's inputs, and a matrix for each head."""

    conv: CausalConv1DState
    ssm: Float[Array, "batch heads head state"]


class Mamba2(SequenceLayer[Mamba2State]):
    """Mamba-2, a state space whose decay and inputs depend on x.

        >>> layer = Mamba2(64, num_heads=8, head_features=16, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        u, B, C = silu(conv(x W_u)), silu(conv(x W_B)), silu(conv(x W_C))
        Δ = clip(softplus(x W_Δ + dt_bias)),   α = exp(−exp(A_log) ⊙ Δ)      by head
        S_t = α_t S_{t−1} + Δ_t u_t B_tᵀ,   o_t = S_t C_t + D ⊙ u_t         by head
        y = norm(o ⊙ silu(x W_z)) W_out

    Each group of B and C serves num_heads / num_groups consecutive heads. The convolution is causal
    and depthwise, and `norm` is an RMSNorm over each group's part of the features. x and y are
    (batch, time, features). The state is `Mamba2State(conv, ssm)`: the last kernel_size − 1 inputs
    of the convolution, with the channels of u, B and C side by side, and S (batch, num_heads,
    head_features, state_features). `ops.gated_delta_rule` computes S C.

    Args:
        features: size of x_t and y_t.
        num_heads: number of heads of u, and of the matrices S.
        head_features: size of each head of u.
        state_features: size of each group of B and C.
        num_groups: number of groups of B and C, a divisor of `num_heads`.
        kernel_size: taps of the convolution.
        use_bias: whether the projections of x have biases.
        out_bias: whether W_out has a bias. None: like `use_bias`.
        conv_bias: whether the convolution has a bias.
        dt_limits: the least and the greatest Δ.
        use_norm: whether there is a `norm`. Falcon-H1 has none by default.
        norm_before_gate: whether y = (norm(o) ⊙ silu(x W_z)) W_out, as in Falcon-H1.
        epsilon: ε of `norm`.
        decay_init: initializes A_log. None: the logarithms of 1 … num_heads.
        dt_init: initializes dt_bias. None: softplus(dt_bias) is log-uniform in [0.001, 0.1].
        in_init: initializes W_z, W_u, W_B, W_C and W_Δ. None: like `kernel_init`.
        out_init: initializes W_out. None: like `kernel_init`.
        method: the method of `ops.gated_delta_rule`.
        **options: as in `LayerOptions`. Matrices and the convolution start as in torch, and biases
            at zero. Δ, decays, S and `norm` are computed in at least float32.

    Raises:
        ValueError: a size or epsilon is not positive, num_groups does not divide num_heads, the
            limits are not in order, or there is no such method.

    Layouts: `mamba2` (the mixers of transformers' models and of the package mamba_ssm).

    Source: Dao and Gu 2024 (arXiv 2405.21060); transformers' Mamba2Mixer.

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        head_features: int = 64,
        state_features: int = 128,
        num_groups: int = 1,
        kernel_size: int = 4,
        use_bias: bool = False,
        out_bias: bool | None = None,
        conv_bias: bool = True,
        dt_limits: tuple[float, float] = (0.0, math.inf),
        use_norm: bool = True,
        norm_before_gate: bool = False,
        epsilon: Positive = 1e-5,
        decay_init: Initializer | None = None,
        dt_init: Initializer | None = None,
        in_init: Initializer | None = None,
        out_init: Initializer | None = None,
        method: ops.GatedDeltaRuleMethod = "auto",
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        check_divides("num_groups", num_groups, "num_heads", num_heads)
        self.num_heads, self.head_features = num_heads, head_features
        self.num_groups, self.state_features = num_groups, state_features
        self.dt_limits = checked_limits("dt_limits", dt_limits)
        self.norm_before_gate = norm_before_gate
        self.method = GATED_DELTA_RULE.checked_method(method)
        # One projection for each of the gate z, u, B, C and dt.
        inner, group = num_heads * head_features, num_groups * state_features
        matrix = with_inits(options, torch_uniform(features), use_bias=use_bias)
        matrix["kernel_init"] = in_init or matrix["kernel_init"]
        self.z_proj = Linear(features, inner, **matrix)
        self.u_proj = Linear(features, inner, **matrix)
        self.B_proj = Linear(features, group, **matrix)
        self.C_proj = Linear(features, group, **matrix)
        self.dt_proj = Linear(features, num_heads, **matrix)
        out_bias = use_bias if out_bias is None else out_bias
        matrix = with_inits(options, torch_uniform(inner), use_bias=out_bias)
        matrix["kernel_init"] = out_init or matrix["kernel_init"]
        self.out_proj = Linear(inner, features, **matrix)
        zeros: Any = {"bias_init": nnx.initializers.zeros} if conv_bias else {}
        self.conv = CausalConv1D(
            inner + 2 * group, kernel_size, use_bias=conv_bias, **zeros | options
        )
        # A_log, dt_bias and D have one number for each head.
        rngs, heads = options["rngs"], (num_heads,)
        decay_init = decay_init or log_of_count
        self.A_log = nnx.Param(decay_init(rngs.params(), heads, self.param_dtype))
        dt_init = dt_init or bias_of_log_uniform(1e-3, 1e-1, 1e-4)
        self.dt_bias = nnx.Param(dt_init(rngs.params(), heads, self.param_dtype))
        self.D = nnx.Param(jnp.ones(heads, self.param_dtype))
        # Without a dtype, the norm keeps the precision of o, which is at least float32.
        self.norm = (
            RMSNorm(inner, num_groups=num_groups, epsilon=epsilon, **filter_options(options))
            if use_norm
            else None
        )

    def init_state(self, batch_size: int) -> Mamba2State:
        """Zeros, in at least float32."""
        shape = (batch_size, self.num_heads, self.head_features, self.state_features)
        return Mamba2State(self.conv.init_state(batch_size), jnp.zeros(shape, self.state_dtype))

    def sequence(self, x, state, rows):
        """Runs `ops.gated_delta_rule` on convolved projections, then gates, norms and projects."""
        dtype = self.computation_dtype(x)
        x = x.astype(dtype)
        projected = [self.u_proj(x), self.B_proj(x), self.C_proj(x)]
        convolved, conv = self.conv.by_parts(projected, state.conv, rows)
        sizes = self.head_features, self.state_features, self.state_features
        u, B, C = (
            jax.nn.silu(part).reshape(*part.shape[:2], part.shape[2] // size, size)
            for part, size in zip(convolved, sizes, strict=True)
        )
        dt = self.step_size(self.dt_proj(x))

        # The state reads Δ u under the key B, and the query C reads the state.
        wide = u.astype(dt.dtype)
        A_log, D = (p[...].astype(dt.dtype)[None, None] for p in (self.A_log, self.D))
        o, ssm = ops.gated_delta_rule(
            C,
            B,
            dt[..., None] * wide,
            -jnp.exp(A_log) * dt,
            None,
            state.ssm,
            method=self.method,
            rows=rows,
        )
        o = o + D[..., None] * wide
        z = self.z_proj(x)
        y = self.gated(o.reshape(z.shape), z).astype(dtype)
        return self.out_proj(y), Mamba2State(conv, ssm)

    def step_size(self, dt: Float[Array, "batch time heads"]) -> Float[Array, "batch time heads"]:
        """Δ, in at least float32."""
        dt = dt.astype(carry_dtype(dt.dtype))
        dt = ops.softplus(dt + self.dt_bias[...].astype(dt.dtype)[None, None])
        return jnp.clip(dt, *self.dt_limits)

    def gated(
        self, o: Float[Array, "batch time inner"], z: Float[Array, "batch time inner"]
    ) -> Float[Array, "batch time inner"]:
        """`norm(o ⊙ silu(z))` or, with `norm_before_gate`, `norm(o) ⊙ silu(z)`."""
        gate = jax.nn.silu(z.astype(o.dtype))
        if self.norm is None:
            return o * gate
        return self.norm(o) * gate if self.norm_before_gate else self.norm(o * gate)

    mesh_axes = (
        last_axis("heads", "z_proj", "u_proj", "dt_proj", "A_log", "dt_bias", "D", "norm")
        | first_axis("heads", "out_proj.kernel")
        | whole("B_proj", "C_proj", "conv")  # all heads of a group read its B and C
    )

    def torch_layouts(self) -> Layouts:
        """`mamba2`: the keys of transformers' Mamba2Mixer and of mamba_ssm's Mamba2."""
        names = ["z_proj", "u_proj", "B_proj", "C_proj", "dt_proj"]
        inner, group = self.out_proj.in_features, self.num_groups * self.state_features
        sizes = inner, inner, group, group, self.num_heads
        in_proj = [
            parts([f"{name}.kernel" for name in names], "in_proj.weight", sizes),
            parts([f"{name}.bias" for name in names], "in_proj.bias", sizes),
        ]
        return {
            "mamba2": [
                *in_proj[: 1 + self.z_proj.use_bias],
                *nested(self.conv.torch_rows(), "conv", "conv1d"),
                *(same(name, name) for name in ("A_log", "D", "dt_bias")),
                *(rms_norm("norm", "norm") if self.norm is not None else ()),
                *linear("out_proj", "out_proj", bias=self.out_proj.use_bias),
            ]
        }
