"""Forward mode, reverse mode and second derivatives of operators with their own derivatives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_models import ops
from parity_tests.engine.bounds.tolerance import assert_same

BATCH, TIME, FEATURES, MAX_LENGTH = 2, 6, 3, 20
LENGTHS = jnp.array([TIME, 4])
REAL = (jnp.arange(TIME)[None] < LENGTHS[:, None])[..., None]
RESET = jnp.zeros((BATCH, TIME), bool).at[0, 2].set(True)


def draw(*shape: int, seed: int = 0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def linear_recurrence(a, b, h0, **options):
    h, last = ops.linear_recurrence(a, b, h0, lengths=LENGTHS, **options)
    return jnp.where(REAL, h, 0), last


def of_real_numbers(a, b, h0, **options):
    return linear_recurrence(jax.nn.sigmoid(a), b, h0, **options)


def of_complex_numbers(a, b, h0, **options):
    """The recurrence on complex numbers, which are pairs of real ones in the last axis."""
    h, last = linear_recurrence(
        *(jax.lax.complex(x[..., 0], x[..., 1]) for x in (a, b, h0)), **options
    )
    return h.real, h.imag, last.real, last.imag


def modal_conv(v, modes, poles, residues, skip, **options):
    given = {"poles": poles, "residues": residues, "skip": skip}
    y, state = ops.modal_conv(v, ops.ModalConvState(modes), **given, lengths=LENGTHS, **options)
    return jnp.where(REAL, y, 0), state


def wkv(k, v, w, u, num, den, largest, **options):
    state = ops.WKVState(num, jnp.exp(den), largest)
    y, last = ops.wkv(6 * k, v, state, w=jnp.exp(w), u=u, lengths=LENGTHS, reset=RESET, **options)
    return jnp.where(REAL, y, 0), last


def selective_scan(u, dt, A, B, C, state, **options):
    dt, A = jnp.exp(dt), -jnp.exp(A)
    masks = {"lengths": LENGTHS, "reset": RESET}
    y, last = ops.selective_scan(u, dt, A, B, C, state, **masks, **options)
    return jnp.where(REAL, y, 0), last


def delta_rule(r, log_w, k, v, a, b, state, **options):
    log_w = -jnp.exp(log_w)
    y, last = ops.delta_rule(r, log_w, k, v, a, b, state, lengths=LENGTHS, reset=RESET, **options)
    return jnp.where(REAL[..., None], y, 0), last


def gated_delta_rule(q, k, v, log_decay, beta, state, **options):
    masks = {"lengths": LENGTHS, "reset": RESET}
    y, last = ops.gated_delta_rule(
        q, k, v, -jnp.exp(log_decay), beta, state, normalize=True, **masks, **options
    )
    return jnp.where(REAL[..., None], y, 0), last


def state_space(q, k, v, log_decay, state, **options):
    """The gated delta rule without a correction."""
    return gated_delta_rule(q, k, v, log_decay, None, state, **options)


def decays_by_feature(q, k, v, log_decay, beta, state, **options):
    """The gated delta rule with a decay for each feature of a key, as in Kimi Delta Attention."""
    return gated_delta_rule(q, k, v, log_decay, beta, state, **options)


def local_attention(q, k, v, keys, values):
    """Attention of rows that have read five steps or one. A document ends among the new steps."""
    state = ops.LocalAttentionState(jnp.array([5, 1]), keys, values)
    y, last = ops.local_attention(q, k, v, state, lengths=LENGTHS, reset=RESET)
    return jnp.where(REAL[..., None], y, 0), last.keys, last.values


def grouped_dot(x, kernels, **options):
    return ops.grouped_dot(x, kernels, jnp.array([40, 0, 3]), **options)


def online_conv(v, inputs, taps):
    """The step that ends a block of inputs, after all other inputs of the block."""
    options = {"taps": lambda h, length: h[:, :length], "max_length": MAX_LENGTH}
    state = ops.long_conv_state(inputs, params=taps, **options)
    y, state = ops.online_conv(v, state, params=taps, **options)
    return y, state.inputs, state.tiles, state.ahead


def gated(op, kind, kernel_hh, kernel_ih, bias_hh, bias_ih, x, *others, **options):
    """A gated recurrence. After the arrays of its state, there may be those of a projection."""
    size = len(kind._fields)
    weights = {"kernel_ih": kernel_ih, "kernel_hh": kernel_hh, "bias_ih": bias_ih}
    weights |= {"bias_hh": bias_hh}
    weights |= dict(zip(("kernel_hr", "bias_hr"), others[size:], strict=False))
    masks = {"lengths": LENGTHS, "reset": RESET}
    y, last = op(x, kind(*others[:size]), **weights, **masks, **options)
    return jnp.where(REAL, y, 0), last


def shapes_of(gates: int, *others: tuple[int, ...], out: int = 3) -> tuple:
    width = gates * FEATURES
    return (out, width), (FEATURES, width), (width,), (width,), SEQUENCE, (BATCH, out), *others


rnn = partial(gated, ops.rnn, ops.RNNState)
gru = partial(gated, ops.gru, ops.GRUState)
lstm, projected_lstm = (partial(gated, ops.lstm, ops.LSTMState) for _ in range(2))
SEQUENCE, ROW, VECTOR = (BATCH, TIME, FEATURES), (BATCH, FEATURES), (FEATURES,)
KEYS, VALUES = (BATCH, TIME, 2, 3), (BATCH, TIME, 2, 4)
SHAPES = {
    local_attention: (VALUES, *[(BATCH, TIME, 1, 4)] * 2, *[(BATCH, 3, 1, 4)] * 2),
    delta_rule: (KEYS, KEYS, KEYS, VALUES, KEYS, KEYS, (BATCH, 2, 4, 3)),
    gated_delta_rule: (
        *[(BATCH, TIME, 1, 3)] * 2,
        VALUES,
        *[(BATCH, TIME, 2)] * 2,
        (BATCH, 2, 4, 3),
    ),
    decays_by_feature: (
        *[(BATCH, TIME, 1, 3)] * 2,
        VALUES,
        KEYS,
        (BATCH, TIME, 2),
        (BATCH, 2, 4, 3),
    ),
    state_space: (*[(BATCH, TIME, 1, 3)] * 2, VALUES, (BATCH, TIME, 2), (BATCH, 2, 4, 3)),
    rnn: shapes_of(1),
    gru: shapes_of(3),
    lstm: shapes_of(4, ROW),
    projected_lstm: shapes_of(4, ROW, (FEATURES, 2), (2,), out=2),
    of_real_numbers: (SEQUENCE, SEQUENCE, ROW),
    of_complex_numbers: ((*SEQUENCE, 2), (*SEQUENCE, 2), (*ROW, 2)),
    modal_conv: (SEQUENCE, (BATCH, FEATURES, 2, 2), *[(FEATURES, 2, 2)] * 2, VECTOR),
    wkv: (SEQUENCE, SEQUENCE, VECTOR, VECTOR, ROW, ROW, ROW),
    selective_scan: (SEQUENCE, SEQUENCE, (3, 4), *[(BATCH, TIME, 4)] * 2, (*ROW, 4)),
    ops.long_conv: ((BATCH, FEATURES, TIME), (FEATURES, TIME)),
    grouped_dot: ((50, 3), (3, 3, 4)),
    online_conv: ((BATCH, FEATURES, 1), (BATCH, FEATURES, 15), (FEATURES, MAX_LENGTH)),
}
IN_BOTH_MODES = [
    (local_attention, {}),
    (of_real_numbers, {"method": "auto"}),
    (of_complex_numbers, {"method": "auto"}),
    (modal_conv, {}),
    (wkv, {"method": "auto"}),
    (selective_scan, {}),
    (gru, {}),  # has two biases that cannot be added
    (projected_lstm, {}),  # has a matrix product after the state
    (gated_delta_rule, {"method": "chunked"}),
    (state_space, {"method": "chunked"}),
    (decays_by_feature, {"method": "chunked"}),
    (ops.long_conv, {"method": "twisted"}),
    (grouped_dot, {"method": "blocks"}),
]
ALL = [
    *IN_BOTH_MODES,
    *(
        (rule, {"method": m})
        for rule in (delta_rule, gated_delta_rule)
        for m in ("sequential", "chunked")
        if (rule, {"method": m}) not in IN_BOTH_MODES
    ),
    # Reverse mode of a reverse recurrence is a forward one, so both directions are tested.
    *(
        (of_real_numbers, {"method": m, "reverse": True})
        for m in ("auto", "associative", "definition", "pallas")
    ),
    (of_complex_numbers, {"method": "associative"}),
    *((cell, {"reverse": True}) for cell in (gru, projected_lstm)),
    *((cell, {}) for cell in (rnn, lstm)),
    (modal_conv, {"reset": RESET}),
    (wkv, {"method": "associative"}),
    (ops.long_conv, {"method": "rfft"}),
    (online_conv, {}),
    (grouped_dot, {"method": "ragged"}),
]


def inner(x, y):
    return sum(map(jnp.vdot, jax.tree.leaves(x), jax.tree.leaves(y)))


def random_like(tree, seed: int):
    return jax.tree.map(lambda leaf: draw(*leaf.shape, seed=seed), tree)


def arguments(operator):
    return [0.5 * draw(*shape, seed=seed) for seed, shape in enumerate(SHAPES[operator])]


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("operator", "options"), ALL)
def test_forward_mode_is_the_slope_and_reverse_mode_its_transpose(x64, operator, options):
    args, operator = arguments(operator), partial(operator, **options)
    direction = random_like(args, 15)

    @jax.jit
    def moved(by):
        return operator(*jax.tree.map(lambda x, d: x + by * d, args, direction))

    results, tangents = jax.jit(lambda: jax.jvp(operator, args, direction))()
    slope = jax.tree.map(lambda a, b: (a - b) / 2e-5, moved(1e-5), moved(-1e-5))
    for a, b in zip(jax.tree.leaves(tangents), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
    cotangents = random_like(results, 16)
    gradients = jax.jit(lambda: jax.vjp(operator, *args)[1](cotangents))()
    assert_same(inner(gradients, direction), inner(cotangents, tangents), "the transpose")


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "options"), IN_BOTH_MODES)
def test_hessians_are_the_same_in_both_modes(x64, operator, options):
    first, *others = arguments(operator)

    def loss(first):
        return sum(
            jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(operator(first, *others, **options))
        )

    forward_over_reverse = jax.jit(jax.hessian(loss))(first)
    reverse_over_reverse = jax.jit(jax.jacrev(jax.grad(loss)))(first)
    assert_same(forward_over_reverse, reverse_over_reverse, "the Hessian")


@pytest.mark.parametrize("nan", [0, 1])
def test_a_nan_reaches_only_the_kernel_of_its_group(nan):
    """Although blocks of other groups read its row, in x or in the gradient of y."""
    arrays = [jnp.ones((40, size)) for size in (3, 4)]
    arrays[nan] = arrays[nan].at[20].set(jnp.nan)
    _, pull_back = jax.vjp(
        lambda kernels: ops.grouped_dot(arrays[0], kernels, jnp.array([18, 10, 12])),
        jnp.ones((3, 3, 4)),
    )
    [gradient] = pull_back(arrays[1])
    assert jnp.isfinite(gradient).all(axis=(1, 2)).tolist() == [True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sequential", "associative", "definition"])
def test_factors_of_0_have_their_second_derivatives(method, x64):
    """They are those of a loop that does not treat 0 in a special way."""
    a, b, h0 = map(jnp.asarray, (draw(2, 5, 3), draw(2, 5, 3, seed=1), draw(2, 3)))
    a = a.at[0, 0].set(0).at[1, ::2].set(0)

    def loss(a, b, h0):
        return jnp.sum(jnp.sin(ops.linear_recurrence(a, b, h0, method=method)[0]))

    def plain_loss(a, b, h):
        total = 0.0
        for t in range(a.shape[1]):
            h = a[:, t] * h + b[:, t]
            total += jnp.sum(jnp.sin(h))
        return total

    found, expected = (jax.hessian(f, argnums=(0, 1, 2))(a, b, h0) for f in (loss, plain_loss))
    jax.tree.map(partial(assert_same, what="the operator and the loop"), found, expected)
