"""The form "native" of `ops.attention`."""

import jax
import jax.numpy as jnp

from jax_models import ops
from jax_models.ops.attention import tiles
from jax_models.ops.attention.definition import CausalAttention
from jax_models.ops.forms import runs_on_one_device
from twinscan_native.kernels import call_kernel, refusal_of

MIN_STEPS = 16
"""The number of steps from which packing the keys pays."""


def refusal(call: CausalAttention) -> str | None:
    """Returns why there is no kernel for the call, or None if there is one."""
    if call.past.keys.shape[1] or call.k.shape[1] != call.q.shape[1]:
        return "it does not support a cache"
    return refusal_of(call, call.q, call.k, call.v, types=("bfloat16", "float32", "float64"))


def pays(call: CausalAttention, platform: str, differentiated: bool) -> bool:
    """Whether the kernels are likely to be faster than XLA.

    On two cores with AVX-512, in float32, they took 0.2 to 0.6 of the time of the tiles.
    """
    is_long = call.q.shape[1] >= MIN_STEPS
    return call.q.dtype != jnp.float64 and is_long and runs_on_one_device("cpu")


@jax.jit
def run(call: CausalAttention) -> jax.Array:
    """Runs the kernels, in at least float32. Under `vmap`, all elements become one batch."""
    q, k, v = call.q, call.k, call.v
    if not q.size:
        return tiles.run_small(call)
    if narrow := q.dtype == jnp.bfloat16:
        q, k, v = (array.astype(jnp.float32) for array in (q, k, v))
    y, _ = _attention(call.window, (q, k, v), call.first.astype(jnp.int32))
    return y.astype(jnp.bfloat16) if narrow else y


def _by_tiles(window: int, floats, first):
    """Computes y without a kernel. Nothing but the gradient reads the log-sum-exps."""
    q, k, v = floats
    past = ops.LocalAttentionState(jnp.zeros_like(first[:, 0]), k[:, :0], v[:, :0])
    y = tiles.run_small(CausalAttention(q, k, v, first, past, window))
    return y, ()


def _forward(window: int, keep: bool, floats, first):
    q, _, v = (jax.typeof(array) for array in floats)
    batch, time, heads, _ = q.shape
    shapes = [q.update(shape=(*q.shape[:3], v.shape[3])), q.update(shape=(batch, heads, time))]
    y, log_sum = call_kernel("attention_forward", shapes, *floats, first)
    return (y, ()), ((log_sum,) if keep else ())


def _gradient(window: int, floats, first, results, kept, gradients):
    """The kernel returns the part of each head of q in the gradients of k and v."""
    (q, k, _), (y, _), (dy, _) = floats, results, gradients
    of_q, of_y = jax.typeof(q), jax.typeof(y)
    found = call_kernel("attention_backward", [of_q, of_q, of_y], *floats, first, dy, y, *kept)
    shape = *k.shape[:3], q.shape[2] // k.shape[2]
    return found[0], *(part.reshape(*shape, -1).sum(3) for part in found[1:])


_attention = ops.LibraryFunction(_by_tiles, _forward, _gradient)
FORM = ops.Form("native", run, ("cpu",), refusal, pays)
