"""Compares `LRU` and `S5` with packages of other authors, outputs and gradients in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_models import LRU, S5, from_torch, to_torch
from parity_tests.engine.bounds.tolerance import assert_same

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]

FEATURES, STATES, TIME = 5, 6, 40
X = np.random.default_rng(0).standard_normal((2, TIME, FEATURES))
OUT = np.random.default_rng(1).standard_normal(X.shape)


@pytest.fixture(autouse=True)
def in_float64():
    """Runs JAX in float64, and the packages too, which make arrays of torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with jax.enable_x64(True):
        yield
    torch.set_default_dtype(before)


def randomize(module: torch.nn.Module) -> None:
    """Draws all parameters in double precision."""
    rng = np.random.default_rng(2)
    for parameter in module.parameters():
        draw = rng.standard_normal(tuple(parameter.shape)) / 2
        if parameter.is_complex():
            draw = draw + 1j * rng.standard_normal(draw.shape) / 2
        parameter.data = torch.from_numpy(np.asarray(draw))


def original_lru() -> tuple[torch.nn.Module, Any]:
    """The LRU of LRU_pytorch, whose D is a matrix, and its parameters under our keys."""
    module = pytest.importorskip("LRU_pytorch").LRU(FEATURES, FEATURES, STATES)
    randomize(module)
    module.D.data = torch.diag(module.D.data.diagonal())

    def named(value):
        B, C = value(module.B), value(module.C)
        vectors = {name: value(getattr(module, name)) for name in ("nu_log", "theta_log")}
        matrices = {"B_re": B.real, "B_im": B.imag, "C_re": C.real, "C_im": C.imag}
        return {
            **vectors,
            **matrices,
            "gamma_log": value(module.gamma_log),
            "D": value(module.D).diagonal(),
        }

    return module, named


def original_s5(monkeypatch, discretization: str, bidirectional: bool) -> tuple[Any, Any]:
    """The S5SSM of s5-pytorch, which has all eigenvalues, and its parameters under our keys."""
    package = pytest.importorskip("s5.s5_model")
    # The function of the package makes single-precision numbers.
    monkeypatch.setattr(
        package, "as_complex", lambda t, dtype=None: torch.view_as_complex(t.contiguous())
    )
    eigenvalues, vectors = torch.linalg.eig(torch.randn(STATES, STATES))
    module = package.S5SSM(
        eigenvalues,
        vectors.to(torch.complex64),
        vectors.mH.to(torch.complex64),
        *(FEATURES, STATES, 0.001, 0.1),
        discretization=discretization,
        bcInit="complex_normal",
        bidir=bidirectional,
    )
    randomize(module)

    def named(value):
        Lambda, C = value(module.Lambda), torch.view_as_real(value(module.C))
        outputs = {"C": C}
        if bidirectional:
            outputs = {"C1": C[:, :STATES], "C2": C[:, STATES:]}
        return {
            **{"Lambda_re": Lambda.real, "Lambda_im": Lambda.imag, "B": value(module.B)},
            **{"D": value(module.D), "log_step": value(module.log_step)[:, None]},
            **outputs,
        }

    return module, named


def assert_equal(module: Any, named: Any, layer: Any) -> None:
    """Asserts that outputs and all gradients are the same.

    PyTorch's gradient of a complex number has the derivatives for its parts as its own parts.
    """
    layer = from_torch(layer, {k: v.numpy() for k, v in named(torch.Tensor.detach).items()})
    x = torch.from_numpy(X).requires_grad_()
    y = torch.stack([module(row) for row in x])
    y.backward(torch.from_numpy(OUT))
    graph, params = nnx.split(layer)

    def loss(params, x):
        ours, _ = nnx.merge(graph, params)(x)
        return jnp.sum(ours * OUT), ours

    (d_params, d_x), ours = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, jnp.asarray(X))
    assert_same(ours, y.detach().numpy(), "y")
    assert_same(d_x, x.grad.numpy(), "gradient of x")
    gradients = to_torch(nnx.merge(graph, d_params))
    for key, expected in named(lambda p: p.grad.resolve_conj()).items():
        assert_same(gradients[key], expected.numpy(), f"gradient of {key}")


def test_the_lru_of_another_package():
    layer = LRU(FEATURES, STATES, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    assert_equal(*original_lru(), layer)


@pytest.mark.parametrize("bidirectional", [False, True], ids=["forward", "both directions"])
@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_the_s5_of_another_package(monkeypatch, discretization, bidirectional):
    options: dict[str, Any] = {"discretization": discretization, "bidirectional": bidirectional}
    layer = S5(
        *(FEATURES, STATES),
        conjugate_pairs=False,
        **options,
        param_dtype=jnp.float64,
        rngs=nnx.Rngs(0),
    )
    assert_equal(*original_s5(monkeypatch, **options), layer)


def test_half_of_the_conjugate_pairs_equals_all_of_them():
    """The S5SSM of the package has no option for half of the eigenvalues."""
    options: dict[str, Any] = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
    half = S5(FEATURES, STATES, **options)
    whole = S5(FEATURES, 2 * STATES, conjugate_pairs=False, **options)
    for name, sign, axis in (
        *(("Lambda_re", 1, 0), ("Lambda_im", -1, 0), ("log_step", 1, 0)),
        *(("B_re", 1, 1), ("B_im", -1, 1), ("C_re", 1, 0), ("C_im", -1, 0)),
    ):
        values = getattr(half, name)[...]
        getattr(whole, name)[...] = jnp.concatenate([values, sign * values], axis=axis)
    whole.D[...] = half.D[...]
    assert_same(half(X)[0], whole(X)[0], "y")


def test_s5_starts_with_the_eigenvalues_of_the_original():
    init = pytest.importorskip("s5.init")
    eigenvalues, *_ = init.make_DPLR_HiPPO(2 * STATES)
    layer = S5(FEATURES, STATES, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    assert_same(layer.Lambda_re[...], eigenvalues[:STATES].real, "Lambda_re")
    assert_same(layer.Lambda_im[...], eigenvalues[:STATES].imag, "Lambda_im")
