"""Gated recurrences compared with a plain loop that JAX differentiates."""

import chex
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from jax_models import ops

CELLS = {
    "rnn": (ops.rnn, ops.RNNState, 1),
    "lstm": (ops.lstm, ops.LSTMState, 4),
    "projected lstm": (ops.lstm, ops.LSTMState, 4),
    "gru": (ops.gru, ops.GRUState, 3),
}
MERGED = ("projected lstm", "gru")
"""One has a matrix product after the state, the other two biases that cannot be added."""


def one_by_one(name, x, state, weights, lengths, reset, *, reverse):
    """Computes the equations of `ops.rnn`, `lstm` and `gru` step by step."""

    def affine(a, which):
        return a @ weights[f"kernel_{which}"] + weights[f"bias_{which}"][None]

    def advance(state, x):
        h, of_x, of_h = state[0], affine(x, "ih"), affine(state[0], "hh")
        if name == "rnn":
            return (jnp.tanh(of_x + of_h),)
        if name == "gru":
            (xr, xz, xn), (hr, hz, hn) = (jnp.split(a, 3, axis=1) for a in (of_x, of_h))
            z = jax.nn.sigmoid(xz + hz)
            return ((1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h,)
        i, f, g, o = jnp.split(of_x + of_h, 4, axis=1)
        c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (affine(h, "hr") if "kernel_hr" in weights else h), c

    time = x.shape[1]
    ys = [None] * time
    for t in reversed(range(time)) if reverse else range(time):
        active = (t < lengths)[:, None]
        restart = reset[:, t]
        if reverse:
            restart = reset[:, t + 1] & (t + 1 < lengths) if t + 1 < time else restart & False
        start = [jnp.where(restart[:, None] & active, 0, s) for s in state]
        new = advance(start, x[:, t])
        state = [jnp.where(active, a, b) for a, b in zip(new, start, strict=True)]
        ys[t] = jnp.where(active, state[0], 0)
    return jnp.stack(ys, axis=1), state


def problem(name, batch, time, hidden, seed=0):
    """Functions of (weights, x, state) for the operator and the plain loop, and arguments."""
    op, state_type, gates = CELLS[name]
    rng = np.random.default_rng(seed)
    out = hidden - 2 if "projected" in name else hidden

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[0]))

    weights = {
        "kernel_ih": normal(3, gates * hidden),
        "kernel_hh": normal(out, gates * hidden),
        "bias_ih": normal(gates * hidden),
        "bias_hh": normal(gates * hidden),
    }
    if "projected" in name:
        weights |= {"kernel_hr": normal(hidden, out), "bias_hr": normal(out)}
    x = jnp.asarray(rng.standard_normal((batch, time, 3)))
    state = state_type(*(normal(batch, size) for size in (out, hidden)[: len(state_type._fields)]))
    lengths = jnp.asarray(rng.integers(0, time + 1, batch))
    reset = jnp.asarray(rng.random((batch, time)) < 0.2)
    active = (jnp.arange(time)[None] < lengths[:, None])[..., None]

    def ours(reverse):
        def call(weights, x, state):
            y, last = op(x, state, **weights, lengths=lengths, reset=reset, reverse=reverse)
            return jnp.where(active, y, 0), tuple(last)

        return call

    def plain(reverse):
        def call(weights, x, state):
            y, last = one_by_one(name, x, state, weights, lengths, reset, reverse=reverse)
            return y, tuple(last)

        return call

    return ours, plain, (weights, x, state)


def with_gradients(function):
    """The results, and the gradients of a sum of them in which no terms cancel."""

    def run(*args):
        result, pull_back = jax.vjp(function, *args)
        cotangents = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype)), result)
        cotangents = jax.tree.map(lambda c, a: c.reshape(a.shape), cotangents, result)
        return result, pull_back(cotangents)

    return jax.jit(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reverse", "size"),
    [
        *((name, reverse, (3, 6, 5)) for name in CELLS for reverse in (False, True)),
        *((name, False, size) for name in MERGED for size in ((1, 1, 5), (3, 2, 130), (1, 31, 5))),
    ],
)
def test_results_and_gradients(x64, name, reverse, size):
    ours, plain, args = problem(name, *size)
    found, expected = (with_gradients(f(reverse))(*args) for f in (ours, plain))
    chex.assert_trees_all_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", MERGED)
def test_forward_mode_and_second_derivatives(x64, name):
    ours, plain, (weights, x, state) = problem(name, batch=2, time=3, hidden=4)
    kernel = weights["kernel_hh"]
    direction = jnp.sin(jnp.arange(kernel.size, dtype=x.dtype)).reshape(kernel.shape)

    def derivatives(function):
        def loss(kernel):
            result = function({**weights, "kernel_hh": kernel}, x * kernel[0, 0], state)
            return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(result))

        def along(kernel):
            return jax.jvp(loss, (kernel,), (direction,))[1]

        def of_gradient(kernel):
            return jnp.sum(jax.grad(loss)(kernel) * direction)

        return along(kernel), jax.grad(along)(kernel), jax.grad(of_gradient)(kernel)

    found, expected = (jax.jit(lambda f=f: derivatives(f(False)))() for f in (ours, plain))
    chex.assert_trees_all_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["rnn", "lstm", "gru"])
def test_the_loops_have_one_product_each(name):
    """Gradients of kernels, biases and x are computed after the backward loop."""
    ours, _, args = problem(name, batch=3, time=6, hidden=5)
    jaxpr = jax.make_jaxpr(with_gradients(ours(False)))(*args)
    assert list(products_in_loops(jaxpr.jaxpr)) == [1, 1]


def products_in_loops(jaxpr):
    """The number of `dot_general` in the body of each scan."""
    for equation in jaxpr.eqns:
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            if equation.primitive.name == "scan":
                yield str(inner).count("dot_general[")
            else:
                yield from products_in_loops(inner)


@pytest.mark.parametrize(
    "ask",
    [
        lambda now, h: now.product("a", h) + now.product("a", h),
        lambda now, h: h,
        lambda now, h: sum(now.products(["a", "b"], h)),  # one of them has a bias
    ],
)
def test_a_step_asks_for_each_product_once(ask):
    def step(state, now):
        return ops.RNNState(ask(now, state.h))

    products = {"a": ops.Product(jnp.eye(3)), "b": ops.Product(jnp.eye(3), jnp.ones(3))}
    with pytest.raises(ValueError, match=r"^step: "):
        ops.recurrence(step, ops.RNNState(jnp.ones((2, 3))), products, jnp.ones((2, 4, 3)))
