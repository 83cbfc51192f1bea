"""RWKV-4's weighted average, one step after the other without copies of k and v."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_models.ops.linear.wkv.definition import Average, Results, output
from jax_models.ops.linear.wkv.sums import step_sums
from jax_models.ops.shard_map_axes import match_varying_axes


def run(call: Average) -> Results:
    """Reads each step in its place, and writes its output there."""
    xs = step_sums(*call.keys_and_values()), call.rows.active, call.rows.reset

    def step(t, carry):
        before, outputs = carry
        now = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, t, axis=1, keepdims=False), xs)
        after, new = call.step(before, now)
        return after, jax.tree.map(
            lambda ys, y: lax.dynamic_update_index_in_dim(ys, y, t, axis=1), outputs, new
        )

    shapes = jax.eval_shape(partial(output, with_sums=call.with_sums), call.u, xs[0], xs[0])
    outputs = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), shapes)
    *_, outputs = match_varying_axes((*xs[0], outputs))
    last, outputs = lax.fori_loop(0, call.k.shape[1], step, (call.state, outputs))
    return outputs, last
