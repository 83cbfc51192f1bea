"""A user's reservoir, with buffers in torch and constants in JAX, passes all checks."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from jax_models import Constant, SequenceLayer, ops
from jax_models.weights import batch_norm, linear, same, unused
from parity_tests.checked_layer import CheckedLayer
from parity_tests.checks import CHECKS
from parity_tests.engine.results import GROUPS
from parity_tests.engine.verdict.measure_twin import measure_twin
from parity_tests.registry import Case


class TorchReservoir(nn.Module):
    """h_t = tanh(W h_{t−1} + V x_t), with fixed W and V, and a norm in evaluation mode."""

    def __init__(self, features, size):
        super().__init__()
        self.register_buffer("w", torch.randn(size, size))
        self.register_buffer("v", torch.randn(size, features))
        self.register_buffer("kept", torch.rand(size, size) < 0.7)
        self.norm = nn.BatchNorm1d(size)
        self.readout = nn.Linear(size, features)

    def forward(self, x, state=None):
        h = x.new_zeros(x.shape[0], len(self.w)) if state is None else state[0]
        outputs = []
        for x_t in x.unbind(1):
            h = torch.tanh(h @ (self.w * self.kept).T + x_t @ self.v.T)
            outputs.append(self.readout(self.norm(h)))
        return torch.stack(outputs, 1), (h,)


class State(NamedTuple):
    """The state of a reservoir."""

    h: jax.Array


def step(state, now):
    """One step of a reservoir."""
    return State(jnp.tanh(now.product("h", state.h)))


class Reservoir(SequenceLayer):
    """The same layer in JAX."""

    def __init__(self, features, size, *, dtype=None, param_dtype="float32", rngs):
        super().__init__(features, dtype=dtype, param_dtype=param_dtype)
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.size = size
        self.w = Constant(rngs.params.normal((size, size), param_dtype))
        self.v = Constant(rngs.params.normal((size, features), param_dtype))
        self.kept = Constant(jnp.ones((size, size), bool))
        self.norm = nnx.BatchNorm(size, epsilon=1e-5, use_running_average=True, **options)
        self.readout = nnx.Linear(size, features, **options)

    def init_state(self, batch_size):
        return State(jnp.zeros((batch_size, self.size), ops.carry_dtype(self.param_dtype)))

    def sequence(self, x, state, rows):
        w = jnp.where(self.kept[...], self.w[...], 0).T
        product = ops.Product(w, kernel_x=self.v[...].T)
        h, state = ops.recurrence(step, state, {"h": product}, x, rows=rows)
        return self.readout(self.norm(h)), state

    def torch_layouts(self):
        fixed = [same(name, name) for name in ("w", "v", "kept")]
        return {"twin": [*fixed, *batch_norm("norm", "norm"), *linear("readout", "readout")]}


class OwnMatrix(Reservoir):
    """Draws a matrix of its own instead of reading the twin's."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.w = nnx.Variable(self.w[...])

    def torch_layouts(self):
        rows = super().torch_layouts()["twin"][1:]
        return {"twin": [unused("w", np.zeros((self.size, self.size))), *rows]}


def case(layer=Reservoir):
    twin = partial(TorchReservoir, 3, 5)
    return Case("Reservoir", twin, partial(layer, 3, 5), "twin", "reservoir")


@pytest.fixture(scope="module")
def checked():
    with jax.enable_x64(True):
        yield CheckedLayer(case())


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_a_layer_with_buffers_passes(name, checked):
    CHECKS[name](checked)


def test_its_buffers_are_compared(x64):
    problem = case().problem()
    report = measure_twin(problem)
    assert report.passed, f"\n{report}"
    twin = case().build_twin()
    assert (twin.norm.running_var > 0).all()
    assert twin.kept.dtype == torch.bool
    assert not twin.kept.all()
    assert {*report.errors["float64"]} == {*GROUPS}
    assert {*report.tensors["float64"]["weight gradients"]} == dict(twin.named_parameters()).keys()
    for buffer in ("w", "norm.running_mean", "kept"):
        other = {**problem.state_dict, buffer: np.roll(problem.state_dict[buffer], 1)}
        build = partial(problem.build, other)
        wrong = dataclasses.replace(problem, build=lambda _, dtype, build=build: build(dtype))
        assert not measure_twin(wrong, ["float64"]).passed, buffer


def test_a_layer_that_draws_its_own_buffer_is_refused(x64):
    with pytest.raises(ValueError, match="no weight of the twin gives w, a Variable: make it a"):
        CheckedLayer(case(OwnMatrix))
