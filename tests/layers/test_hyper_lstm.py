"""The HyperLSTM beyond parity: the products inside its scan, and its initial values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.extend.core import jaxprs_in_params

import torch_ref
from jax_models import HyperLSTM, LayerNormLSTM, to_torch

SIZES = (5, 7, 4, 3)
"""The sizes of x, h, ĥ and z."""


def loop_products(layer, x) -> list[tuple[int, ...]]:
    """The contracted sizes of the matrix products inside the layer's scan."""

    def products(jaxpr, inside: bool):
        for equation in jaxpr.eqns:
            if inside and equation.primitive.name == "dot_general":
                (axes, _), _ = equation.params["dimension_numbers"]
                yield tuple(equation.invars[0].aval.shape[axis] for axis in axes)
            for inner in jaxprs_in_params(equation.params):
                yield from products(inner, inside or equation.primitive.name == "scan")

    return sorted(products(jax.make_jaxpr(lambda x: layer(x)[0])(x).jaxpr, inside=False))


def test_only_what_is_recurrent_is_in_the_scan():
    """The scan has products of h, of h with ĥ, of ĥ and of z, but none of x."""
    x = np.ones((2, 6, SIZES[0]), np.float32)
    layer = HyperLSTM(*SIZES, rngs=nnx.Rngs(0))
    assert loop_products(layer, x) == [(3,), (4,), (7,), (7 + 4,)]
    assert loop_products(LayerNormLSTM(5, 7, rngs=nnx.Rngs(0)), x) == [(7,)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_weight_can_train_from_the_start(dtype):
    x = np.random.default_rng(0).standard_normal((2, 6, 32)).astype(np.float32)
    layer = HyperLSTM(32, 16, 8, 4, num_layers=2, param_dtype=dtype, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    loss = lambda params: jnp.sum(nnx.merge(graphdef, params)(x.astype(dtype))[0] ** 2)  # noqa: E731
    gradients = to_torch(nnx.merge(graphdef, jax.jit(jax.grad(loss))(params)))
    assert all(gradient.any() for gradient in gradients.values())


def test_the_matrices_start_orthogonal_and_as_lecuns():
    weights = to_torch(HyperLSTM(400, 50, 8, 4, rngs=nnx.Rngs(0)))
    for k in range(4):
        w_h, w_x = weights[f"cells.0.w_h.{k}"], weights[f"cells.0.w_x.{k}"]
        np.testing.assert_allclose(w_h @ w_h.T, np.eye(50), atol=1e-5)
        assert w_x.std() == pytest.approx(400**-0.5, rel=0.05)
    assert np.abs(weights["cells.0.hyper.hidden_lin.weight"]).max() <= 8**-0.5
    assert np.abs(weights["cells.0.d_h.0.weight"]).max() <= 4**-0.5
    twin = torch_ref.HyperLSTM(400, 50, 8, 4, num_layers=1)
    for w_h, w_x in zip(twin.cells[0].w_h, twin.cells[0].w_x, strict=True):
        torch.testing.assert_close(w_h @ w_h.T, torch.eye(50))
        assert w_x.std().item() == pytest.approx(400**-0.5, rel=0.05)
    assert not torch_ref.HyperLSTM(*SIZES, num_layers=1, zero_init=True).cells[0].w_h[0].any()
