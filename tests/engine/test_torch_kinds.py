"""All kinds of torch modules are compared with functions, and all forms of inputs and results."""

import collections
import dataclasses
import math
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from faulty_pairs import affine
from flax import nnx
from torch import nn

from jax_models.weights import Weight, same
from parity_tests import compare

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning"),
]


def rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


def compared(port, *inputs, twin=None, **options):
    """Compares a port of a linear layer, or of `twin`."""
    return compare(twin or nn.Linear(4, 4), port, *(inputs or [SQUARE]), weights=dict, **options)


class InPlace(nn.Linear):
    def forward(self, x):
        x.mul_(2)
        x += 1
        return super().forward(x)


class Held(nn.Linear):
    """Has tensors as attributes, one of them in a list."""

    def __init__(self):
        super().__init__(4, 4)
        self.scale, self.shifts = torch.tensor([0.1, 0.2, 0.3, 0.4]), [torch.ones(4) / 3]

    def forward(self, x):
        return super().forward(x * self.scale) @ torch.diag(self.shifts[0])


class Masked(nn.Linear):
    """Creates its mask without a dtype."""

    def forward(self, x):
        mask = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)
        return torch.softmax(super().forward(x) + mask, -1) @ x


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4)


class Permuted(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4, padding_idx=0)
        self.register_buffer("order", torch.randperm(9))

    def forward(self, tokens):
        return self.table(self.order[tokens])


