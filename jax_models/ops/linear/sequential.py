"""The diagonal linear recurrence, one step after the other in place."""

from jax import lax
from jaxtyping import Array

from jax_models.ops.linear.definition import Recurrence, advance


def run(call: Recurrence) -> Array:
    """Writes each h_t in the place of its b_t."""
    call = call.without_masks()
    a, b = call.a.astype(call.h0.dtype), call.b.astype(call.h0.dtype)
    time = a.shape[1]
    behind = (1 if call.reverse else -1) if call.shifted else 0

    def step(i, carry):
        h, hs = carry
        t = time - 1 - i if call.reverse else i
        a_t = lax.dynamic_index_in_dim(a, t + behind, axis=1, keepdims=False)
        b_t = lax.dynamic_index_in_dim(hs, t, axis=1, keepdims=False)
        h = lax.optimization_barrier(advance(a_t, h, b_t))  # XLA would copy hs to read b_t again
        return h, lax.dynamic_update_index_in_dim(hs, h, t, axis=1)

    return lax.fori_loop(0, time, step, (call.h0, b))[1]
