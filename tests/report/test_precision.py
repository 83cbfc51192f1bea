"""Errors of coarser matrix products, which round only their operands, and errors over time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from parity_tests.engine.candidates.evaluator import with_dtypes
from parity_tests.engine.candidates.jax_program import ProgramFacts
from parity_tests.registry import CASES
from parity_tests.report.over_time import STEPS, by_step, errors_over_time
from parity_tests.report.precision import BITS, RoundedProductsEvaluator, precision_errors


def with_rounded_products(bits, function):
    return with_dtypes(function, {}, ProgramFacts(), partial(RoundedProductsEvaluator, bits))


def to_bfloat16(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def product(w, x):
    return to_bfloat16(x) @ to_bfloat16(w)


def plain(w, x):
    return x @ w


def in_a_loop(product, w, x):
    y, _ = jax.lax.scan(lambda h, _: (jnp.tanh(product(w, h)), None), x, length=3)
    return jax.lax.while_loop(lambda y: jnp.sum(y**2) > 1e-3, lambda y: 0.1 * product(w, y), y)


def differentiated(product, w, x):
    """The gradient of a sum of squares, whose product rounds the cotangents, too."""
    y = product(w, x)
    return product(w.T, 2 * y)


@pytest.mark.parametrize("place", [in_a_loop, differentiated])
def test_products_are_rounded_wherever_they_are(place):
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal((4, 4)), jnp.float32) for _ in range(2))
    function = (
        (lambda w, x: jax.grad(lambda x: jnp.sum(plain(w, x) ** 2))(x))
        if place is differentiated
        else partial(place, plain)
    )
    rounded = jax.jit(with_rounded_products(BITS["bfloat16"], function))(w, x)
    np.testing.assert_array_equal(rounded, jax.jit(partial(place, product))(w, x))
    assert np.any(rounded != jax.jit(function)(w, x))


def in_a_kernel(body, x):
    return pl.pallas_call(
        lambda x, y: y.__setitem__(..., body(x[...])), out_shape=x, interpret=True
    )(x)


def test_a_kernel_is_left_as_it_is():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 8)), jnp.float32)
    rounded = with_rounded_products(BITS["bfloat16"], partial(in_a_kernel, jnp.tanh))
    np.testing.assert_array_equal(jax.jit(rounded)(x), in_a_kernel(jnp.tanh, x))
    rounded = with_rounded_products(BITS["bfloat16"], partial(in_a_kernel, lambda x: x @ x))
    with pytest.raises(NotImplementedError, match="a product in a Pallas kernel"):
        rounded(x)
    in_full = partial(jnp.matmul, x, precision="highest")
    rounded = with_rounded_products(
        BITS["bfloat16"], partial(in_a_kernel, lambda x: jnp.matmul(x, x, precision="highest"))
    )
    np.testing.assert_array_equal(jax.jit(rounded)(x), in_full(x))


def test_errors_are_those_of_the_operands():
    """About half an ulp of 2⁻⁷ or 2⁻¹⁰ is expected, and no error without a product."""
    errors = [*precision_errors("", CASES["torch.nn.LSTM, 1 layer"].problem(), "cpu")]
    assert {e.group for e in errors} == {
        "outputs",
        "final state",
        "input gradient",
        "weight gradients",
    }
    for e in errors:
        ulp = 2.0 ** -BITS[e.precision][1]
        assert e.emulated
        assert e.highest < 1e-6 < 0.05 * ulp < e.error < 2 * ulp, e
    for e in precision_errors("", CASES["CausalConv1D, kernel 2"].problem(), "cpu"):
        assert e.error < 1e-6


@pytest.mark.parametrize(
    ("case", "steps"), [("RNN U W b", STEPS), ("SelfAttentionBlock", 13), ("RNNLanguageModel", 8)]
)
def test_as_many_steps_as_the_layer_takes(case, steps):
    single, half = errors_over_time(CASES[case], "cpu")
    assert [single.dtype, half.dtype] == ["float32", "bfloat16"]
    for side in ("torch", "jax"):
        assert len(getattr(single, side)) == len(getattr(half, side)) == steps
        assert 1e-9 < max(getattr(single, side)) < 1e-6
        assert 1e-4 < max(getattr(half, side)) < 1e-1


def test_a_step_is_judged_by_its_own_size():
    oracle = np.random.default_rng(0).standard_normal((2, 3, 4)) * 10.0 ** np.arange(3)[:, None]
    y = oracle * np.array([1.001, 1.02, 1])[:, None]
    assert by_step(y, oracle) == (0.001, 0.02, 0)
