"""The shapes and dtypes of every layer, which are traced without computing anything."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_models import SequenceLayer, state_batch_axes
from parity_tests.registry import CASES, FIRST_CASES

names = pytest.mark.parametrize("name", FIRST_CASES.values())


def traced(name: str, dtype, *shapes: tuple[int, ...]):
    """The shapes and dtypes of a layer's results, for inputs of these shapes."""
    graphdef, arrays = nnx.split(CASES[name].abstract(dtype))
    kind = CASES[name].inputs().dtype
    inputs = [jax.ShapeDtypeStruct(shape, kind) for shape in shapes]
    call = lambda arrays, x: nnx.merge(graphdef, arrays)(x)  # noqa: E731
    return [jax.eval_shape(call, arrays, x) for x in inputs]


@pytest.mark.slow
@names
def test_a_bfloat16_layer_has_a_float32_state(name):
    """Rounding a state to bfloat16 at each step would lose much of a long sequence."""
    [(y, state)] = traced(name, jnp.bfloat16, CASES[name].inputs().shape)
    assert y.dtype == jnp.bfloat16
    floating = {s.dtype for s in jax.tree.leaves(state) if jnp.issubdtype(s.dtype, jnp.floating)}
    assert floating == {jnp.dtype("float32")}


@pytest.mark.slow
@names
def test_a_row_without_a_batch_axis_is_a_batch_of_one(name):
    layer = CASES[name].abstract()
    if not isinstance(layer, SequenceLayer) or type(layer).__call__ is not SequenceLayer.__call__:
        pytest.skip("this one takes batches only")
    shape = CASES[name].inputs(batch=1).shape
    (y, state), (of_batch, batched) = traced(name, jnp.float64, shape[1:], shape)
    assert y.shape == of_batch.shape[1:]
    axes = state_batch_axes(layer)
    for leaf, whole, axis in zip(*map(jax.tree.leaves, (state, batched, axes)), strict=True):
        shape = list(whole.shape)
        assert shape.pop(axis) == 1
        assert leaf.shape == tuple(shape)
