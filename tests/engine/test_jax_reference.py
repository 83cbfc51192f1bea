"""`compare` of two JAX models, the first of which is the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax import lax

from jax_models.weights import same, transposed
from parity_tests import compare, record
from parity_tests.engine.references.jax_reference import JaxReference
from parity_tests.engine.references.open_reference import open_reference

pytestmark = pytest.mark.usefixtures("standard_promotion")

X = np.random.default_rng(0).standard_normal((2, 5, 4))


class MLP(nnx.Module):
    def __init__(self, factor=1.0, seed=0, dtype=None):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)
        self.factor, self.dtype = factor, dtype

    def __call__(self, x, *, scale=1.0):
        h = jnp.tanh(self.norm(self.first(scale * x)))
        h = h if self.dtype is None else h.astype(self.dtype).astype(x.dtype)
        return self.last(self.factor * h), h.sum(-1)


class Layer(nnx.Module):
    """A linear layer with a transposed kernel and other names."""

    def __init__(self, factor=1.0):
        self.inner, self.shift = nnx.Param(jnp.zeros((3, 4))), nnx.Param(jnp.zeros(3))
        self.factor = factor

    def __call__(self, x):
        return self.factor * jnp.einsum("oi,bti->bto", self.inner[...], x) + self.shift[...]


TABLE = [transposed("inner", "kernel"), same("shift", "bias")]


def nnx_pair(factor):
    return nnx.Linear(4, 3, rngs=nnx.Rngs(0)), Layer(factor), {"weights": TABLE}


def checkpoints(factor):
    """Further calls show whether the initial statistics of its BatchNorm matter to a record."""
    return MLP(), MLP(factor), {"kwargs": {"scale": 0.5}}


def equinox_pair(factor):
    equinox = pytest.importorskip("equinox")
    one = equinox.nn.Linear(4, 3, key=jax.random.key(0))
    return one, one, {"call": lambda m, x: factor * jax.vmap(jax.vmap(m))(x), "call_twin": mapped}


def mapped(model, x):
    return jax.vmap(jax.vmap(model))(x)


def function_pair(factor):
    weights = {"w": np.random.default_rng(1).standard_normal((4, 3))}
    return (lambda w, x: x @ w["w"], weights), (lambda w, x: factor * x @ w["w"], weights), {}


def loader_pair(factor):
    weights = {"w": np.random.default_rng(1).standard_normal((4, 3))}
    model = lambda w, x: factor * (w @ x.mT).mT  # noqa: E731
    return (lambda w, x: x @ w["w"], weights), model, {"weights": lambda arrays: arrays["w"].T}


def without_weights(factor):
    return jnp.sin, lambda x: factor * jnp.cos(x - jnp.pi / 2), {}


PAIRS = [nnx_pair, checkpoints, equinox_pair, function_pair, loader_pair, without_weights]


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_models_of_all_kinds_are_references(pair, tmp_path):
    """A model is compared at once, or recorded on one commit and compared on another."""
    path = tmp_path / "model.safetensors"
    model, wrong, options = pair(1 + 1e-10)
    of_record = {key: value for key, value in options.items() if key in ("call_twin", "kwargs")}
    record(model, X, path=path, activations=False, **of_record)
    rest = {key: value for key, value in options.items() if key not in of_record}
    live, recorded = compare(model, wrong, X, **options), compare(path, wrong, **rest)
    assert not live.passed
    assert (recorded.passed, recorded.faults) == (live.passed, live.faults)
    assert errors_of(recorded) == pytest.approx(errors_of(live), rel=1e-6)
    groups = {"outputs", "input gradient"}
    groups |= {"weight gradients"} if pair is not without_weights else set()
    assert groups <= {*live.errors["float64"]}, str(live)
    assert str(live).split()[:2] == ["reference", "model"]
    _, right, options = pair(1)
    report = compare(model, right, X, dtypes="float64", **options)
    assert report.passed, str(report)


def errors_of(report) -> dict[tuple, float]:
    return {
        (dtype, group, name, side): getattr(error, side)
        for dtype, groups in report.tensors.items()
        for group, named in groups.items()
        for name, error in named.items()
        for side in ("jax", "bound")
    }


def test_another_checkpoint_is_told_by_its_weights():
    rounded = MLP()
    kernel = rounded.first.kernel
    kernel[...] = kernel[...].astype(jnp.bfloat16).astype(jnp.float32)
    report = compare(MLP(), rounded, X)
    assert not report.passed
    assert [note for note in report.notes if note.startswith("1 of 8 weights differ, first.kernel")]
    names = [*JaxReference(MLP()).weights.arrays]
    assert compare(MLP(), rounded, X, weights=[same(name, name) for name in names]).passed


def test_weights_of_other_names_are_not_compared():
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    other = Layer()
    other.inner[...], other.shift[...] = model.kernel[...].T, model.bias[...]
    report = compare(model, other, X)
    assert "weight gradients" not in report.errors["float64"]
    assert report.passed, str(report)
    assert any("other names" in note for note in report.notes)


def test_casts_of_the_reference_are_left_out_and_listed():
    report = compare(MLP(dtype=jnp.float32), MLP(), X)
    assert report.passed, str(report)
    assert report.errors["float64"]["outputs"].jax < 1e-14
    note = next(note for note in report.notes if note.startswith("reference casts to less"))
    assert __file__ in note
    coarse = compare(MLP(), MLP(dtype=jnp.bfloat16), X)
    assert not coarse.passed
    assert coarse.errors["float32"]["outputs"].jax > 1e-4


def test_shapes_and_dtypes_of_two_models_are_compared():
    faults = compare(MLP(), MLP(), X, call=lambda m, x: (m(x)[0].mT, m(x)[1])).faults
    assert "shape (2, 5, 3) in reference, (2, 3, 5) in model" in faults[0]
    report = compare(jnp.sin, lambda x: jnp.sin(x) * jnp.nan, X)
    assert not report.passed
    report = compare(lambda x: x / 0.0 * 0.0, jnp.sin, X)
    assert "numbers of the float64 reference side are not finite" in report.faults[0]


def jax_mlp(w, x):
    h = jnp.tanh(x @ w["0.weight"].T + w["0.bias"])
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)
    return (h * w["2.weight"] + w["2.bias"]) @ w["3.weight"].T + w["3.bias"]


def scatters(side, x, dtypes):
    """How far random rounding to each dtype moves the results of a side."""
    with open_reference(side) as reference:
        problem = reference.make_problem((x,))
        reference.run(problem)
        return [reference.runs.scatter(dtype) for dtype in dtypes]


@pytest.mark.slow
def test_rounding_scatters_as_on_the_torch_side():
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)
    twin = torch.nn.Sequential(*layers)
    weights = {key: value.numpy() for key, value in twin.state_dict().items()}
    dtypes = ("float64", "float32", "bfloat16")
    sides = [scatters(side, X, dtypes) for side in (twin, (jax_mlp, weights))]
    for dtype, torchs, jaxs in zip(dtypes, *sides, strict=True):
        assert torchs.keys() == jaxs.keys()
        for group, named in torchs.items():
            for name, scatter in named.items():
                assert scatter / 3 <= jaxs[group][name] <= 3 * scatter, (dtype, group, name)


def in_a_scan(x):
    return lax.scan(lambda h, _: (jnp.sin(h), h.sum()), x, None, length=3)


def in_a_while(x):
    return lax.fori_loop(0, 3, lambda _, h: jnp.sin(h), x)


def in_a_branch(x):
    return lax.cond(x.sum() > -99, jnp.sin, lambda x: 2 * x, jnp.sin(x))


def picked(x):
    """Numbers, some of them close to each other, determine the order and the place."""
    x = jnp.concatenate([x, x * (1 + 1e-10)])
    order = jnp.argsort(jnp.sin(x).ravel())
    return jnp.where(x > 0, jnp.sin(x), x).ravel()[order], jnp.sin(x).argmax()


PLACES = {
    "scan": in_a_scan,
    "while": in_a_while,
    "cond": in_a_branch,
    "jit": jax.jit(jnp.sin),
    "remat": jax.checkpoint(jnp.sin),
    "complex": lambda x: jnp.fft.fft(jnp.sin(x) + 1j * x),
    "picked": picked,
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_rounding_reaches_all_bodies_and_decides_nothing(place):
    (scatter,) = scatters(PLACES[place], X[0], ["float64"])
    ulp = float(jnp.finfo("float64").eps)
    for group in ("outputs", "input gradient"):
        for name, error in scatter.get(group, {}).items():
            assert 0.2 * ulp < error < 40 * ulp, (group, name, error)


@pytest.mark.skipif(jax.default_backend() == "cpu", reason="this machine has a CPU alone")
@pytest.mark.parametrize("precision", ["highest", "default"])
def test_a_platform_is_compared_with_the_cpu(precision):
    platform = jax.default_backend()
    report = compare(MLP(), MLP(), X, platform=platform, precision=precision, dtypes="float32")
    assert report.passed == (precision == "highest"), str(report)
