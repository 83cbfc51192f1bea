"""Calls of submodules are paired, and arrays are compared in any order of their axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from faulty_pairs import INDICES, Doubled, Parts, TorchParts, X, located
from flax import nnx

from jax_models.weights.rows import Weight
from jax_models.weights.tables import linear
from parity_tests import compare
from parity_tests.engine.locate.values import difference

pytestmark = pytest.mark.usefixtures("standard_promotion")


def twice(factor):
    return lambda m, x: m.a(factor * m.a(x[:2]))


def named_mean(m, x):
    first, rest = m.a(x=x, scale=2.0)
    return m.b(first, rest["mean"])


def mean_over(axis):
    return lambda x, scale: (scale * x, {"mean": x.mean(axis)})


def mean_and_last(x):
    return {"mean": x.mean(1), "last": x[:, -1]}


def b_of_entry(key):
    return lambda m, x: m.b(m.a(x)[key])


def b_of_a(m, x):
    return m.b(m.a(x))


DOUBLE = {"b": lambda x: 2 * x}
PARTS = {
    "integers of the caller": (
        {"call": lambda m, x, i: m.a(x, i), "a": lambda x, i: x[i]},
        {"call": lambda m, x, i: m.a(x, i[::-1]), "a": lambda x, i: x[i]},
        (X, INDICES),
        "the module itself, forward, before a",
    ),
    "a module in two places": (
        {"call": twice(1), "a": lambda x: x**3},
        {"call": twice(1.5), "a": lambda x: x**3},
        (X,),
        "the module itself, forward, after a in call 1 of 2",
    ),
    "keyword arguments and trees of results": (
        {"call": named_mean, "a": mean_over(1), "b": lambda x, y: x * torch.sigmoid(y)},
        {"call": named_mean, "a": mean_over(0), "b": lambda x, y: x * jax.nn.sigmoid(y)},
        (X[:, :3],),
        "a, forward",
    ),
    "another entry of a dict": (
        {"call": b_of_entry("mean"), "a": mean_and_last, **DOUBLE},
        {"call": b_of_entry("last"), "a": mean_and_last, **DOUBLE},
        (X,),
        "the module itself, forward, after a, before b",
    ),
    "a shape": (
        {"call": b_of_a, "a": lambda x: x[:, :3], **DOUBLE},
        {"call": b_of_a, "a": lambda x: x[:, :2], **DOUBLE},
        (X,),
        "a, forward",
    ),
    "a dtype": (
        {"call": b_of_a, "a": lambda x: x.round(), **DOUBLE},
        {"call": b_of_a, "a": lambda x: x.round().astype(jnp.float32), **DOUBLE},
        (X,),
        "a, by its dtype",
    ),
    "another structure, which is named before a dtype": (
        {"call": lambda m, x: m.a(x), "a": lambda x: x.round()},
        {"call": lambda m, x: (m.a(x), x), "a": lambda x: x.round().astype(jnp.float32)},
        (X,),
        "the module itself, by the structure of its results",
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_modules_without_weights(name):
    torch_side, jax_side, inputs, verdict = PARTS[name]
    location = located(torch_side, jax_side, *inputs)
    assert location.verdict.startswith(verdict), f"\n{location}"
    assert ("shape (3, 2), not (3, 3)" in str(location)) == (name == "a shape")


@pytest.mark.parametrize(("first", "names"), [("a", None), ("sine", {"b": "squash"})])
def test_a_module_of_another_name_is_found(first, names):
    """It is the only one between two others, or `names` says which one it is."""
    twin = TorchParts(lambda m, x: m.c(m.b(m.a(x))), a=torch.sin, b=torch.tanh, c=torch.cos)
    model = Parts(
        lambda m, x: m.c(m.squash(getattr(m, first)(x))),
        **{first: jnp.sin},
        squash=lambda x: jnp.tanh(x) * (1 + 1e-9),
        c=jnp.cos,
    )
    location = compare(twin, model, X, locate=True, names=names).location
    assert location.culprit == "b", f"\n{location}"
    assert (location.visits[-1].torch_name, location.visits[-1].jax_name) == ("b", "squash")


class ComplexPart(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x):
        return x @ self.weight


class TorchComplex(torch.nn.Module):
    """The last layer has the weight of the first one."""

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


class TorchSplit(torch.nn.Module):
    """Has one projection, which lists queries, keys and values head by head."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (2, 3, 4)).unbind(-2)
        return self.out((torch.sigmoid(q) * k.tanh() + v).flatten(-2))


