"""What is compared with what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from faulty_pairs import INDICES, X, located
from flax import nnx

from parity_tests import compare
from parity_tests.engine.locate.agree import difference

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_an_integer_input_that_departs_is_of_the_caller():
    location = located(
        {"call": lambda m, x, i: m.a(x, i), "a": lambda x, i: x[i]},
        {"call": lambda m, x, i: m.a(x, i[::-1]), "a": lambda x, i: x[i]},
        X,
        INDICES,
    )
    assert location.culprit == ""
    assert location.verdict.endswith("before a")


def test_a_module_in_two_places_is_compared_place_by_place():
    def twice(factor):
        return lambda m, x: m.a(factor * m.a(x[:2]))

    parts = {"a": lambda x: x**3}
    location = located({"call": twice(1), **parts}, {"call": twice(1.5), **parts}, X)
    assert location.culprit == ""


def test_keyword_arguments_and_trees_of_results():
    def call(m, x):
        first, rest = m.a(x=x, scale=2.0)
        return m.b(first, rest["mean"])

    location = located(
        {"call": call, "a": lambda x, scale: (scale * x, {"mean": x.mean(1)}), "b": torch_gate},
        {"call": call, "a": lambda x, scale: (scale * x, {"mean": x.mean(0)}), "b": gate},
        X[:, :3],
    )
    assert location.culprit == "a"


class ComplexPart(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x):
        return x @ self.weight


class TorchComplex(torch.nn.Module):
    """The last has the first one's weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (ComplexPart() for _ in range(3))
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(self.a(x.to(self.a.weight.dtype)))).real


class Product(nnx.Module):
    def __init__(self, weight):
        self.weight = nnx.Param(jnp.asarray(weight.detach()))

    def __call__(self, x, factor=1.0):
        return factor * x @ self.weight[...]


class ComplexProducts(nnx.Module):
    def __init__(self, twin):
        self.last, self.first, self.middle = (Product(m.weight) for m in (twin.c, twin.a, twin.b))

    def __call__(self, x):
        return self.last(self.middle(self.first(x), 1.5)).real


def test_complex_weights_tell_which_module_is_which():
    torch.manual_seed(0)
    twin = TorchComplex()
    location = compare(twin, ComplexProducts(twin), X, locate=True).location
    assert location.culprit == "b", f"\n{location}"
    compared = [(visit.torch_name, visit.jax_name) for visit in location.visits]
    assert compared == [("a", "first"), ("b", "middle")]


def torch_gate(x, gate):
    return x * torch.sigmoid(gate)


def gate(x, gate):
    return x * jax.nn.sigmoid(gate)


@pytest.mark.parametrize(
    ("actual", "layout"),
    [
        (X, ""),
        (X[None], ""),
        (X.T, "axes (1, 0)"),
        (X.reshape(-1), "reshaped"),
    ],
)
def test_layouts(actual, layout):
    found = difference(actual, X, 1e-12)
    assert (found.error, found.layout) == (0, layout)


def test_a_square_matrix_is_compared_as_it_is_first():
    square = X[:, :3]
    assert difference(square + 1, square, 1e-12).layout == ""


@pytest.mark.parametrize("ours", [-np.inf, -1e9, np.finfo(np.float64).min])
def test_masks_leave_out_the_same(ours):
    kept = X > 0
    expected = np.where(kept, 0, np.finfo(np.float32).min)
    assert difference(np.where(kept, 0, ours), expected, 1e-12).error == 0
    assert difference(kept, expected, 1e-12).error == 0
    assert difference(np.where(~kept, 0, ours), expected, 1e-12).error > 0.1
    assert difference(np.where(kept, 0, -1.0), expected, 1e-12).error > 0.1
