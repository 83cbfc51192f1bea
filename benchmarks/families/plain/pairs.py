"""The operators, their plain versions, the arrays they get, and the measured sizes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_models import ops

LEAST_LOG_DECAY = -0.6
"""The least log decay, which is that of RWKV-7."""


class Pair(NamedTuple):
    """An operator with its default options, and its plain version."""

    draw: Callable[..., dict[str, np.ndarray]]
    """Makes the arrays from a random generator and the sizes."""
    ours: Callable[..., jax.Array]
    plain: Callable[..., jax.Array]
    sizes: tuple[tuple[int, ...], ...]
    """The measured sizes, in the order in which `draw` takes them."""
    has_kernels: bool = False
    """Whether twinscan-native has kernels for the operator."""


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Draws float32 numbers of variance 1."""
    return rng.standard_normal(shape, np.float32)


def uniform(rng: np.random.Generator, low: float, high: float, *shape: int) -> np.ndarray:
    """Draws float32 numbers from an interval."""
    return rng.uniform(low, high, shape).astype(np.float32)


def zeros(x: jax.Array, *features: int) -> jax.Array:
    """The state of each row of x before the first step."""
    return jnp.zeros((x.shape[0], *features), x.dtype)


Run = Callable[..., jax.Array]


def by_form(run: Run) -> tuple[Run, Run]:
    """`run(method, **arrays)` with the form that the operator chooses, and with its definition."""
    return partial(run, "auto"), partial(run, "definition")


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


def draw_gated_delta_rule(rng, batch, time, heads, size):
    """Keys of length 1, and a decay and a rate for each head."""
    arrays = draw_delta_rule(rng, batch, time, heads, size)
    log_decay, beta = arrays["log_w"][..., 0], uniform(rng, 0, 1, batch, time, heads)
    q, k, v = (arrays[name] for name in "rkv")
    return {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}


def draw_kimi_delta_attention(rng, batch, time, heads, size):
    """The arrays of the gated delta rule, with a decay for each feature of a key."""
    log_decay = uniform(rng, LEAST_LOG_DECAY, 0, batch, time, heads, size)
    return draw_gated_delta_rule(rng, batch, time, heads, size) | {"log_decay": log_decay}


def draw_state_space(rng, batch, time, groups, heads, head_size, state_size):
    """The C, B, Δ x and Δ A of Mamba-2."""
    q, k = normal(rng, 2, batch, time, groups, state_size) * np.float32(state_size**-0.5)
    log_decay = uniform(rng, LEAST_LOG_DECAY, 0, batch, time, heads)
    return {"q": q, "k": k, "v": normal(rng, batch, time, heads, head_size), "log_decay": log_decay}


def run_state_space(method, **arrays):
    """The recurrence of Mamba-2, from the zero state."""
    return ops.gated_delta_rule(**arrays, beta=None, method=method)[0]


def by_definition(rule, draw, sizes) -> Pair:
    """A delta rule, whose plain version is its definition."""

    def run(method, **arrays):
        return rule(**arrays, method=method)[0]

    return Pair(draw, *by_form(run), sizes)


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

STATE_SPACES = (
    (1, 17, 1, 1, 16, 16),
    (1, 128, 1, 24, 64, 128),
    (1, 300, 2, 4, 64, 64),
    (1, 1024, 1, 24, 64, 128),
    (1, 1024, 8, 24, 64, 128),
    (1, 1024, 1, 8, 64, 64),
    (1, 2048, 1, 48, 64, 16),
    (2, 500, 1, 32, 64, 128),
    (3, 77, 1, 5, 24, 40),
    (4, 256, 4, 16, 32, 128),
    (8, 128, 1, 8, 64, 256),
    (16, 64, 1, 24, 64, 64),
)

# RWKV-4


def draw_wkv(rng, batch, time, features):
    """Keys, values, decays and bonuses."""
    k, v = normal(rng, 2, batch, time, features)
    return {"k": k, "v": v, "w": uniform(rng, 0.01, 2, features), "u": normal(rng, features)}


def run_wkv(method, **arrays):
    """RWKV-4's average, from the empty state."""
    return ops.wkv(**arrays, method=method)[0]


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


def run_linear_recurrence(method, **arrays):
    """The recurrence, from the zero state."""
    return ops.linear_recurrence(**arrays, method=method)[0]


def draw_min_rnn(gates: int):
    """Inputs, and weights as torch initializes them."""

    def draw(rng, batch, time, features, hidden):
        bound = features**-0.5
        kernel = uniform(rng, -bound, bound, features, gates * hidden)
        bias = uniform(rng, -bound, bound, gates * hidden)
        return {"x": normal(rng, batch, time, features), "kernel": kernel, "bias": bias}

    return draw


