"""Each operator against a plain JAX version: the scan or the expression that you write first."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from benchmarks.problem import OURS, Contenders, Problem, operator
from benchmarks.report.plot import RowsByAllocator
from jax_models import ops

PLAIN = "plain"
LEAST_LOG_DECAY = -0.6
"""The least log decay, which is that of RWKV-7."""


class Pair(NamedTuple):
    """An operator with its default options, and its plain version."""

    draw: Callable[..., dict[str, np.ndarray]]
    """Makes the arrays from a random generator and the sizes."""
    ours: Callable[..., jax.Array]
    plain: Callable[..., jax.Array]
    sizes: tuple[tuple[int, ...], ...]
    """The measured sizes, batch and time first."""


@dataclasses.dataclass(frozen=True)
class Operator(Problem):
    """A pair of versions of an operator, at some sizes."""

    operator: str
    sizes: tuple[int, ...]
    rounds = 3

    @property
    def name(self) -> str:
        """The operator and the sizes."""
        return f"{self.operator} {' × '.join(map(str, self.sizes))}"

    @property
    def pair(self) -> Pair:
        """The operator and its plain version."""
        return PAIRS[self.operator]

    def arrays(self):
        """Random arrays, the same for each call."""
        return self.pair.draw(np.random.default_rng(0), *self.sizes)

    def cotangent(self):
        """A random gradient of y."""
        y = jax.eval_shape(lambda arrays: self.pair.plain(**arrays), self.arrays())
        return np.random.default_rng(1).standard_normal(y.shape, np.float32)

    def oracle(self):
        """Computes the plain version in float64."""
        jax.config.update("jax_platforms", "cpu")  # the timings run in other processes
        with jax.enable_x64(True):
            wide = {name: jnp.asarray(x, jnp.float64) for name, x in self.arrays().items()}
            y, pullback = jax.vjp(jax.jit(lambda arrays: self.pair.plain(**arrays)), wide)
            (gradients,) = pullback(jnp.asarray(self.cotangent(), jnp.float64))
        return {name: np.asarray(x) for name, x in {"y": y, **gradients}.items()}

    def targets(self, part, platform):
        """No operator takes longer than its plain version."""
        return {PLAIN: 1.0}


def over_time(step: Callable, state: Any, xs: Any) -> jax.Array:
    """`lax.scan` over arrays (batch, time, …)."""
    by_time = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), xs)
    return jnp.swapaxes(jax.lax.scan(step, state, by_time)[1], 0, 1)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Draws float32 numbers of variance 1."""
    return rng.standard_normal(shape, np.float32)


def uniform(rng: np.random.Generator, low: float, high: float, *shape: int) -> np.ndarray:
    """Draws float32 numbers from an interval."""
    return rng.uniform(low, high, shape).astype(np.float32)


def zeros(x: jax.Array, *features: int) -> jax.Array:
    """The state of each row of x before the first step."""
    return jnp.zeros((x.shape[0], *features), x.dtype)


# Matrix-valued states


def draw_delta_rule(rng, batch, time, heads, size):
    """Keys of length 1, and the removal and replacement keys of RWKV-7."""
    r, k, v = normal(rng, 3, batch, time, heads, size)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_w = uniform(rng, LEAST_LOG_DECAY, 0, *k.shape)
    b = uniform(rng, 0, 1, *k.shape) * k
    return {"r": r * size**-0.5, "log_w": log_w, "k": k, "v": v, "a": -k, "b": b}


def draw_wkv6(rng, batch, time, heads, size):
    """The arrays of the delta rule without a and b, and the bonus of the current step."""
    arrays = draw_delta_rule(rng, batch, time, heads, size)
    del arrays["a"], arrays["b"]
    return arrays | {"u": normal(rng, heads, size)}


def plain_delta_rule(r, log_w, k, v, a, b):
    """`S_t = S_{t−1} (diag(w_t) + a_t b_tᵀ) + v_t k_tᵀ`, `y_t = S_t r_t`."""

    def step(s, x):
        r, log_w, k, v, a, b = x
        read = jnp.einsum("bhij,bhj->bhi", s, a)
        s = s * jnp.exp(log_w)[..., None, :] + read[..., None] * b[..., None, :]
        s = s + v[..., None] * k[..., None, :]
        return s, jnp.einsum("bhij,bhj->bhi", s, r)

    return over_time(step, zeros(k, k.shape[2], *k.shape[3:] * 2), (r, log_w, k, v, a, b))


