"""The diagonal linear recurrence, by the form that suits the platform."""

import dataclasses
from typing import Annotated, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Inexact

from jax_models.checks.arguments import checked
from jax_models.ops.affine import common_carry_dtype
from jax_models.ops.forms import ACCELERATORS, Form, Operator
from jax_models.ops.linear import associative, definition, sequential
from jax_models.ops.linear.definition import Recurrence, advance
from jax_models.ops.linear.derivative import derivative
from jax_models.ops.linear.pallas import PALLAS
from jax_models.ops.rows import DividedMasks, given_rows
from jax_models.ops.shard_map_axes import match_varying_axes
from jax_models.ops.time_axis import states_between

LINEAR_RECURRENCE = Operator(
    "linear_recurrence",
    (
        PALLAS,
        Form("associative", associative.run, ACCELERATORS, associative.refusal),
        Form("sequential", sequential.run),
        Form("definition", definition.scan),
    ),
    derivative=derivative,
)

LinearRecurrenceMethod = Annotated[str, "auto or the name of a form"]
"""What runs a linear recurrence."""


@checked()
def linear_recurrence(
    a: Inexact[Array, "batch time features"],
    b: Inexact[Array, "batch time features"],
    h0: Inexact[Array, "batch features"] | None = None,
    *,
    reverse: bool = False,
    method: LinearRecurrenceMethod = "auto",
    **masks: Unpack[DividedMasks],
) -> tuple[Inexact[Array, "batch time features"], Inexact[Array, "batch features"]]:
    """`h_t = a_t ⊙ h_{t−1} + b_t` for t = 0 … T−1, or `a_t ⊙ h_{t+1} + b_t` with `reverse`.

    The gradient is the same recurrence in the other direction, and is computed by the same method:

        g_t = ∂L/∂h_t + a_{t+1} ⊙ g_{t+1},   ∂L/∂b_t = g_t,   ∂L/∂a_t = g_t ⊙ h_{t−1}

    The backward pass needs only a and h. Forward mode and higher derivatives are linear
    recurrences, too. If a_t is 0, h_t does not depend on h_{t−1}, even if that is NaN. If a or b is
    complex, so are all h, and gradients follow JAX's convention, without conjugation.

    Args:
        a: the factors of the state. The parallel methods multiply factors of several steps, so
            |a| ≤ 1 keeps every method finite. a = 0 and a = 1 are exact.
        b: the inputs.
        h0: the state before the first step (with `reverse`, after the last). None: zeros. It is
            cast to the dtype of the accumulation.
        reverse: whether to run from the last step to the first.
        method: the form that runs. "sequential" runs T steps in place. "associative" is
            `jax.lax.associative_scan`, of depth O(log T). "pallas" runs the sequential steps in one
            kernel, for real numbers only. On an NVIDIA GPU, the kernel divides time into chunks if
            the rows are few. "definition" is a plain `lax.scan`, which JAX differentiates. "auto"
            is sequential on a CPU and with a symbolic number of steps, and uses the kernel on a TPU
            and for large arrays on an NVIDIA GPU. Otherwise, and where no kernel works, it is
            associative. `ops.forms_of` shows the choice.
        **masks: `lengths`, `reset` and `time_axis`, or `rows`, as in `DividedMasks`. At a `reset`,
            the state restarts from zero. With a `time_axis`, `h_t = P_t h + h⁰_t` on each device,
            where h is the state before the device's steps, P_t is the product of its factors up to
            step t, and h⁰_t is the state if h were zero. The devices exchange their last P and h⁰.

    Returns:
        All h and the last h, computed in at least float32. Each h beyond `lengths` is meaningless.

    Raises:
        NotImplementedError: `lengths` are given with a `time_axis`, or the form that `method` names
            does not support the call. Also when the program is lowered, if "pallas" has no kernel
            for this device, dtype or division over devices.
        TypeError: an array is not floating or complex, or h0 is complex while a and b are real.
        ValueError: the shapes differ, a length lies outside 0 … time, or there is no such method.

    """
    rows = given_rows(masks)
    dtype = common_carry_dtype(a, b)
    if h0 is None:
        h0 = jnp.zeros((a.shape[0], a.shape[2]), dtype)
    elif jnp.iscomplexobj(h0) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"h0: expected a floating dtype, as a and b have, got {h0.dtype}")
    h0 = h0.astype(dtype)
    if a.dtype != b.dtype:
        a, b = a.astype(dtype), b.astype(dtype)
    if 0 in a.shape:
        return b.astype(dtype), h0
    call = Recurrence(a, b, h0, rows, reverse)
    if rows.time_axis is not None:
        # The masks may depend on the next device, so they are applied first, as factors.
        return _over_devices(call.without_masks(), rows.time_axis, method)
    h = LINEAR_RECURRENCE(match_varying_axes(call), method)
    return h, h[:, call.end]


def _over_devices(
    call: Recurrence, time_axis: str, method: str
) -> tuple[Inexact[Array, "batch time features"], Inexact[Array, "batch features"]]:
    h0, end = call.h0, call.end
    from_zero = dataclasses.replace(call, h0=jnp.zeros_like(h0))
    product = dataclasses.replace(call, b=jnp.zeros_like(call.b), h0=jnp.ones_like(h0))
    own, products = (LINEAR_RECURRENCE(match_varying_axes(c), method) for c in (from_zero, product))
    h, last = states_between(
        lambda steps, h: advance(steps[0], h, steps[1]),
        (products[:, end], own[:, end]),
        h0,
        time_axis,
        reverse=call.reverse,
    )
    return advance(products, h[:, None], own), last
