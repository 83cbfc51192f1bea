"""Casts are kept in float32 and ignored in float64, wherever they are."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from faulty_pairs import affine
from flax import nnx
from jax import lax

from jax_models.weights import embedding
from parity_tests import compare
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.problem import Problem
from parity_tests.engine.results import Results

pytestmark = pytest.mark.usefixtures("standard_promotion")


def in_a_scan(x):
    last, _ = lax.scan(lambda h, _: (jnp.tanh(h), None), x.astype(jnp.float32), length=3)
    return last


def in_a_while(x):
    return lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h), x.astype(jnp.float32))


def in_a_branch(x):
    x = x.astype(jnp.float32)
    return three(lax.cond(x.sum() > 100, lambda x: 2 * x, lambda x: x, x))


def three(x):
    return jnp.tanh(jnp.tanh(jnp.tanh(x)))


@jax.custom_vjp
def by_rule(x):
    return three(x.astype(jnp.float32)).astype(x.dtype)


def rule(residual, gradient):
    _, pullback = jax.vjp(three, residual)
    return (pullback(gradient.astype(jnp.float32))[0].astype(gradient.dtype),)


by_rule.defvjp(lambda x: (by_rule(x), x.astype(jnp.float32)), rule)


@jax.custom_jvp
def by_tangent(x):
    return three(x.astype(jnp.float32)).astype(x.dtype)


@by_tangent.defjvp
def _(primals, tangents):
    return by_tangent(*primals), jax.jvp(three, primals, tangents)[1]


def scattered(x):
    return jnp.zeros(x.shape, jnp.float32).at[jnp.arange(len(x))].add(three(x).astype(jnp.float32))


PLACES = {
    "scan": in_a_scan,
    "while": in_a_while,
    "cond": in_a_branch,
    "custom_vjp": by_rule,
    "custom_jvp": by_tangent,
    "jit": jax.jit(lambda x: three(x.astype(jnp.float32))),
    "remat": jax.checkpoint(lambda x: three(x.astype(jnp.float32))),
    "scatter": scattered,
}


def compared(port, call_twin=None, **options):
    """Compares a port of a linear layer, followed by another computation."""
    x = np.random.default_rng(0).standard_normal((5, 4))
    twin = torch.nn.Linear(4, 4)
    return compare(twin, port, x, weights=dict, call_twin=call_twin, **options)


def of_torch(twin, x):
    return torch.tanh(torch.tanh(torch.tanh(twin(x))))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.slow), 1 + 1e-10])
def test_a_fault_below_float32_is_seen_beside_casts(place, scale):
    def port(w, x):
        return PLACES[place](scale * affine(w, x)).astype(x.dtype)

    report = compared(port, of_torch)
    assert report.passed == (scale == 1), f"\n{report}"
    notes = [note for note in report.notes if note.startswith("JAX casts to less than float64")]
    assert __file__ in notes[0]


def test_a_cast_of_what_is_constant_is_no_news():
    def port(w, x):
        y = affine(w, x)
        return y * jnp.arange(4, dtype=jnp.float32).astype(y.dtype) + jnp.zeros(4, jnp.float32)

    report = compared(port, lambda twin, x: twin(x) * torch.arange(4))
    assert report.passed, f"\n{report}"
    assert not report.notes


def test_what_only_x64_makes_exact_is_seen_in_float32():
    """NumPy's float64 scalars and jnp.zeros promote under x64, which users do not enable."""

    def cancelling(w, x):
        x = x * np.sqrt(4.0) / 2 + jnp.zeros(64)
        mean = x.mean(-1, keepdims=True)
        variance = (x * x).mean(-1, keepdims=True) - mean * mean
        return (x - mean) / jnp.sqrt(variance + 1e-5) * w["weight"] + w["bias"]

    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 64)) + 30
    report = compare(torch.nn.LayerNorm(64), cancelling, x, weights=dict)
    assert report.errors["float64"]["outputs"].passed, f"\n{report}"
    assert report.errors["float32"]["outputs"].share > 2