class Sinusoid(nn.Linear):
    """Has positions in its `state_dict`, which a port computes instead."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("positions", torch.sin(torch.arange(28.0).view(7, 4) / 10))

    def forward(self, x):
        return super().forward(x + self.positions[: len(x)])


def masked(w, x, largest=-3e38):
    scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), affine(w, x), largest)
    return jax.nn.softmax(scores, -1) @ x


def looked_up(w, tokens, shift=0):
    return w["table.weight"][w["order"][tokens + shift]]


def normed(w, x, axis=1):
    v = w["weight_v"]
    return x @ (v * w["weight_g"] / jnp.sqrt((v**2).sum(axis, keepdims=True))).T + w["bias"]


TOKENS = np.random.default_rng(0).integers(0, 8, (2, 5))
SQUARE = rows(4, 4)
SEQUENCE = (nn.Linear(4, 4), nn.SiLU())

KINDS = {
    "script": (
        lambda: torch.jit.script(nn.Sequential(*SEQUENCE)),
        lambda w, x, act=jax.nn.silu: act(affine(w, x, "0.")),
        {"act": jax.nn.gelu},
    ),
    "compile": (
        lambda: torch.compile(nn.Sequential(*SEQUENCE)),
        lambda w, x, act=jax.nn.silu: act(affine(w, x, "_orig_mod.0.")),
        {"act": jax.nn.gelu},
    ),
    "in-place operations on inputs": (
        lambda: InPlace(4, 4),
        lambda w, x, shift=1: affine(w, 2 * x + shift),
        {"shift": 2},
    ),
    "tensors that are no buffers": (
        Held,
        lambda w, x, last=0.4: affine(w, x * jnp.array([0.1, 0.2, 0.3, last])) / 3,
        {"last": 0.41},
    ),
    "a mask without a dtype": (lambda: Masked(4, 4), masked, {"largest": -1.0}),
    "an integer buffer": (Permuted, looked_up, {"shift": 1}),
    "a weight norm of old": (
        lambda: torch.nn.utils.weight_norm(nn.Linear(4, 3)),
        normed,
        {"axis": 0},
    ),
    "a buffer that the port computes": (
        Sinusoid,
        lambda w, x, scale=10: affine(
            {key: w[key] for key in ("weight", "bias")},
            x + np.sin(np.arange(16.0).reshape(4, 4) / scale).astype(np.float32),
        ),
        {"scale": 10.001},
    ),
}


def loaded(weights):
    """Loads all weights except the positions, which the port computes."""
    return {key: jnp.asarray(weights[key]) for key in weights if key != "positions"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("faulty", [False, True])
def test_torch_modules_of_every_kind(kind, faulty):
    build, port, fault = KINDS[kind]
    x = TOKENS if build is Permuted else SQUARE
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin = build()
    options = fault if faulty else {}
    report = compare(twin, lambda w, x: port(w, x, **options), x, weights=loaded)
    assert report.passed != faulty, f"\n{report}"


@dataclasses.dataclass
class Data:
    mean: object
    variance: object


class Named(NamedTuple):
    variance: object
    mean: object


FORMS = {
    "dict": lambda mean, variance: {"variance": variance, "mean": mean},
    "OrderedDict": lambda mean, variance: collections.OrderedDict(mean=mean, variance=variance),
    "dataclass": Data,
    "NamedTuple": lambda mean, variance: Named(variance, mean),
    "tuple": lambda mean, variance: (mean, variance),
    "list": lambda mean, variance: [mean, variance],
}


@pytest.mark.parametrize("ours", FORMS)
@pytest.mark.parametrize("swapped", [False, True])
def test_results_of_every_form(ours, swapped):
    """Results are matched by name if both sides have names, and otherwise in order."""

    def port(w, x):
        y = affine(w, x)
        return FORMS[ours](*((2 * y, y) if swapped else (y, 2 * y)))

    report = compared(port, call_twin=lambda twin, x: Data(twin(x), 2 * twin(x)), dtypes="float64")
    assert report.passed != swapped, f"\n{report}"


class Flagged(nn.Linear):
    def forward(self, batch, double, *, mode=None, power=1):
        x = batch["x"] * batch["mask"]
        if double:
            x = 2 * x
        return {"y": super().forward(x) ** (power if mode == "power" else 1), "none": None}


@pytest.mark.parametrize("power", [2, 3])
def test_flags_and_arguments_by_name(power):
    def port(w, batch, double, *, mode, power):
        x = batch["x"] * batch["mask"]
        if double:
            x = 2 * x
        return {"y": affine(w, x) ** (2 if mode == "power" else 1), "none": None}

    kwargs = {"mode": "power", "power": power}
    batch = {"x": SQUARE, "mask": SQUARE > 0}
    report = compared(port, batch, True, twin=Flagged(4, 4), kwargs=kwargs)
    assert report.passed == (power == 2), f"\n{report}"


def test_without_a_gradient_there_is_none_to_compare():
    report = compared(affine, call_twin=torch.no_grad()(lambda twin, x: twin(x)))
    assert report.passed, f"\n{report}"
    assert any(note.startswith("gradients are not compared") for note in report.notes)


def test_a_parameter_of_zeros_that_is_not_ported():
    """The outputs would be equal until the parameter is trained."""
    twin = nn.Linear(4, 4)
    nn.init.zeros_(twin.bias)
    load = {"weights": lambda weights: weights["weight"]}
    report = compare(twin, lambda kernel, x: x @ kernel.T, SQUARE, **load)
    assert report.faults == ("weights: the loader does not read bias",)
    unused = compare(
        twin, lambda kernel, x: x @ kernel.T, SQUARE, call_twin=lambda t, x: x @ t.weight.T, **load
    )
    assert unused.passed, f"\n{unused}"


def test_equal_infinities_are_equal():
    def logits(scale):
        def of(w, x, mask):
            return jnp.where(mask, scale * affine(w, x), -jnp.inf)

        call_twin = lambda twin, x, mask: twin(x).masked_fill(~mask, -math.inf)  # noqa: E731
        return compared(of, SQUARE, SQUARE > 0, call_twin=call_twin)

    assert logits(1.0).passed
    assert not logits(1 + 1e-9).passed


def test_random_sides_are_said_to_be():
    twin = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    call_twin = lambda twin, x: twin.train()(x)  # noqa: E731
    report = compared(lambda w, x: affine(w, x, "0."), twin=twin, call_twin=call_twin)
    assert report.faults[0].startswith("torch: the results are random, by ")

    def dropped(w, x):
        return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), affine(w, x), 0)

    report = compared(dropped)
    assert not report.passed
    assert any(n.startswith("JAX draws random numbers") and __file__ in n for n in report.notes)


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_call_runs_a_function_beside_a_module_without_weights(factor):
    call = lambda function, x: factor * function(x)  # noqa: E731
    report = compare(nn.Tanh(), jnp.tanh, SQUARE, call=call)
    assert report.passed == (factor == 1), f"\n{report}"


def rearranged_by_numpy(param, key):
    return Weight(
        (param,),
        (key,),
        lambda a: (np.flip(np.ascontiguousarray(a.T), 0),),
        lambda a: (np.ascontiguousarray(np.flip(a, 0)).T,),
    )


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_gradients_go_through_a_row_that_only_numpy_can_run(factor):
    """NumPy cannot run on traced arrays, but the row only moves numbers."""
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def call(model, x):
        y = model(x[:, ::-1])
        return y + (factor - 1) * (y - jax.lax.stop_gradient(y))

    table = [rearranged_by_numpy("kernel", "weight"), same("bias", "bias")]
    report = compare(nn.Linear(4, 4), model, SQUARE, weights=table, call=call)
    assert report.passed == (factor == 1), f"\n{report}"
    assert "weight gradients" in report.errors["float64"]


class SpectralPort(nnx.Module):
    def __init__(self):
        self.filter = nnx.Param(jnp.ones(3, jnp.complex64))

    def __call__(self, x):
        return jnp.fft.irfft(jnp.fft.rfft(x) * self.filter[...], n=4)


def test_complex_weights_go_through_a_table():
    report = compare(Spectral(), SpectralPort(), SQUARE, weights=[same("filter", "filter")])
    assert report.passed, f"\n{report}"
    assert "weight gradients" in report.errors["float64"]