def plain_wkv6(r, log_w, k, v, u):
    """`y_t = (S_{t−1} + v_t (u ⊙ k_t)ᵀ) r_t`, `S_t = S_{t−1} diag(w_t) + v_t k_tᵀ`."""

    def step(s, x):
        r, log_w, k, v = x
        now = v[..., None] * k[..., None, :]
        y = jnp.einsum("bhij,bhj->bhi", s + u[..., None, :] * now, r)
        return s * jnp.exp(log_w)[..., None, :] + now, y

    return over_time(step, zeros(k, k.shape[2], *k.shape[3:] * 2), (r, log_w, k, v))


MATRICES = (
    (1, 17, 1, 16),
    (1, 128, 4, 64),
    (1, 300, 2, 64),
    (1, 512, 12, 64),
    (1, 1024, 8, 64),
    (1, 256, 16, 128),
    (2, 1500, 4, 64),
    (3, 77, 5, 24),
    (4, 200, 3, 48),
    (8, 128, 4, 64),
    (16, 64, 2, 64),
    (32, 100, 2, 32),
)

# RWKV-4


def draw_wkv(rng, batch, time, features):
    """Keys, values, decays and bonuses."""
    k, v = normal(rng, 2, batch, time, features)
    return {"k": k, "v": v, "w": uniform(rng, 0.01, 2, features), "u": normal(rng, features)}


def plain_wkv(k, v, w, u):
    """The average with a running maximum of the exponents, as in RWKV's own code."""

    def step(state, x):
        (num, den, largest), (k, v) = state, x
        q = jnp.maximum(largest, u + k)
        past, now = jnp.exp(largest - q), jnp.exp(u + k - q)
        y = (past * num + now * v) / (past * den + now)
        q = jnp.maximum(largest - w, k)
        past, now = jnp.exp(largest - w - q), jnp.exp(k - q)
        return (past * num + now * v, past * den + now, q), y

    empty = zeros(k, k.shape[2])
    return over_time(step, (empty, empty, empty - 1e38), (k, v))


ROWS = (
    (1, 7, 13),
    (1, 100, 64),
    (1, 1024, 256),
    (1, 8192, 256),
    (1, 4000, 1024),
    (2, 333, 77),
    (3, 1000, 100),
    (4, 2048, 512),
    (8, 512, 512),
    (16, 50, 2048),
    (32, 128, 192),
    (64, 64, 300),
)

# Diagonal recurrences


def draw_linear_recurrence(rng, batch, time, features):
    """Decays close to 1, and inputs."""
    shape = batch, time, features
    return {"a": uniform(rng, 0.9, 0.999, *shape), "b": normal(rng, *shape)}


def plain_linear_recurrence(a, b):
    """`h_t = a_t ⊙ h_{t−1} + b_t`."""

    def step(h, x):
        a, b = x
        h = a * h + b
        return h, h

    return over_time(step, zeros(b, b.shape[2]), (a, b))


def draw_min_rnn(gates: int):
    """Inputs, and weights as torch initializes them."""

    def draw(rng, batch, time, features, hidden):
        bound = features**-0.5
        kernel = uniform(rng, -bound, bound, features, gates * hidden)
        bias = uniform(rng, -bound, bound, gates * hidden)
        return {"x": normal(rng, batch, time, features), "kernel": kernel, "bias": bias}

    return draw


