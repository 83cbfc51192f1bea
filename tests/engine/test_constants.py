"""Float32 constants on one side: the errors that they explain, and those that they do not."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_models.weights import transposed
from parity_tests import compare, record

pytestmark = pytest.mark.usefixtures("standard_promotion")

WIDTH, TIME = 512, 9


class Rotary(torch.nn.Module):
    """Has frequencies in float32 that are not in its `state_dict`."""

    def __init__(self):
        super().__init__()
        self.query = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        frequencies = 1 / 10000 ** (torch.arange(0, WIDTH, 2).float() / WIDTH)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x):
        angles = torch.outer(torch.arange(len(x)).to(x.dtype), self.frequencies)
        (a, b), cos, sin = self.query(x).chunk(2, -1), angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


EXPONENTS = np.arange(0, WIDTH, 2) / WIDTH
STEPS = np.arange(TIME)[:, None]
TABLES = {
    "float32": lambda: STEPS * jnp.asarray(Rotary().frequencies.numpy()),
    "frequencies": lambda: STEPS * jnp.asarray(1 / 10000**EXPONENTS),
    "traced": lambda: STEPS * (1 / 10000 ** (jnp.arange(0, WIDTH, 2) / WIDTH)),
    "angles": lambda: jnp.asarray(STEPS / 10000**EXPONENTS),
    "negative": lambda: -(STEPS * jnp.asarray(-1 / 10000**EXPONENTS)),
}


def compared(table, fault=0.0, after=lambda y: y):
    """The report, and the number of calls of the torch module."""
    calls = []

    def port(w, x):
        a, b = jnp.split(x @ w["query.weight"].T * (1 + fault), 2, -1)
        cos, sin = (f(TABLES[table]()).astype(x.dtype) for f in (jnp.cos, jnp.sin))
        return after(jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1))

    def call_twin(twin, x):
        calls.append(x)
        return twin(x)

    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((TIME, WIDTH))
    return compare(Rotary(), port, x, weights=dict, call_twin=call_twin), len(calls)


@pytest.mark.parametrize("table", TABLES)
def test_one_rerun_tells_whether_constants_explain_a_difference(table):
    report, calls = compared(table)
    assert report.passed, str(report)
    assert all(error.bound < 1e-11 for error in report.errors["float64"].values()), str(report)
    assert calls == (2 if table == "float32" else 3)
    assert table == "float32" or "torch's frequencies (256,)" in report.notes[0]


@pytest.mark.parametrize("table", ["frequencies", "traced", "negative"])
def test_constants_hide_no_small_difference(table):
    report, _ = compared(table, fault=1e-9)
    assert "float64" in {dtype for dtype, *_ in report.failures}, str(report)


def test_a_wrong_gradient_beside_constants_is_of_the_gradients_alone():
    """Moving the constants cannot explain it, because that would change the outputs."""
    report, _ = compared("frequencies", after=lambda y: 0.5 * (y + jax.lax.stop_gradient(y)))
    assert {group for _, group, _ in report.failures} == {"input gradient", "weight gradients"}
    assert {dtype for dtype, *_ in report.failures} == {"float64", "float32"}


THIRD = np.float32(1 / 3)


class Heads(torch.nn.Module):
    """A module with two outputs, of which only the second depends on a constant."""

    def __init__(self, third=None):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4, bias=False)
        self.third = None if third is None else torch.tensor(third)

    def forward(self, x):
        scaled = x / 3 if self.third is None else x * self.third
        return {"y": self.linear(x), "scaled": scaled}


def heads(w, x, third=None, factor=1.0):
    scaled = x / 3 if third is None else x * jnp.asarray(third)
    return {"y": factor * x @ w["linear.weight"].T, "scaled": scaled}


@pytest.mark.parametrize("factor", [1.0, 1 + 1e-9])
@pytest.mark.parametrize("reference", ["torch", "record", "JAX"])
@pytest.mark.parametrize("has_constant", ["reference", "model"])
def test_a_constant_excuses_only_what_depends_on_it(reference, has_constant, factor, tmp_path):
    """One side divides by 3, and the other multiplies by a third in float32."""
    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((5, 4))
    of_reference, of_model = (THIRD, None) if has_constant == "reference" else (None, THIRD)
    twin, options = Heads(of_reference), {"weights": dict}
    if reference == "JAX":
        twin = (
            partial(heads, third=of_reference),
            {"linear.weight": twin.linear.weight.detach().numpy()},
        )
    elif reference == "record":
        record(twin, x, path=tmp_path / "twin.safetensors", activations=False)
        twin, x = tmp_path / "twin.safetensors", None
    model = partial(heads, third=of_model, factor=factor)
    report = compare(twin, model, *([] if x is None else [x]), **options)
    errors = report.tensors["float64"]["outputs"]
    assert {name for name, e in errors.items() if not e.passed} == (
        {"y['y']"} if factor > 1 else set()
    ), str(report)
    assert 1e-9 < errors["y['scaled']"].jax < errors["y['scaled']"].bound < 1e-5
    assert report.passed == (factor == 1), str(report)


class ComplexHeads(nnx.Module):
    """Has a constant in float32, a complex one, and one with few digits."""

    def __init__(self, factor=1.0):
        self.kernel = nnx.Param(jnp.zeros((4, 4)))
        self.third, self.half = nnx.Variable(jnp.asarray(THIRD)), nnx.Variable(jnp.asarray(0.5))
        self.phase = nnx.Variable(jnp.asarray(np.complex64(factor * np.exp(1j))))

    def __call__(self, x):
        y = x @ self.kernel[...] * self.half[...]
        return {"y": (y * self.phase[...]).imag, "scaled": x * self.third[...]}


class TorchComplexHeads(Heads):
    def forward(self, x):
        phase = torch.tensor(np.complex64(np.exp(1j)), dtype=torch.complex64)
        return {"y": (self.linear(x) * 0.5 * phase).imag, "scaled": x / 3}


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_complex_constants_keep_their_imaginary_part(factor):
    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((5, 4))
    table = [transposed("kernel", "linear.weight")]
    report = compare(TorchComplexHeads(), ComplexHeads(factor), x, weights=table)
    assert report.passed == (factor == 1), str(report)
    assert "1 constant is in float32 (JAX's constant 0 = 0.333333343)" in str(report)