@pytest.mark.parametrize("twin_too", [False, True])
def test_a_result_in_another_dtype_is_a_fault_unless_it_is_torchs(twin_too):
    report = compared(
        lambda w, x: affine(w, x).astype(jnp.float32),
        lambda twin, x: twin(x).float() if twin_too else twin(x),
        dtypes=("float64", "float32", "bfloat16"),
    )
    assert report.passed == twin_too, f"\n{report}"
    if not twin_too:
        asked = ("float64", "bfloat16")
        expected = [f"outputs, y: JAX computes in float32 where {d} was asked for" for d in asked]
        assert [*report.faults] == expected


def test_a_cast_to_less_than_torchs_is_no_excuse():
    def port(w, x):
        return jax.nn.softmax(affine(w, x).astype(jnp.bfloat16), -1).astype(x.dtype)

    def call_twin(twin, x):
        return torch.softmax(twin(x), -1, dtype=torch.float32).to(x.dtype)

    report = compared(port, call_twin)
    assert {failure[0] for failure in report.failures} == {"float64", "float32"}


class Tied(nnx.Module):
    """`nnx.Embed` computes in float32 whatever its weights are, and so do all later layers."""

    def __init__(self):
        self.embed = nnx.Embed(7, 4, rngs=nnx.Rngs(0))

    def __call__(self, tokens):
        h = self.embed(tokens)
        return self.embed.attend(h * SCALES.astype(h.dtype))


SCALES = np.array([0.5, 1.5, 2.0, 3.0])


def test_what_follows_a_layer_in_float32_has_its_dtype():
    def call_twin(twin, tokens):
        h = twin(tokens)
        return h * torch.from_numpy(SCALES).to(h) @ twin.weight.T

    tokens = np.random.default_rng(0).integers(0, 7, (2, 5))
    table = embedding("embed", "")
    report = compare(torch.nn.Embedding(7, 4), Tied(), tokens, weights=table, call_twin=call_twin)
    assert report.passed, f"\n{report}"
    (note,) = (note for note in report.notes if note.startswith("JAX casts"))
    assert "flax" in note
    assert "jax_side" not in note


def test_what_stays_in_less_is_said():
    """A solver computes in the dtype that it was traced for, so its bound is that of float32."""

    def port(w, x):
        matrix = (jnp.eye(4) + 0.1 * w["weight"]).astype(jnp.float32)
        return jnp.linalg.solve(matrix, affine(w, x).T.astype(jnp.float32)).T.astype(x.dtype)

    def call_twin(twin, x):
        return torch.linalg.solve(torch.eye(4).to(x.dtype) + 0.1 * twin.weight, twin(x).T).T

    report = compared(port, call_twin)
    assert report.passed, f"\n{report}"
    assert any("JAX computes in less than float64" in note for note in report.notes)


NUMBERS = {
    "rounded by NumPy": (lambda: float(ml_dtypes.bfloat16(5**0.5)), True),
    "rounded where it is used": (lambda: jnp.asarray(5**0.5).astype(jnp.bfloat16), True),
    "not rounded": (lambda: 5**0.5, False),
}


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("casts", [False, True])
def test_a_number_that_torch_rounds_to_bfloat16_is_another_number(number, casts):
    """Gemma rounds √features like this. Both sides may cast their arrays, too."""
    factor, is_equal = NUMBERS[number]

    def port(w, x):
        y = affine(w, x).astype(jnp.bfloat16) if casts else affine(w, x)
        return (y.astype(x.dtype) * factor()).astype(x.dtype)

    def call_twin(twin, x):
        y = twin(x).to(torch.bfloat16) if casts else twin(x)
        return y.to(x.dtype) * torch.tensor(5**0.5).type(torch.bfloat16)

    report = compared(port, call_twin)
    assert report.passed == is_equal, f"\n{report}"
    if casts:
        for side in ("torch", "JAX"):
            assert any(note.startswith(f"{side} casts to less than") for note in report.notes)


def test_findings_are_those_of_the_program_that_ran():
    """Another shape is another program."""

    def call(_, x):
        return x.astype(jnp.float32).astype(x.dtype) if len(x) > 4 else x

    def problem(size):
        build = lambda state_dict, dtype: ({}, None)  # noqa: E731
        return Problem(torch.nn.Identity(), build, call, to_torch=None, inputs=(np.ones(size),))

    side = JaxSide(problem(4))
    for size in (4, 5, 4):
        side.run(problem(size), "float64", Results({"outputs": {"y": np.ones(size)}}))
        assert len(side.facts["float64"].casts) == (size > 4)
