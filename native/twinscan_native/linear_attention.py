"""The form "native" of `ops.gated_delta_rule` without a correction."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_models import ops
from jax_models.ops.delta import gated_chunked
from jax_models.ops.delta.calls import GatedDeltaRule, GatedSteps
from jax_models.ops.forms import runs_on_one_device
from twinscan_native import num_threads
from twinscan_native.kernels import call_kernel, refusal_of

CHUNK = 64
"""The number of steps that the kernels compute at once."""
MIN_STEPS = 33
"""The number of steps from which the kernels pay. XLA computes 32 steps as a single chunk."""


def refusal(call: GatedDeltaRule) -> str | None:
    """Returns why there is no kernel for the call, or None if there is one."""
    if call.steps.beta is not None:
        return "it corrects nothing, so it takes no beta"
    if call.decays_by_feature:
        return "all features of a key decay together"
    return refusal_of(call, call.state)


def pays(call: GatedDeltaRule, platform: str, differentiated: bool) -> bool:
    """Whether the kernels are likely to be faster than XLA."""
    is_long = call.steps.v.shape[1] >= MIN_STEPS
    return call.state.dtype == jnp.float32 and is_long and runs_on_one_device("cpu")


@jax.jit
def run(call: GatedDeltaRule):
    """Runs the kernels. Under `vmap`, all elements become one batch."""
    call = call.without_reset()
    q, k, v, log_w, _ = call.prepared(call.steps)
    batch, _, key_heads, _ = k.shape
    # The heads that share a key head are divided into parts only if there are threads for them.
    parts = min(v.shape[2] // key_heads, -(-num_threads() // (batch * key_heads)))
    return _linear_attention(parts, (q, k, v, log_w[..., 0], call.state), ())


def _by_chunks(parts: int, floats, others):
    q, k, v, log_w, state = floats
    steps = GatedSteps(q, k, v, log_w[..., None], None)
    return gated_chunked.run(GatedDeltaRule(steps, state, normalize=False, scale=1.0))


def _forward(parts: int, keep: bool, floats, others):
    *_, v, _, state = map(jax.typeof, floats)
    batch, heads, values, keys = state.shape
    before = batch, -(-v.shape[1] // CHUNK), heads, keys, values
    shapes = [v, state] + [v.update(shape=before)] * keep
    y, last, *kept = call_kernel(
        "linear_attention_forward", shapes, *floats, parts=np.int64(parts), keep=keep
    )
    return (y, last), tuple(kept)


def _gradient(parts: int, floats, others, results, kept, gradients):
    """The kernel returns the part of each part of the heads in the gradients of q and k."""
    q, k, v, log_w, state = floats
    of_q = jax.typeof(q).update(shape=(len(q), parts, *q.shape[1:]))
    shapes = [of_q, of_q, *map(jax.typeof, (v, log_w, state))]
    d_q, d_k, *rest = call_kernel(
        "linear_attention_backward",
        shapes,
        *(q, k, v, log_w, *kept, *gradients),
        parts=np.int64(parts),
    )
    return d_q.sum(1), d_k.sum(1), *rest


_linear_attention = ops.LibraryFunction(_by_chunks, _forward, _gradient)
FORM = ops.Form("native", run, ("cpu",), refusal, pays)
