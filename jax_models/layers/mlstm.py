"""The mLSTM (arXiv 2405.04517), the recurrent layer of xLSTM."""

__all__ = ["MLSTM", "MLSTMState"]

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_models import ops
from jax_models.checks.values import Positive, check_divides
from jax_models.layers.linear import Linear, lecun_normal
from jax_models.layers.norm import GroupNorm
from jax_models.mesh_axes import first_axis, last_axis
from jax_models.ops import carry_dtype
from jax_models.ops.delta import GATED_DELTA_RULE
from jax_models.ops.linear.max_plus import max_plus
from jax_models.options import Initializer, LayerOptions, filter_options, with_inits
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, linear, parts, rms_norm

zeros = nnx.initializers.zeros


def linspace(start: float, stop: float) -> Initializer:
    """Initializes a vector with numbers that are evenly spaced from `start` to `stop`."""
    return lambda key, shape, dtype, **_: jnp.linspace(start, stop, *shape, dtype=dtype)


class MLSTMState(NamedTuple):
    """The state of an mLSTM: a matrix, a vector and the exponent of both for each head."""

    cell: Float[Array, "batch heads value key"]
    normalizer: Float[Array, "batch heads key"]
    max: Float[Array, "batch heads"]


class MLSTM(SequenceLayer[MLSTMState]):
    """The mLSTM: an LSTM with a matrix for each head, and with an exponential input gate.

        >>> layer = MLSTM(64, num_heads=4, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))

        q, k, v = x W_q / √key_features, x W_k, x W_v
        i, f = cap(x W_i + b_i), cap(x W_f + b_f),   cap(a) = c tanh(a / c)
        C_t = σ(f_t) C_{t−1} + exp(i_t) v_t k_tᵀ,   n_t = σ(f_t) n_{t−1} + exp(i_t) k_t
        m_t = max(log σ(f_t) + m_{t−1}, i_t)
        h_t = C_t q_t / (max(|n_tᵀ q_t|, 1) + ε exp(m_t))                            by head
        y = (norm(h) ⊙ σ(x W_o)) W_out

    c is `gate_soft_cap`, and `norm` is a LayerNorm of each head, without a bias. x and y are
    (batch, time, features). The state is `MLSTMState(cell, normalizer, max)`: C exp(−m) (batch,
    num_heads, value_features, key_features), n exp(−m) (batch, num_heads, key_features) and m
    (batch, num_heads), which start at zero. So exponentials are taken only of numbers that are at
    most 0, apart from exp(−m). `ops.gated_delta_rule` computes C q and nᵀ q.

    Args:
        features: size of x_t and y_t.
        num_heads: number of heads, each with a matrix C.
        key_features: size of each head of q and k. None: features / (2 num_heads).
        value_features: size of each head of v. None: features / num_heads.
        gate_soft_cap: c, which bounds i and f.
        normalizer_epsilon: ε of h.
        epsilon: ε of `norm`.
        in_init: initializes W_q, W_k and W_v. None: like `kernel_init`.
        out_init: initializes W_out. None: like `kernel_init`.
        method: the method of `ops.gated_delta_rule`.
        **options: as in `LayerOptions`. Matrices start as in Flax, but W_i, W_f and W_o at zero,
            b_i at −10, and b_f at numbers from 3 to 6. i, f, the state, h and `norm` are computed
            in at least float32.

    Raises:
        ValueError: a size, cap or epsilon is not positive, the features are not divisible as the
            defaults of the sizes need, or there is no such method.

    Layouts: `xlstm` and `xlstm-fused` (the modules of xLSTM in transformers, with `weight_mode`
    "single" and "fused").

    Source: Beck et al. 2024 (xLSTM, arXiv 2405.04517) and 2025 (xLSTM 7B, arXiv 2503.13427).

    """

    divides_time = True

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        key_features: int | None = None,
        value_features: int | None = None,
        gate_soft_cap: Positive = 15.0,
        normalizer_epsilon: Positive = 1e-6,
        epsilon: Positive = 1e-6,
        in_init: Initializer | None = None,
        out_init: Initializer | None = None,
        method: ops.GatedDeltaRuleMethod = "auto",
        **options: Unpack[LayerOptions],
    ):
        super().__init__(features, **options)
        if value_features is None:
            check_divides("num_heads", num_heads, "features", features)
            value_features = features // num_heads
        if key_features is None:
            check_divides("2 num_heads", 2 * num_heads, "features", features)
            key_features = features // (2 * num_heads)
        self.num_heads, self.head_sizes = num_heads, (key_features, value_features)
        self.gate_soft_cap, self.normalizer_epsilon = gate_soft_cap, normalizer_epsilon
        self.method = GATED_DELTA_RULE.checked_method(method)
        keys, values = num_heads * key_features, num_heads * value_features
        matrix = with_inits(options, lecun_normal, None, use_bias=False)
        out = {**matrix, "kernel_init": out_init or matrix["kernel_init"]}
        matrix["kernel_init"] = in_init or matrix["kernel_init"]
        input_gate = with_inits(options, zeros, nnx.initializers.constant(-10.0))
        forget_gate = with_inits(options, zeros, linspace(3.0, 6.0))
        self.q_proj = Linear(features, keys, **matrix)
        self.k_proj = Linear(features, keys, **matrix)
        self.v_proj = Linear(features, values, **matrix)
        self.o_proj = Linear(features, values, **with_inits(options, zeros, None, use_bias=False))
        self.i_proj = Linear(features, num_heads, **input_gate)
        self.f_proj = Linear(features, num_heads, **forget_gate)
        self.out_proj = Linear(values, features, **out)
        # Without a dtype, the norm keeps the precision of h, which is at least float32.
        self.norm = GroupNorm(
            values,
            num_groups=num_heads,
            epsilon=epsilon,
            use_bias=False,
            **filter_options(options),
        )

    def init_state(self, batch_size: int) -> MLSTMState:
        """Zeros, in at least float32."""
        heads, (keys, values) = (batch_size, self.num_heads), self.head_sizes
        shapes = (*heads, values, keys), (*heads, keys), heads
        return MLSTMState(*(jnp.zeros(shape, self.state_dtype) for shape in shapes))

    def sequence(self, x, state, rows):
        """Runs `ops.gated_delta_rule` on C and n, scaled by exp(−m), then norms and gates h."""
        dtype = self.computation_dtype(x)
        x = x.astype(dtype)
        keys, values = ((*x.shape[:2], self.num_heads, size) for size in self.head_sizes)
        q, k = self.q_proj(x).reshape(keys), self.k_proj(x).reshape(keys)
        v = self.v_proj(x).reshape(values)
        i, f = self.soft_capped(self.i_proj(x)), self.soft_capped(self.f_proj(x))
        log_f = jax.nn.log_sigmoid(f)
        before, after, last = max_plus(log_f, i, state.max.astype(i.dtype), rows=rows)

        # n is the row of C for a value that is always 1.
        cell = jnp.concatenate([state.cell, state.normalizer[:, :, None]], axis=2)
        y, cell = ops.gated_delta_rule(
            q,
            # In the padding, m stays, so that i may be much larger.
            jnp.exp(rows.masked(i - after))[..., None] * k.astype(i.dtype),
            jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1),
            log_f + (before - after),  # m may be much larger than the decay
            None,
            cell,
            scale=self.head_sizes[0] ** -0.5,
            method=self.method,
            rows=rows,
        )
        h = self.normalized(y[..., :-1], y[..., -1:], after[..., None])
        o = self.o_proj(x)
        y = self.gated(h.reshape(o.shape), o).astype(dtype)
        return self.out_proj(y), MLSTMState(cell[:, :, :-1], cell[:, :, -1], last)

    def soft_capped(self, gate: Float[Array, "batch time heads"]) -> Array:
        """`c tanh(gate / c)`, in at least float32."""
        gate = gate.astype(carry_dtype(gate.dtype))
        return self.gate_soft_cap * jnp.tanh(gate / self.gate_soft_cap)

    def normalized(
        self,
        value: Float[Array, "batch time heads value"],
        total: Float[Array, "batch time heads 1"],
        m: Float[Array, "batch time heads 1"],
    ) -> Float[Array, "batch time heads value"]:
        """h, if `value` and `total` are C q and nᵀ q, both times exp(−m)."""
        return value / (jnp.maximum(jnp.abs(total), jnp.exp(-m)) + self.normalizer_epsilon)

    def gated(
        self, h: Float[Array, "batch time inner"], o: Float[Array, "batch time inner"]
    ) -> Float[Array, "batch time inner"]:
        """`norm(h) ⊙ σ(o)`, in at least float32."""
        normed = self.norm(h.reshape(-1, h.shape[-1])).reshape(h.shape)
        return normed.astype(h.dtype) * jax.nn.sigmoid(o.astype(h.dtype))

    mesh_axes = last_axis(
        "heads", "q_proj", "k_proj", "v_proj", "o_proj", "i_proj", "f_proj", "norm"
    ) | first_axis("heads", "out_proj.kernel")

    def torch_layouts(self) -> Layouts:
        """`xlstm` and `xlstm-fused`: the keys of transformers' xLSTMLayer."""
        keys, values = self.q_proj.out_features, self.v_proj.out_features
        names, gates = ["q_proj", "k_proj", "v_proj", "o_proj"], ["i_proj", "f_proj"]
        rest = [*rms_norm("norm", "multihead_norm"), *linear("out_proj", "out_proj", bias=False)]
        return {
            "xlstm": [
                *linear("q_proj", "q", bias=False),
                *linear("k_proj", "k", bias=False),
                *linear("v_proj", "v", bias=False),
                *linear("o_proj", "ogate_preact", bias=False),
                *linear("i_proj", "igate_preact"),
                *linear("f_proj", "fgate_preact"),
                *rest,
            ],
            "xlstm-fused": [
                parts(
                    [f"{name}.kernel" for name in names],
                    "qkv_opreact.weight",
                    (keys, keys, values, values),
                ),
                parts([f"{name}.kernel" for name in gates], "ifgate_preact.weight"),
                parts([f"{name}.bias" for name in gates], "ifgate_preact.bias"),
                *rest,
            ],
        }
