"""The form "native" of `ops.selective_scan`."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_models import ops
from jax_models.ops.forms import runs_on_one_device
from jax_models.ops.linear.selective_scan import chunked
from jax_models.ops.linear.selective_scan.definition import SelectiveScan, Steps
from twinscan_native import num_threads
from twinscan_native.kernels import call_kernel, refusal_of

CHUNK = 16
"""The number of steps between states that the forward kernel keeps."""
MIN_STEPS = 16
"""The number of steps from which calling a kernel pays."""


def refusal(call: SelectiveScan) -> str | None:
    """Returns why there is no kernel for the call, or None if there is one."""
    return refusal_of(call, call.h)


def pays(call: SelectiveScan, platform: str, differentiated: bool) -> bool:
    """Whether the kernels are likely to be faster than XLA.

    On one core with AVX-512, in float32, they took 0.4 of the time of XLA's best form for 1,536
    features with 16 states, and 0.3 to 0.4 with gradients.
    """
    is_long = call.steps.u.shape[1] >= MIN_STEPS
    return call.h.dtype == jnp.float32 and is_long and runs_on_one_device("cpu")


@jax.jit
def run(call: SelectiveScan):
    """Runs the kernels. Under `vmap`, all elements become one batch."""
    batch, time, features = call.steps.u.shape
    reset = jnp.zeros((batch, time), bool) if call.reset is None else call.reset
    # A part needs a thread, and has at least a vector of features.
    parts = max(1, min(features // 16, -(-num_threads() // batch)))
    return _selective_scan(parts, (call.steps, call.A, call.h), reset)


def _in_chunks(parts: int, floats, reset):
    steps, A, h = floats
    return chunked.run(SelectiveScan(steps, A, h, reset))


def _forward(parts: int, keep: bool, floats, reset):
    (u, *_), _, h = floats
    of_u, of_h = jax.typeof(u), jax.typeof(h)
    before = of_h.update(shape=(len(h), -(-u.shape[1] // CHUNK), *h.shape[1:]))
    y, last, *kept = call_kernel(
        "selective_scan_forward",
        [of_u, of_h] + [before] * keep,
        *_arrays(floats, reset),
        h,
        parts=np.int64(parts),
        keep=keep,
    )
    return (y, last), tuple(kept)


def _gradient(parts: int, floats, reset, results, kept, gradients):
    """The kernel returns the part of each part of the features in the gradients of B and C."""
    (u, _, B, _), _, h = floats
    of_u, of_h, of_B = map(jax.typeof, (u, h, B))
    of_B = of_B.update(shape=(len(B), parts, *B.shape[1:]))
    du, ddt, dA, dB, dC, dh = call_kernel(
        "selective_scan_backward",
        [of_u, of_u, of_h, of_B, of_B, of_h],
        *_arrays(floats, reset),
        *kept,
        *gradients,
        parts=np.int64(parts),
    )
    return Steps(du, ddt, dB.sum(1), dC.sum(1)), dA.sum(0), dh


def _arrays(floats, reset):
    """Returns what both kernels take, for which A has a copy for each row."""
    (u, dt, B, C), A, h = floats
    return u, dt, jnp.broadcast_to(A, h.shape), B, C, reset


_selective_scan = ops.LibraryFunction(_in_chunks, _forward, _gradient)
FORM = ops.Form("native", run, ("cpu",), refusal, pays)
