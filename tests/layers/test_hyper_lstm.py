"""The initial values of the HyperLSTM, and the gradients that they allow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref
from jax_models import HyperLSTM, to_torch


@pytest.mark.slow
def test_every_weight_can_train_from_the_start():
    """No gradient is rounded to zero, even if parameters are in bfloat16."""
    x = np.random.default_rng(0).standard_normal((2, 6, 32)).astype(jnp.bfloat16)
    layer = HyperLSTM(32, 16, 8, 4, num_layers=2, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    loss = lambda params: jnp.sum(nnx.merge(graphdef, params)(x)[0] ** 2)  # noqa: E731
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
    assert not torch_ref.HyperLSTM(5, 7, 4, 3, num_layers=1, zero_init=True).cells[0].w_h[0].any()
