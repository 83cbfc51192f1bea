"""A stack that is traced, scanned or rematerialized computes the same as its layers in turn."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_models import HawkBlock, HawkLanguageModelConfig, SelfAttentionBlock, Stack
from jax_models.layers.stack import Remat


def attention(num_layers: int, **options) -> Stack:
    rngs = nnx.Rngs(0)
    dtypes = {"dtype": jnp.float64, "param_dtype": jnp.float64}
    blocks = [
        SelfAttentionBlock(8, 2, max_length=6, dropout_rate=0.4, **dtypes, rngs=rngs)
        for _ in range(num_layers)
    ]
    return Stack(blocks, **options)


def value_gradient_and_counts(stack: Stack, x):
    """The loss of two calls with dropout, its gradient, and the counts of the masks.

    The second call continues with the masks after those of the first.
    """
    graphdef, params, rest = nnx.split(stack, nnx.Param, ...)

    def loss(params):
        stack = nnx.merge(graphdef, params, rest, copy=True)
        first, _ = stack(x)
        second, _ = stack(x)
        return jnp.sum(first**2 * second), nnx.state(stack, nnx.RngCount)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_scan_and_remat_change_no_number():
    x = np.random.default_rng(0).standard_normal((2, 6, 8))
    eager = attention(2)
    expected = np.sum(eager(x)[0] ** 2 * eager(x)[0])
    (value, counts), gradient = value_gradient_and_counts(attention(2), x)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    assert jax.tree.leaves(counts) == jax.tree.leaves(nnx.state(eager, nnx.RngCount))
    for remat in ("none", "full"):
        stack = attention(2, remat=remat, scan_layers=True)
        (other, other_counts), other_gradient = value_gradient_and_counts(stack, x)
        np.testing.assert_allclose(other, value, rtol=1e-12)
        assert jax.tree.leaves(other_counts) == jax.tree.leaves(counts)
        for a, b in zip(*map(jax.tree.leaves, (other_gradient, gradient)), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_a_layer_that_comes_twice_draws_two_masks():
    block = attention(1).layers[0]
    stack = Stack([block, block], scan_layers=True)
    x = np.random.default_rng(0).standard_normal((2, 6, 8))
    compiled = nnx.jit(lambda stack: stack(x)[0])(nnx.clone(stack))
    np.testing.assert_allclose(compiled, stack(x)[0], rtol=1e-12)


def tiny(num_layers: int, **options) -> HawkLanguageModelConfig:
    sizes = {"vocab_size": 5, "features": 8, "mlp_features": 8}
    return HawkLanguageModelConfig(num_layers=num_layers, **sizes, **options)


def gradient(config: HawkLanguageModelConfig, time: int) -> jax.stages.Lowered:
    graphdef, params = nnx.split(nnx.eval_shape(lambda: config.build(rngs=nnx.Rngs(0))))

    def loss(params, tokens):
        return jnp.sum(nnx.merge(graphdef, params)(tokens)[0])

    return jax.jit(jax.grad(loss)).lower(params, jax.ShapeDtypeStruct((1, time), jnp.int32))


def test_one_trace_serves_all_layers(monkeypatch):
    traced = []
    original = HawkBlock.sequence
    monkeypatch.setattr(
        HawkBlock, "sequence", lambda self, *args: traced.append(self) or original(self, *args)
    )
    gradient(tiny(12), 7)
    assert len(traced) == 2  # once for the output's shape, once for the program


@pytest.mark.parametrize(("scan", "time", "compiled"), [(False, 7, 5), (True, 7, 1), (True, 1, 5)])
def test_of_scanned_layers_one_is_compiled(scan, time, compiled):
    model = tiny(5, scan_layers=scan).build(rngs=nnx.Rngs(0))
    tokens = jax.ShapeDtypeStruct((1, time), jnp.int32)
    program = jax.jit(lambda tokens: model(tokens)[0]).lower(tokens).compile().as_text()
    assert program.count(" dot(") == compiled * 8 + 1


@pytest.mark.optimized
def test_remat_saves_memory():
    def temporary(remat: Remat) -> int:
        compiled = gradient(tiny(3, remat=remat), 65_536).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    none, dots, full = map(temporary, get_args(Remat))
    assert full < dots < none
    assert full < none / 2
