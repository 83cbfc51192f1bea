"""Finds a fault even if the two sides are divided into modules in different ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from faulty_pairs import Doubled
from flax import nnx

from jax_models.weights import conv, linear, same
from parity_tests import compare, record

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Scaled(torch.nn.Linear):
    """Has a scale rounded to float32 that is not in its `state_dict`."""

    def __init__(self):
        super().__init__(4, 4)
        self.bias.data.normal_(std=20)
        self.register_buffer("scale", torch.tensor(0.1), persistent=False)

    def forward(self, x):
        return super().forward(x) * self.scale


class Then(torch.nn.Linear):
    """Applies a function to its input and to what a linear layer makes of it."""

    def __init__(self, function):
        super().__init__(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(x, super().forward(x))


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(4, 2)
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)) for _ in range(2)
        )

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        return sum(shares[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Residual(torch.nn.Module):
    """Its output has the same gradient as the output of its layer."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x.tanh())


class Gain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * self.weight


class Shared(torch.nn.Module):
    """Two layers get the output of a third one."""

    def __init__(self):
        super().__init__()
        self.gain, self.a, self.b = Gain(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        x = self.gain(x)
        return self.a(x), self.b(x)


class Gained(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.gain = torch.nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x + self.gain * self.linear(x)


class Perceptron(torch.nn.Module):
    """Has its layer inside another module."""

    def __init__(self):
        super().__init__()
        self.mlp = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())

    def forward(self, x):
        return x + self.mlp(x)


class Within(torch.nn.Module):
    """Computes something before and after its only module."""

    def __init__(self, inner, before=lambda x: x, after=lambda y: y):
        super().__init__()
        self.inner, self.before, self.after = inner, before, after

    def forward(self, x):
        return self.after(self.inner(self.before(x)))


def affine(w, x, name="inner"):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def straight_through(x, y):
    """A quantised y, whose gradient goes straight through to x, and a loss."""
    return x + (y - x).detach(), ((y - x.detach()) ** 2).sum(1)


def not_straight(w, x):
    """Has the right values, but no straight-through gradient."""
    h = jnp.tanh(x)
    y = affine(w, h)
    return y, ((y - jax.lax.stop_gradient(h)) ** 2).sum(1)


def fused(w, x):
    """Multiplies the gain into the kernels, one of which is twice too large."""
    a, b = (w[f"{name}.weight"] * w["gain.weight"] for name in "ab")
    return x @ a.T + w["a.bias"], 2 * x @ b.T + w["b.bias"]


def normalized_squares(w, x):
    x = x**2
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * w["inner.weight"] + w["inner.bias"]


def losing(x):
    """Loses half of the gradient."""
    return 0.5 * x + 0.5 * jax.lax.stop_gradient(x)


def scaled_with_a_lost_gradient(w, x):
    return affine(w, 0.1 * affine(w, losing(affine(w, x, "0")), "1"), "2")


def residuals(w, x):
    x = losing(x + affine(w, jnp.tanh(x), "0.linear"))
    return x + affine(w, jnp.tanh(x), "1.linear")


def experts(w, x):
    gate = jax.nn.softmax(2 * affine(w, x, "inner.gate"))
    first, second = (
        [jnp.stack([w[f"inner.experts.{i}.{j}.{n}"] for i in range(2)]) for n in ("weight", "bias")]
        for j in range(2)
    )
    h = jnp.einsum("bi,ehi->beh", x, first[0]) + first[1]
    return jnp.einsum("beh,eoh,be->bo", h, second[0], gate) + gate @ second[1]


class Named(nnx.Module):
    """Has a linear layer with an activation, under the name of torch's Sequential."""

    def __init__(self, call):
        self.call, self.inner = call, nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.call(self, x)


class Fused(nnx.Linear):
    def __call__(self, x):
        return nnx.relu(super().__call__(x))


class Block(nnx.Module):
    """Computes the same as a module of torch, but loses a part of its gradient."""

    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return x + losing(nnx.tanh(self.linear(x)))


class Stack(nnx.Module):
    def __init__(self):
        self.block, self.out = Block(), nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.out(self.block(x))


class Ungained(nnx.Module):
    """Its gain gets no gradient, and all other weights get the right one."""

    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.gain = nnx.Param(jnp.ones(4))

    def __call__(self, x):
        return x + jax.lax.stop_gradient(self.gain[...]) * self.linear(x)


class Convolved(nnx.Module):
    """Pads before its convolution, whereas torch pads inside."""

    def __init__(self):
        self.inner = nnx.Conv(3, 3, (3,), padding="VALID", rngs=nnx.Rngs(0))

    def __call__(self, x):
        padded = jnp.pad(x.mT, ((0, 0), (1, 1), (0, 0)), mode="edge")
        return self.inner(padded).mT


def named(cls, call):
    model = Named(call)
    model.inner = cls(4, 4, rngs=nnx.Rngs(0))
    return model


LINEAR = torch.nn.Linear(4, 4)
LEAKY = torch.nn.Sequential(LINEAR, torch.nn.LeakyReLU(0.2))
PLACES = {
    "a layer that has the name of torch's Sequential": (
        lambda: Within(LEAKY, after=lambda y: 2 * y),
        lambda: named(nnx.Linear, lambda m, x: 3 * nnx.leaky_relu(m.inner(x), 0.2)),
        linear("inner", "inner.0"),
        {""},
    ),
    "an activation in JAX's layer, not in torch's": (
        lambda: Within(LINEAR, after=lambda y: 2 * y.relu()),
        lambda: named(Fused, lambda m, x: 3 * m.inner(x)),
        linear("inner", "inner"),
        {""},
    ),
    "a layer that doubles its right result": (
        Residual,
        lambda: named(Doubled, lambda m, x: x + m.inner(jnp.tanh(x))),
        linear("inner", "linear"),
        {"linear"},
    ),
    "padding before a convolution": (
        lambda: Within(torch.nn.Conv1d(3, 3, 3, padding=1)),
        Convolved,
        conv("inner", "inner"),
        {"inner"},
    ),
    "another input of a layer": (
        lambda: Within(LINEAR),
        lambda: lambda w, x: affine(w, 2 * x),
        dict,
        {""},
    ),
    "another input of a layer that float32 does not determine well": (
        lambda: Within(torch.nn.LayerNorm(4)),
        lambda: normalized_squares,
        dict,
        {""},
    ),
    "a layer that is a part of two others": (Shared, lambda: fused, dict, {None}),
    "what follows the last module": (
        lambda: Within(torch.nn.ReLU(), lambda x: x**3),
        lambda: lambda w, x: 1.01 * jax.nn.relu(x**3),
        dict,
        {""},
    ),
    "a module's loss": (
        lambda: Within(Then(lambda x, y: (y, (y**2).mean()))),
        lambda: lambda w, x: (affine(w, x), (affine(w, x) ** 2 + x).mean()),
        dict,
        {"inner"},
    ),
    "beside a constant in float32": (
        lambda: torch.nn.Sequential(Scaled(), torch.nn.GELU(), torch.nn.Linear(4, 4)),
        lambda: lambda w, x: affine(w, jax.nn.gelu(0.1 * affine(w, x, "0")), "2"),
        dict,
        {"1"},
    ),
    "a difference that torch's casts would hide": (
        lambda: Within(Then(lambda x, y: y.float().to(x.dtype)), lambda x: 2 * x),
        lambda: lambda w, x: (1 + 3e-11) * affine(w, 2 * x),
        dict,
        {"inner", ""},
    ),
    "a gradient that does not go straight through": (
        lambda: Within(Then(straight_through), torch.tanh),
        lambda: not_straight,
        dict,
        {"inner"},
    ),
    "a gradient that JAX stops": (
        lambda: Within(LEAKY),
        lambda: named(
            nnx.Linear, lambda m, x: nnx.leaky_relu(m.inner(jax.lax.stop_gradient(x)), 0.2)
        ),
        linear("inner", "inner.0"),
        {""},
    ),
    "a gradient that JAX stops behind a layer": (
        Residual,
        lambda: named(nnx.Linear, lambda m, x: x + jax.lax.stop_gradient(m.inner(jnp.tanh(x)))),
        linear("inner", "linear"),
        {""},
    ),
    "a gradient that only a weight lacks": (
        Gained,
        Ungained,
        [*linear("linear", "linear"), same("gain", "gain")],
        {""},
    ),
    "a gradient that a block loses": (
        lambda: torch.nn.Sequential(Perceptron(), LINEAR),
        Stack,
        [*linear("block.linear", "0.mlp.0"), *linear("out", "1")],
        {"0"},
    ),
    "a gradient before a constant in float32": (
        lambda: torch.nn.Sequential(LINEAR, Scaled(), torch.nn.Linear(4, 4)),
        lambda: scaled_with_a_lost_gradient,
        dict,
        {""},
    ),
    "a gradient that is lost between two blocks": (
        lambda: torch.nn.Sequential(Residual(), Residual()),
        lambda: residuals,
        dict,
        {""},
    ),
    "experts in one product": (
        lambda: Within(Experts()),
        lambda: experts,
        dict,
        {None},  # running the torch module again does not decide between the experts
    ),
}
"""The twin, its port with a fault, the weights, and the culprits that may be named."""


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_is_found_where_the_sides_are_divided_differently(place):
    twin, model, weights, culprits = PLACES[place]
    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((5, 3, 4) if "padding" in place else (5, 4))
    dtypes = ["float32" if "float32 does" in place else "float64"]
    x = 1 + 0.02 * x if dtypes == ["float32"] else x
    report = compare(twin(), model(), x, weights=weights, dtypes=dtypes, locate=True)
    assert not report.passed
    assert report.location.culprit in culprits, f"\n{report}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "culprits"),
    [
        ("another input of a layer", {None}),
        ("a layer that doubles its right result", {None}),
        ("a gradient that a block loses", {"0"}),
        ("a gradient that is lost between two blocks", {None, ""}),
    ],
)
def test_a_record_accuses_no_layer_that_gets_another_input(place, culprits, tmp_path):
    """A record cannot run the layer again on the input that JAX's gets, or the code behind it."""
    twin, model, weights, _ = PLACES[place]
    torch.manual_seed(0)
    path, x = tmp_path / "twin.safetensors", np.random.default_rng(0).standard_normal((5, 4))
    record(twin(), x, path=path, dtypes="float64")
    report = compare(path, model(), weights=weights, locate=True)
    assert not report.passed
    assert report.location.culprit in culprits, f"\n{report}"