class Split(nnx.Module):
    """Has a projection for each of queries, keys and values."""

    def __init__(self, fault):
        self.fault = fault
        self.q, self.v, self.out = (nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(3))
        self.k = (Doubled if fault == "keys" else nnx.Linear)(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.fault == "gradient":
            v = 2 * v - jax.lax.stop_gradient(v)
        return self.out(nnx.sigmoid(q) * jnp.tanh(k) + v)


def of_heads(joint):
    return tuple(joint.reshape(2, 3, 4, -1)[:, i].reshape(8, -1).squeeze().T for i in range(3))


def joint_of(*parts):
    return (np.stack([part.T.reshape(2, 4, -1) for part in parts], 1).reshape(24, -1).squeeze(),)


SPLIT = [
    *(
        Weight((f"q.{part}", f"k.{part}", f"v.{part}"), (f"qkv.{key}",), of_heads, joint_of)
        for part, key in (("kernel", "weight"), ("bias", "bias"))
    ),
    *linear("out", "out"),
]


@pytest.mark.parametrize(
    ("fault", "culprit", "direction"),
    [("keys", "qkv", "forward"), ("gradient", "", "backward")],
)
def test_one_projection_that_is_three_here(fault, culprit, direction):
    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((5, 8))
    location = compare(TorchSplit(), Split(fault), x, weights=SPLIT, locate=True).location
    assert location.culprit == culprit, f"\n{location}"
    assert direction in location.verdict
    assert ("qkv", "q") in [(visit.torch_name, visit.jax_name) for visit in location.visits]


class TorchCell(torch.nn.Module):
    """Keeps a part of its state, which is as large as its input."""

    def __init__(self):
        super().__init__()
        self.gate, self.new = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)

    def forward(self, x, h):
        z = torch.sigmoid(self.gate(torch.cat([x, h], -1)))
        return (1 - z) * torch.tanh(self.new(torch.cat([x, h], -1))) + z * h


class TorchSteps(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = TorchCell()

    def forward(self, x):
        h, states = torch.zeros_like(x[:, 0]), []
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            states.append(h)
        return torch.stack(states, 1)


class Cell(nnx.Module):
    """Takes its state first, and doubles the new part of it."""

    def __init__(self):
        self.gate, self.new = (nnx.Linear(8, 4, rngs=nnx.Rngs(0)) for _ in range(2))

    def __call__(self, h, x):
        z = jax.nn.sigmoid(self.gate(jnp.concatenate([x, h], -1)))
        h = (1 - z) * 2 * jnp.tanh(self.new(jnp.concatenate([x, h], -1))) + z * h
        return h, h


class Steps(nnx.Module):
    def __init__(self):
        self.cell = Cell()

    def __call__(self, x):
        _, states = jax.lax.scan(self.cell, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
        return states.swapaxes(0, 1)


def steps_of_a_cell():
    table = [*linear("cell.gate", "cell.gate"), *linear("cell.new", "cell.new")]
    return (TorchSteps(), Steps(), X3), {"weights": table}


def one_step():
    table, call = [*linear("gate", "gate"), *linear("new", "new")], lambda cell, x, h: cell(h, x)[0]
    return (TorchCell(), Cell(), *X3[:, :2].swapaxes(0, 1)), {"weights": table, "call": call}


X3 = np.random.default_rng(1).standard_normal((3, 5, 4))


@pytest.mark.parametrize(
    ("pair", "verdict"),
    [
        (steps_of_a_cell, "cell in call 1 of 5, forward, after cell.new in call 1 of 5"),
        (one_step, "the module itself, forward, after new"),
    ],
)
def test_a_cell_takes_its_state_and_its_input_in_any_order(pair, verdict):
    """The input and the state have the same shape, so only their numbers tell which is which."""
    torch.manual_seed(0)
    arguments, options = pair()
    location = compare(*arguments, **options, locate=True).location
    assert location.verdict == verdict, f"\n{location}"
    errors = location.visits[-1].input_error, location.visits[-1].output_error
    assert errors[0] < 1e-12 < errors[1], f"\n{location}"


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


@pytest.mark.parametrize("ours", [-np.inf, -800.0])
def test_masks_leave_out_the_same(ours):
    kept = X > 0
    expected = np.where(kept, 0, np.finfo(np.float32).min)
    assert difference(np.where(kept, 0, ours), expected, 1e-12).error == 0
    assert difference(kept, expected, 1e-12).error == 0
    assert difference(np.where(~kept, 0, ours), expected, 1e-12).error > 0.1
    assert difference(np.where(kept, 0, -1.0), expected, 1e-12).error > 0.1
