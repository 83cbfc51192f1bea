"""The dtypes of every layer, which are traced without computing anything."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from parity_tests.registry import CASES, FIRST_CASES


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST_CASES.values())
def test_a_bfloat16_layer_has_a_float32_state(name):
    """Rounding a state to bfloat16 at each step would lose much of a long sequence."""
    graphdef, arrays = nnx.split(CASES[name].abstract(jnp.bfloat16))
    call = lambda arrays, x: nnx.merge(graphdef, arrays)(x)  # noqa: E731
    y, state = jax.eval_shape(call, arrays, CASES[name].inputs())
    assert y.dtype == jnp.bfloat16
    floating = {s.dtype for s in jax.tree.leaves(state) if jnp.issubdtype(s.dtype, jnp.floating)}
    assert floating == {jnp.dtype("float32")}
