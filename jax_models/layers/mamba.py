"""Mamba (arXiv 2312.00752), the recurrent layer of Mamba, FalconMamba and Jamba."""

__all__ = ["Mamba", "MambaState"]

import math
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.checks.values import Positive
from jax_models.layers.conv import CausalConv1D
from jax_models.layers.gated_delta_net import bias_of_log_uniform
from jax_models.layers.linear import Linear, torch_uniform
from jax_models.layers.mamba2 import log_of_count
from jax_models.layers.norm import RMSNorm
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.ops import CausalConv1DState, carry_dtype
from jax_models.ops.linear.selective_scan import SELECTIVE_SCAN
from jax_models.options import Initializer, LayerOptions, norm_options, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, linear, nested, parts, rms_norm, same, transposed


def log_of_count_by_row(key, shape, dtype, **_) -> Array:
    """Initializes A_log: the logarithms of 1, 2, 3, … for each feature."""
    return jnp.broadcast_to(log_of_count(key, shape[1:], dtype), shape)


class MambaState(NamedTuple):
    """The state of a Mamba: the convolution's inputs, and a vector for each feature."""

    conv: CausalConv1DState
    ssm: Float[Array, "batch inner state"]


class Mamba(SequenceLayer[MambaState]):
    """Mamba, a state space whose step size and keys depend on x.

        >>> layer = Mamba(64, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        u = silu(conv(x W_u))
        δ, B, C = u W_δ, u W_B, u W_C
        Δ = softplus(δ W_Δ + dt_bias),   A = −exp(A_log)
        h_t = exp(Δ_t A) ⊙ h_{t−1} + (Δ_t ⊙ u_t) B_tᵀ,   o_t = h_t C_t + D ⊙ u_t
        y = (o ⊙ silu(x W_z)) W_out

    The convolution is causal and depthwise. x and y are (batch, time, features). The state is
    `MambaState(conv, ssm)`: the last kernel_size − 1 inputs of the convolution, and h (batch,
    inner_features, state_features). `ops.selective_scan` computes h C.

    Args:
        features: size of x_t and y_t.
        inner_features: size of u_t. None: 2 features.
        state_features: size of B_t and C_t, and of the state of each feature of u.
        dt_rank: size of δ. None: features / 16, rounded up.
        kernel_size: taps of the convolution.
        use_bias: whether W_u, W_z and W_out have biases.
        conv_bias: whether the convolution has a bias.
        norm: whether δ, B and C each pass an RMSNorm. "plain": without a scale, as in FalconMamba.
            "scaled": with a scale, as in Jamba. None: there are no norms.
        epsilon: ε of these norms.
        decay_init: initializes A_log. None: the logarithms of 1 … state_features.
        dt_init: initializes dt_bias. None: softplus(dt_bias) is log-uniform in [0.001, 0.1].
        dt_kernel_init: initializes W_Δ. None: like `kernel_init`.
        in_init: initializes W_u, W_z, W_δ, W_B and W_C. None: like `kernel_init`.
        out_init: initializes W_out. None: like `kernel_init`.
        method: the method of `ops.selective_scan`.
        **options: as in `LayerOptions`. Matrices and the convolution start as in torch, and biases
            at zero. Δ, h and norms are computed in at least float32.

    Raises:
        ValueError: a size or epsilon is not positive, or there is no such norm or method.

    Layouts: `mamba` (the mixers of transformers' models and of the package mamba_ssm).

    Source: Gu and Dao 2023 (arXiv 2312.00752); transformers' MambaMixer,
    FalconMambaMixer and JambaMambaMixer.

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        *,
        inner_features: int | None = None,
        state_features: int = 16,
        dt_rank: int | None = None,
        kernel_size: int = 4,
        use_bias: bool = False,
        conv_bias: bool = True,
        norm: Literal["plain", "scaled"] | None = None,
        epsilon: Positive = 1e-6,
        decay_init: Initializer | None = None,
        dt_init: Initializer | None = None,
        dt_kernel_init: Initializer | None = None,
        in_init: Initializer | None = None,
        out_init: Initializer | None = None,
        method: ops.SelectiveScanMethod = "auto",
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        inner = inner_features or 2 * features
        rank = dt_rank or math.ceil(features / 16)
        self.state_features = state_features
        self.method = SELECTIVE_SCAN.checked_method(method)
        # x is projected to u and to the gate z.
        matrix = with_inits(options, torch_uniform(features), use_bias=use_bias)
        matrix["kernel_init"] = in_init or matrix["kernel_init"]
        self.u_proj = Linear(features, inner, **matrix)
        self.z_proj = Linear(features, inner, **matrix)
        matrix = with_inits(options, torch_uniform(inner), use_bias=use_bias)
        matrix["kernel_init"] = out_init or matrix["kernel_init"]
        self.out_proj = Linear(inner, features, **matrix)
        zeros: Any = {"bias_init": nnx.initializers.zeros} if conv_bias else {}
        self.conv = CausalConv1D(inner, kernel_size, use_bias=conv_bias, **zeros | options)
        # u is projected to δ, B and C, and δ to the step size of each feature.
        matrix = with_inits(options, torch_uniform(inner), None, use_bias=False)
        matrix["kernel_init"] = in_init or matrix["kernel_init"]
        self.delta_proj = Linear(inner, rank, **matrix)
        self.B_proj = Linear(inner, state_features, **matrix)
        self.C_proj = Linear(inner, state_features, **matrix)
        matrix = with_inits(options, torch_uniform(rank), None, use_bias=False)
        matrix["kernel_init"] = dt_kernel_init or matrix["kernel_init"]
        self.dt_proj = Linear(rank, inner, **matrix)

        def norm_of(size: int) -> RMSNorm | None:
            scaled: Any = {"use_scale": norm == "scaled", "epsilon": epsilon}
            return None if norm is None else RMSNorm(size, **scaled, **norm_options(options))

        self.delta_norm, self.B_norm = norm_of(rank), norm_of(state_features)
        self.C_norm = norm_of(state_features)
        # A_log has a number for each feature and state, and is no matrix. dt_bias and D have one
        # for each feature.
        rngs, shape = options["rngs"], (inner, state_features)
        decay_init = decay_init or log_of_count_by_row
        A_log = decay_init(rngs.params(), shape, self.param_dtype)
        self.A_log = nnx.Param(A_log, is_matrix=False)
        dt_init = dt_init or bias_of_log_uniform(1e-3, 1e-1, 1e-4)
        self.dt_bias = nnx.Param(dt_init(rngs.params(), (inner,), self.param_dtype))
        self.D = nnx.Param(jnp.ones(inner, self.param_dtype))

    def init_state(self, batch_size: int) -> MambaState:
        """Zeros, in at least float32."""
        shape = (batch_size, *self.A_log.shape)
        return MambaState(self.conv.init_state(batch_size), jnp.zeros(shape, self.state_dtype))

    def sequence(self, x, state, rows):
        """Runs `ops.selective_scan` on the convolved projection, then gates and projects."""
        dtype = self.computation_dtype(x)
        x = x.astype(dtype)
        u, conv = self.conv.sequence(self.u_proj(x), state.conv, rows)
        u = jax.nn.silu(u)
        selected = self.delta_proj(u), self.B_proj(u), self.C_proj(u)
        norms = self.delta_norm, self.B_norm, self.C_norm
        delta, B, C = (
            part if norm is None else norm(part) for part, norm in zip(selected, norms, strict=True)
        )
        dt = self.step_size(delta.astype(dtype))

        wide = u.astype(dt.dtype)
        A_log, D = (p[...].astype(dt.dtype) for p in (self.A_log, self.D))
        o, ssm = ops.selective_scan(
            wide, dt, -jnp.exp(A_log), B, C, state.ssm, method=self.method, rows=rows
        )
        o = o + D[None, None] * wide
        y = o * jax.nn.silu(self.z_proj(x).astype(o.dtype))
        return self.out_proj(y.astype(dtype)), MambaState(conv, ssm)

    def step_size(self, delta: Float[Array, "batch time rank"]) -> Float[Array, "batch time inner"]:
        """Δ, in at least float32."""
        dt = self.dt_proj(delta)
        dt = dt.astype(carry_dtype(dt.dtype))
        return ops.softplus(dt + self.dt_bias[...].astype(dt.dtype)[None, None])

    mesh_axes = last_axis(
        "inner", "u_proj", "z_proj", "conv", "dt_proj", "dt_bias", "D"
    ) | first_axis(
        "inner",
        *("delta_proj.kernel", "B_proj.kernel", "C_proj.kernel", "out_proj.kernel", "A_log"),
    )

    def torch_layouts(self) -> Layouts:
        """`mamba`: the keys of transformers' MambaMixer and of mamba_ssm's Mamba."""
        inner, rank = self.out_proj.in_features, self.dt_proj.in_features
        has_bias = self.out_proj.bias is not None
        in_proj = [
            parts(["u_proj.kernel", "z_proj.kernel"], "in_proj.weight", (inner, inner)),
            parts(["u_proj.bias", "z_proj.bias"], "in_proj.bias", (inner, inner)),
        ]
        selected = ["delta_proj.kernel", "B_proj.kernel", "C_proj.kernel"]
        norms = {"delta_norm": "dt_layernorm", "B_norm": "b_layernorm", "C_norm": "c_layernorm"}
        scaled = self.delta_norm is not None and self.delta_norm.scale is not None
        return {
            "mamba": [
                *in_proj[: 1 + has_bias],
                *nested(self.conv.torch_rows(), "conv", "conv1d"),
                parts(selected, "x_proj.weight", (rank, *[self.state_features] * 2)),
                *(row for ours, key in norms.items() if scaled for row in rms_norm(ours, key)),
                transposed("dt_proj.kernel", "dt_proj.weight"),
                same("dt_bias", "dt_proj.bias"),
                *(same(name, name) for name in ("A_log", "D")),
                *linear("out_proj", "out_proj", bias=has_bias),
            ]
        }
