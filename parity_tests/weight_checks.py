"""The checks of weights: loading, exporting and training."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx
from jax.flatten_util import ravel_pytree

from jax_models import from_torch, project, to_torch
from parity_tests.checked_layer import CheckedLayer
from parity_tests.engine.bounds.tolerance import assert_same


def weights_make_the_round_trip_bit_for_bit(checked: CheckedLayer):
    """Weights that are loaded from PyTorch and written back have the same bits."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        twin = checked.case.twin().to(dtype)
        with torch.no_grad():
            for tensor in checked.case.drawn(twin):
                tensor.normal_()
            for tensor in checked.case.bounded(twin):
                tensor.uniform_()  # a number out of bounds is refused
        name = str(dtype).removeprefix("torch.")
        layer = from_torch(checked.case.abstract(jnp.dtype(name)), twin.state_dict())
        back = to_torch(layer, checked.case.layout)
        assert back.keys() == twin.state_dict().keys()
        for key, tensor in twin.state_dict().items():
            assert back[key].dtype.name == str(tensor.dtype).removeprefix("torch."), key
            bits = tensor.reshape(-1).view(torch.uint8).numpy()
            assert back[key].tobytes() == bits.tobytes(), key
        again = from_torch(checked.case.abstract(jnp.dtype(name)), back, checked.case.layout)
        for a, b in zip(
            jax.tree.leaves(nnx.state(layer)), jax.tree.leaves(nnx.state(again)), strict=True
        ):
            assert a.dtype == b.dtype
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def optimizer_follows_the_same_trajectory(checked: CheckedLayer):
    """Ten steps of AdamW give the same weights in optax and in torch.optim.

    The targets are random. AdamW's epsilon is larger than rounding errors. Otherwise a gradient
    that consists of rounding errors alone, such as that of attention's key bias, would decide the
    direction of a step.
    """
    # Both sides start from the same weights. In JAX, the parameters are a flat vector.
    case, twin = checked.case, checked.case.build_twin()
    x = torch.tensor(checked.x)
    target = np.random.default_rng(5).standard_normal(case.call(twin, x)[0].shape)
    graphdef, tree, rest = nnx.split(checked.layer, nnx.Param, ...)
    params, unravel = ravel_pytree(tree)
    optimizer = optax.adamw(1e-2, 0.9, 0.999, eps=1e-5, weight_decay=0.01)

    @jax.jit
    def jax_step(params, optimizer_state):
        def loss_fn(params):
            y, _ = nnx.merge(graphdef, unravel(params), rest)(checked.x)
            return jnp.mean((y - target) ** 2)

        loss, gradient = jax.value_and_grad(loss_fn)(params)
        with jax.numpy_dtype_promotion("standard"):  # optax does not work under "strict"
            updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
            stepped: Any = optax.apply_updates(params, updates)
        return ravel_pytree(project(unravel(stepped)))[0], optimizer_state, loss

    # Take the same steps on both sides. After each step, bounded parameters are clipped.
    torch_optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.01, eps=1e-5)
    optimizer_state = optimizer.init(params)
    for step in range(10):
        torch_optimizer.zero_grad()
        torch_loss = ((case.call(twin, x)[0] - torch.tensor(target)) ** 2).mean()
        torch_loss.backward()
        torch_optimizer.step()
        for parameter in case.bounded(twin):
            parameter.clamp_(0, 1)
        params, optimizer_state, loss = jax_step(params, optimizer_state)
        assert_same(loss, torch_loss.item(), f"loss of step {step}")
    weights = to_torch(nnx.merge(graphdef, unravel(params), rest), case.layout)
    for key, tensor in twin.state_dict().items():
        assert_same(weights[key], tensor.numpy(), key)