def min_rnn(run, gates: int):
    """A minGRU or minLSTM by the forms of its recurrence, from the zero state."""

    def by(method, x, kernel, bias):
        state = ops.MinRNNState(zeros(x, kernel.shape[1] // gates))
        return run(x, state, kernel=kernel, bias=bias, method=method)[0]

    return Pair(draw_min_rnn(gates), *by_form(by), LAYERS)


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


def draw_selective_scan(rng, batch, time, features, state_size):
    """The inputs, steps, keys and rates of Mamba, whose rates are −1 … −state_size at first."""
    B, C = normal(rng, 2, batch, time, state_size)
    return {
        "u": normal(rng, batch, time, features),
        "dt": uniform(rng, 0.001, 0.1, batch, time, features),
        "A": -np.tile(np.arange(1, state_size + 1, dtype=np.float32), (features, 1)),
        "B": B,
        "C": C,
    }


def run_selective_scan(method, **arrays):
    """Mamba's scan, from the zero state."""
    return ops.selective_scan(**arrays, method=method)[0]


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


def gated_by(method: str, recurrence, state_type):
    """A stack of one layer by a form, from the zero state."""

    def run(x, **weights):
        zero = zeros(x, weights["kernel_hh"].shape[0])[None]
        state = state_type(*(zero for _ in state_type._fields))
        options = {"num_directions": 1, "method": method}
        return ops.recurrent_stack(recurrence, x, state, [weights], **options)[0]

    return run


def gated(recurrence, state_type, gates: int) -> Pair:
    """A gated recurrence."""
    auto, definition = (
        gated_by(method, recurrence, state_type) for method in ("auto", "definition")
    )
    return Pair(draw_gated(gates), auto, definition, GATED, has_kernels=True)


GATED = (
    (1, 9, 10, 12),
    (1, 200, 64, 64),
    (1, 400, 320, 320),
    (1, 100, 512, 1024),
    (2, 333, 40, 77),
    (3, 100, 30, 150),
    (7, 60, 100, 333),
    (16, 60, 640, 640),
    (30, 50, 80, 400),
    (32, 128, 256, 256),
    (64, 32, 512, 512),
    (100, 50, 20, 50),
)

# Mixtures of experts


def draw_grouped_dot(rng, rows, groups, features, out):
    """Rows, and a matrix for each group."""
    kernels = normal(rng, groups, features, out) * np.float32(features**-0.5)
    return {"x": normal(rng, rows, features), "kernels": kernels}


def run_grouped_dot(method, x, kernels):
    """The product of each row with the matrix of its group, for groups of random sizes."""
    groups = len(kernels)
    sizes = np.random.default_rng(0).multinomial(len(x), np.full(groups, 1 / groups))
    return ops.grouped_dot(x, kernels, jnp.asarray(sizes), method=method)


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


def run_modal_conv(method, v, **weights):
    """The convolution, from the zero state."""
    state = ops.ModalConvState(zeros(v, *weights["poles"].shape))
    return ops.modal_conv(v, state, **weights, method=method)[0]


def draw_local_attention(rng, batch, time, heads, size, window):
    """Queries, keys and values. The window determines no array."""
    q, k, v = normal(rng, 3, batch, time, heads, size)
    return {"q": q, "k": k, "v": v, "window": np.zeros(window, np.float32)}


def run_local_attention(method, q, k, v, window):
    """The attention, from the empty state."""
    cache = zeros(k, window.size - 1, *k.shape[2:])
    state = ops.LocalAttentionState(jnp.zeros(k.shape[0], jnp.int32), cache, cache)
    return ops.local_attention(q, k, v, state, method=method)[0]


PAIRS: Mapping[str, Pair] = {
    # Two ways to call one operator share its sizes.
    "delta_rule": by_definition(ops.delta_rule, draw_delta_rule, MATRICES[::2]),
    "wkv7": by_definition(
        partial(ops.delta_rule, min_log_w=LEAST_LOG_DECAY), draw_delta_rule, MATRICES[1::2]
    ),
    "wkv6": by_definition(ops.delta_rule, draw_wkv6, MATRICES),
    "gated_delta_rule": by_definition(ops.gated_delta_rule, draw_gated_delta_rule, MATRICES),
    "kimi delta attention": by_definition(
        ops.gated_delta_rule, draw_kimi_delta_attention, MATRICES[::2]
    ),
    "state space": Pair(
        draw_state_space,
        *by_form(run_state_space),
        STATE_SPACES,
        has_kernels=True,
    ),
    "wkv": Pair(draw_wkv, *by_form(run_wkv), ROWS),
    "linear_recurrence": Pair(draw_linear_recurrence, *by_form(run_linear_recurrence), ROWS),
    "min_gru": min_rnn(ops.min_gru, 2),
    "min_lstm": min_rnn(ops.min_lstm, 3),
    "selective_scan": Pair(
        draw_selective_scan,
        *by_form(run_selective_scan),
        (
            (1, 9, 10, 4),
            (1, 64, 96, 16),
            (1, 300, 128, 16),
            (1, 1024, 256, 16),
            (1, 1024, 1536, 16),
            (1, 2048, 64, 32),
            (2, 500, 77, 16),
            (3, 100, 200, 8),
            (4, 512, 192, 16),
            (8, 128, 256, 16),
            (16, 64, 100, 16),
            (32, 40, 64, 8),
        ),
        has_kernels=True,
    ),
    "lstm": gated(ops.lstm, ops.LSTMState, 4),
    "gru": gated(ops.gru, ops.GRUState, 3),
    "rnn": gated(ops.rnn, ops.RNNState, 1),
    "grouped_dot": Pair(
        draw_grouped_dot,
        *by_form(run_grouped_dot),
        (
            (17, 3, 10, 12),
            (64, 4, 64, 64),
            (100, 64, 96, 128),
            (128, 8, 256, 512),
            (256, 8, 256, 256),
            (300, 16, 128, 77),
            (512, 16, 256, 256),
            (512, 64, 128, 256),
            (1024, 4, 128, 128),
            (1024, 32, 64, 192),
            (2000, 10, 100, 100),
            (4096, 64, 64, 64),
        ),
    ),
    "modal_conv": Pair(
        draw_modal_conv,
        *by_form(run_modal_conv),
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
        *by_form(run_local_attention),
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
