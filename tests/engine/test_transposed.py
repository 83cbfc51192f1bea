"""Square kernels that were loaded without transposing them are named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from jax_models.weights import flipped, same, transposed
from parity_tests import compare

pytestmark = pytest.mark.usefixtures("standard_promotion")
X, IMAGES = (np.random.default_rng(0).standard_normal(shape) for shape in ((3, 5, 4), (2, 4, 6, 5)))


class MLP(nnx.Module):
    """Two square layers."""

    def __init__(self, factor):
        self.first, self.second = (nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2))
        self.factor = factor

    def __call__(self, x):
        return self.second(self.factor * jnp.tanh(self.first(x)))


def torch_mlp():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def mlp_table(first, second):
    kernels = first("first.kernel", "0.weight"), second("second.kernel", "2.weight")
    return [*kernels, same("first.bias", "0.bias"), same("second.bias", "2.bias")]


def by_a_table(factor, *rows):
    return (torch_mlp(), MLP(factor), X), {"weights": mlp_table(*rows)}


def of_a_convolution(factor):
    model = nnx.Conv(4, 4, (3, 2), padding="VALID", rngs=nnx.Rngs(0))
    rows = [flipped("kernel", "weight"), same("bias", "bias")]
    swap = lambda a: (a.swapaxes(-1, -2),)  # noqa: E731
    kernel = rows[0]._replace(
        to_jax=lambda a: swap(*rows[0].to_jax(a)), to_torch=lambda a: rows[0].to_torch(*swap(a))
    )

    def call(model, x):
        return factor * jnp.moveaxis(model(jnp.moveaxis(x, 1, -1)), -1, 1)

    return (nn.Conv2d(4, 4, (3, 2)), model, IMAGES), {"weights": [kernel, rows[1]], "call": call}


def of_gates(factor):
    def gru(w, x):
        def step(h, x):
            gates = x @ w["weight_ih_l0"].T + w["bias_ih_l0"]
            kernels = w["weight_hh_l0"].reshape(3, 4, 4)  # each without its transposition
            recurrent = jnp.concatenate([h @ kernel for kernel in kernels], -1) + w["bias_hh_l0"]
            (r, z, n), (hr, hz, hn) = (jnp.split(each, 3, -1) for each in (gates, recurrent))
            r, z = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(z + hz)
            h = factor * ((1 - z) * jnp.tanh(n + r * hn) + z * h)
            return h, h

        states = jax.lax.scan(step, jnp.zeros((len(x), 4), x.dtype), x.swapaxes(0, 1))[1]
        return states.swapaxes(0, 1)

    twin = nn.GRU(3, 4, batch_first=True)
    return (twin, gru, X[..., :3]), {"weights": dict, "call_twin": lambda twin, x: twin(x)[0]}


PORTS = {
    "all rows of a table": (lambda f: by_a_table(f, same, same), "0.weight, 2.weight"),
    "one row of a table": (lambda f: by_a_table(f, transposed, same), "2.weight"),
    "a convolution": (of_a_convolution, "weight"),
    "a loader, with gates": (of_gates, "weight_hh_l0"),
}


@pytest.mark.parametrize("name", PORTS)
def test_kernels_to_transpose_are_named(name):
    port, keys = PORTS[name]
    torch.manual_seed(0)
    arguments, options = port(1.0)
    (fault,) = compare(*arguments, **options, dtypes=["float64"]).faults
    assert f"agree if these kernels are transposed when they are loaded: {keys}. " in fault


def test_nothing_is_named_if_that_does_not_help():
    arguments, options = by_a_table(1.1, same, same)
    assert not compare(*arguments, **options, dtypes=["float32"]).faults
