"""A second, equal call outside `jax.jit` compiles nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_models import LanguageModel
from parity_tests.registry import BATCH, CASES, LAYERS, TIME

pytestmark = pytest.mark.slow


def calls(name: str):
    """The eager calls of a user: the layer, its step, and its gradients."""
    case = CASES[name]
    layer = case.build_layer(case.build_twin())
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    x, state = jax.tree.map(jnp.asarray, (case.inputs(), case.state()))
    lengths = jnp.arange(BATCH) * TIME // BATCH
    yield "layer", lambda: layer(x, state, lengths=lengths)
    yield "layer from no state", lambda: layer(x)
    if case.causal:
        yield "step", lambda: layer.step(x[:, 0], state)

    def loss(params, x):
        y, last = nnx.merge(graphdef, params, rest)(x, state)
        floating = (a for a in jax.tree.leaves(last) if jnp.issubdtype(a.dtype, jnp.floating))
        return sum(jnp.sum(jnp.sin(a)) for a in (y, *floating))

    argnums = 0 if isinstance(layer, LanguageModel) else (0, 1)
    yield "value_and_grad", lambda: jax.value_and_grad(loss, argnums)(params, x)


@pytest.mark.parametrize("name", LAYERS)
def test_an_equal_eager_call_compiles_nothing(name, compilations):
    for what, call in calls(name):
        first, before = jax.device_get(call()), len(compilations)
        again = jax.device_get(call())
        assert len(compilations) == before, what
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a, b, what)


@pytest.mark.parametrize("name", ["RGLRU", "LSTMProj"])
def test_a_thousand_eager_calls_keep_no_memory(name):
    _, call = next(calls(name))
    for _ in range(100):
        call()
    before = resident_bytes()
    for _ in range(1000):
        jax.block_until_ready(call())
    assert resident_bytes() - before < 10 * 2**20


def resident_bytes() -> int:
    """The resident memory of this process, as counted by Linux."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096