def our_min_rnn(run, gates: int):
    """Our operator, from the zero state."""

    def ours(x, kernel, bias):
        state = ops.MinRNNState(zeros(x, kernel.shape[1] // gates))
        return run(x, state, kernel=kernel, bias=bias)[0]

    return ours


def plain_min_gru(x, kernel, bias):
    """`h_t = (1 − z_t) ⊙ h_{t−1} + z_t ⊙ h̃_t`."""
    gate, candidate = jnp.split(x @ kernel + bias, 2, axis=-1)
    z = jax.nn.sigmoid(gate)
    return plain_linear_recurrence(1 - z, z * candidate)


def plain_min_lstm(x, kernel, bias):
    """`h_t = f'_t ⊙ h_{t−1} + i'_t ⊙ h̃_t`, the gates divided by their sum."""
    f, i, candidate = jnp.split(x @ kernel + bias, 3, axis=-1)
    f, i = jax.nn.sigmoid(f), jax.nn.sigmoid(i)
    return plain_linear_recurrence(f / (f + i), i / (f + i) * candidate)


LAYERS = (
    (1, 9, 10, 12),
    (1, 100, 64, 64),
    (1, 1000, 100, 128),
    (1, 8192, 256, 256),
    (2, 500, 77, 33),
    (3, 333, 200, 120),
    (4, 1024, 256, 512),
    (5, 64, 512, 384),
    (8, 256, 128, 256),
    (16, 100, 300, 300),
    (32, 128, 256, 256),
    (64, 50, 192, 192),
)

# Gated recurrences


def draw_gated(gates: int):
    """Inputs, and weights as torch initializes them."""

    def draw(rng, batch, time, features, hidden):
        bound = hidden**-0.5
        return {
            "x": normal(rng, batch, time, features),
            "kernel_ih": uniform(rng, -bound, bound, features, gates * hidden),
            "kernel_hh": uniform(rng, -bound, bound, hidden, gates * hidden),
            "bias_ih": uniform(rng, -bound, bound, gates * hidden),
            "bias_hh": uniform(rng, -bound, bound, gates * hidden),
        }

    return draw


def our_gated(run, state_type):
    """Our operator, from the zero state."""

    def ours(x, **weights):
        hidden = weights["kernel_hh"].shape[0]
        state = state_type(*(zeros(x, hidden) for _ in state_type._fields))
        return run(x, state, **weights)[0]

    return ours


def plain_gated(cell, states: int, *, hoisted: bool):
    """A scan of `cell(of_x, of_h, *state)`. If `hoisted`, the products of x precede the scan."""

    def plain(x, kernel_ih, kernel_hh, bias_ih, bias_hh):
        def of_x(x):
            return x @ kernel_ih + bias_ih

        def step(state, x):
            state = cell(x if hoisted else of_x(x), state[0] @ kernel_hh + bias_hh, *state)
            return state, state[0]

        state = [zeros(x, kernel_hh.shape[0])] * states
        return over_time(step, tuple(state), of_x(x) if hoisted else x)

    return plain


def lstm_cell(of_x, of_h, _, c):
    """The LSTM of torch."""
    i, f, g, o = jnp.split(of_x + of_h, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def gru_cell(of_x, of_h, h):
    """The GRU of torch."""
    (r_x, z_x, n_x), (r_h, z_h, n_h) = (jnp.split(a, 3, axis=-1) for a in (of_x, of_h))
    r, z = jax.nn.sigmoid(r_x + r_h), jax.nn.sigmoid(z_x + z_h)
    return ((1 - z) * jnp.tanh(n_x + r * n_h) + z * h,)


def rnn_cell(of_x, of_h, _):
    """The RNN of torch."""
    return (jnp.tanh(of_x + of_h),)


def gated(run, state_type, cell, gates: int, *, hoisted: bool) -> Pair:
    """A gated operator, and its plain scan."""
    plain = plain_gated(cell, len(state_type._fields), hoisted=hoisted)
    return Pair(draw_gated(gates), our_gated(run, state_type), plain, GATED)


GATED = (
    (1, 9, 10, 12),
    (1, 200, 64, 64),
    (1, 400, 320, 320),
    (1, 100, 512, 1024),
    (2, 333, 40, 77),
    (3, 100, 30, 150),
    (7, 60, 100, 333),
    (8, 150, 64, 128),
    (16, 60, 640, 640),
    (16, 150, 200, 200),
    (30, 50, 80, 400),
    (32, 128, 256, 256),
    (64, 32, 512, 512),
    (100, 50, 20, 50),
)

# Convolutions and attention


def draw_modal_conv(rng, batch, time, features, modes):
    """Poles inside the unit circle."""
    angle = rng.uniform(0, np.pi, (features, modes))
    poles = rng.uniform(0.5, 0.99, (features, modes)) * np.exp(1j * angle)
    return {
        "v": normal(rng, batch, time, features),
        "poles": np.stack([poles.real, poles.imag], axis=-1).astype(np.float32),
        "residues": normal(rng, features, modes, 2),
        "skip": normal(rng, features),
    }


def our_modal_conv(v, **weights):
    """Our operator, from the zero state."""
    state = ops.ModalConvState(zeros(v, *weights["poles"].shape))
    return ops.modal_conv(v, state, **weights)[0]


def plain_modal_conv(v, poles, residues, skip):
    """`s_t = λ ⊙ s_{t−1} + v_t`, `y_t = Re Σ_n R_n s_{t,n} + skip ⊙ v_t`."""
    poles, residues = (jax.lax.complex(a[..., 0], a[..., 1]) for a in (poles, residues))

    def step(s, v):
        s = poles * s + v[..., None]
        return s, (residues * s).real.sum(axis=-1) + skip * v

    return over_time(step, zeros(v, *poles.shape).astype(poles.dtype), v)


def draw_local_attention(rng, batch, time, heads, size, window):
    """Queries, keys and values. The window determines no array."""
    q, k, v = normal(rng, 3, batch, time, heads, size)
    return {"q": q, "k": k, "v": v, "window": np.zeros(window, np.float32)}


def our_local_attention(q, k, v, window):
    """Our operator, from the empty state."""
    cache = zeros(k, window.size - 1, *k.shape[2:])
    state = ops.LocalAttentionState(jnp.zeros(k.shape[0], jnp.int32), cache, cache)
    return ops.local_attention(q, k, v, state)[0]


def plain_local_attention(q, k, v, window):
    """JAX's attention over the same keys."""
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=(window.size - 1, 0)
    )


PAIRS: Mapping[str, Pair] = {
    "delta_rule": Pair(
        draw_delta_rule, lambda **arrays: ops.delta_rule(**arrays)[0], plain_delta_rule, MATRICES
    ),
    "wkv7": Pair(
        draw_delta_rule,
        lambda **arrays: ops.delta_rule(**arrays, min_log_w=LEAST_LOG_DECAY)[0],
        plain_delta_rule,
        MATRICES,
    ),
    "wkv6": Pair(draw_wkv6, lambda **arrays: ops.delta_rule(**arrays)[0], plain_wkv6, MATRICES),
    "wkv": Pair(draw_wkv, lambda **arrays: ops.wkv(**arrays)[0], plain_wkv, ROWS),
    "linear_recurrence": Pair(
        draw_linear_recurrence,
        lambda **arrays: ops.linear_recurrence(**arrays)[0],
        plain_linear_recurrence,
        ROWS,
    ),
    "min_gru": Pair(draw_min_rnn(2), our_min_rnn(ops.min_gru, 2), plain_min_gru, LAYERS),
    "min_lstm": Pair(draw_min_rnn(3), our_min_rnn(ops.min_lstm, 3), plain_min_lstm, LAYERS),
    "lstm": gated(ops.lstm, ops.LSTMState, lstm_cell, 4, hoisted=False),
    "lstm, hoisted": gated(ops.lstm, ops.LSTMState, lstm_cell, 4, hoisted=True),
    "gru": gated(ops.gru, ops.GRUState, gru_cell, 3, hoisted=False),
    "gru, hoisted": gated(ops.gru, ops.GRUState, gru_cell, 3, hoisted=True),
    "rnn": gated(ops.rnn, ops.RNNState, rnn_cell, 1, hoisted=False),
    "rnn, hoisted": gated(ops.rnn, ops.RNNState, rnn_cell, 1, hoisted=True),
    "modal_conv": Pair(
        draw_modal_conv,
        our_modal_conv,
        plain_modal_conv,
        (
            (1, 9, 10, 2),
            (1, 64, 32, 1),
            (1, 500, 64, 8),
            (1, 4096, 128, 4),
            (1, 2000, 512, 2),
            (2, 100, 77, 3),
            (2, 1024, 256, 8),
            (3, 333, 50, 5),
            (4, 1024, 192, 4),
            (8, 256, 128, 16),
            (16, 128, 64, 8),
            (32, 40, 100, 4),
        ),
    ),
    "local_attention": Pair(
        draw_local_attention,
        our_local_attention,
        plain_local_attention,
        (
            (1, 9, 1, 8, 4),
            (1, 64, 4, 32, 16),
            (1, 200, 2, 64, 128),
            (1, 256, 4, 64, 256),
            (1, 300, 4, 64, 64),
            (1, 1024, 8, 64, 128),
            (1, 2048, 4, 64, 512),
            (2, 500, 3, 48, 100),
            (3, 100, 5, 24, 33),
            (4, 512, 4, 32, 1024),
            (8, 128, 4, 64, 128),
            (16, 400, 2, 32, 50),
        ),
    ),
}


def problems(quick: bool) -> list[Operator]:
    """Small, large, odd and even sizes, with one row or many."""
    return [
        Operator(name, sizes)
        for name, pair in PAIRS.items()
        for sizes in (pair.sizes[:1] if quick else pair.sizes)
    ]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: Operator):
    """Our operator, with `method="auto"`."""
    return operator(problem, problem.pair.ours)


@contenders.jax(PLAIN)
def plain(problem: Operator):
    """The plain version."""
    return operator(problem, problem.pair.plain)


def plot(found: RowsByAllocator, title: str) -> Figure:
    """Draws the ratios of all sizes, with a panel for each part and a line for each operator."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    parts = list(dict.fromkeys(row.part for rows in found.values() for row in rows))
    operators = list(PAIRS)
    lines = {each.name: operators.index(each.operator) for each in problems(quick=False)}
    for panel, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        for rows in found.values():
            times = {(row.problem, row.name): row.ms for row in rows if row.part == part}
            measured = [
                problem
                for problem, name in times
                if name == OURS and (problem, PLAIN) in times and problem in lines
            ]
            panel.plot(
                [times[problem, OURS] / times[problem, PLAIN] for problem in measured],
                [lines[problem] for problem in measured],
                "o",
                alpha=0.5,
            )
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.axvline(1, color="black", linewidth=0.8, linestyle="--")
        panel.set_yticks(range(len(operators)), operators)
        panel.invert_yaxis()
        panel.set_xlabel(f"{part}: our time / the plain version's")
    figure.suptitle(title)
    return figure
