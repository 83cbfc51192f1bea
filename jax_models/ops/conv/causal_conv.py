"""The causal depthwise convolution, and the window of past inputs that it reads."""

import dataclasses
import operator
from functools import reduce
from typing import NamedTuple, Unpack

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from jax_models.checks.arguments import checked
from jax_models.ops.affine import carry_dtype
from jax_models.ops.rows import DividedMasks, Rows, given_rows
from jax_models.ops.time_axis import from_device_before


class CausalConv1DState(NamedTuple):
    """The state of a causal convolution: the last kernel_size − 1 inputs, oldest first."""

    inputs: Float[Array, "batch features kernel_size-1"]


@checked()
def causal_conv(
    x: Float[Array, "batch time features"],
    state: CausalConv1DState,
    *,
    kernel: Float[Array, "kernel_size features"],
    bias: Float[Array, " features"] | None = None,
    **masks: Unpack[DividedMasks],
) -> tuple[Float[Array, "batch time features"], CausalConv1DState]:
    """`y_t = Σ_j kernel_j ⊙ x_{t−K+1+j} + bias`: the kernel's last row weighs the current input.

    Without a `bias`, nothing is added.

    Inputs from before the sequence come from the state. Inputs of another document (before a
    `reset`) count as zero. The convolution is computed in the dtype of x.
    """
    window, state = delayed(x, state, **masks)
    terms = [] if bias is None else [jnp.broadcast_to(bias, x.shape)]
    terms += [jnp.broadcast_to(w, tap.shape) * tap for w, tap in zip(kernel, window, strict=True)]
    return reduce(operator.add, terms), state


@checked()
def delayed(
    x: Float[Array, "batch time features"],
    state: CausalConv1DState,
    **masks: Unpack[DividedMasks],
) -> tuple[list[Float[Array, "batch time features"]], CausalConv1DState]:
    """`[x_{t−K+1}, …, x_{t−1}, x_t]`, each as long as x, and the last K−1 inputs of each row.

    With a `time_axis`, each device receives the last inputs of the device before it.
    """
    rows = given_rows(masks)
    time, past = x.shape[1], state.inputs.shape[2]
    # Over devices, the window of the first steps comes from the device before this one.
    if rows.time_axis is not None:
        if time < past:
            raise ValueError(
                f"x: expected at least the {past} steps on each device that a convolution of "
                f"{past + 1} taps sees of the device before, got {time}"
            )
        of_device = dataclasses.replace(rows, time_axis=None)
        _, (own,) = delayed(x, state, rows=of_device)
        first = state.inputs.astype(own.dtype)
        before = CausalConv1DState(from_device_before(own, first, rows.time_axis))
        taps, _ = delayed(x, before, rows=of_device)
        return taps, CausalConv1DState(lax.all_gather(own, rows.time_axis)[-1])
    # Each tap is a slice of the past and present inputs. The new state is the end of each row.
    inputs = jnp.concatenate([jnp.swapaxes(state.inputs, 1, 2).astype(x.dtype), x], axis=1)
    taps = [inputs[:, delay : delay + time] for delay in range(past + 1)]
    last = _last(inputs, time, rows)
    # Zero the inputs of other documents, both in the taps and in the new state.
    if rows.reset is not None:
        document = jnp.pad(jnp.cumsum(rows.reset, axis=1), ((0, 0), (past, 0)))
        taps = [
            jnp.where((document[:, delay : delay + time] == document[:, past:])[..., None], tap, 0)
            for delay, tap in enumerate(taps)
        ]
        of_last = _last(document, time, rows)
        last = jnp.where((of_last == of_last[:, -1:])[..., None], last, 0)
    return taps, CausalConv1DState(jnp.swapaxes(last, 1, 2).astype(carry_dtype(x.dtype)))


def _last(
    values: Shaped[Array, "batch past+time ..."], time: int, rows: Rows
) -> Shaped[Array, "batch past ..."]:
    """The values of each row's last `past` steps."""
    if rows.lengths is None:
        return values[:, time:]
    past = values.shape[1] - time
    index = rows.lengths[:, None] + jnp.arange(past, dtype=rows.lengths.dtype)[None]
    return jnp.take_along_axis(
        values, index.reshape(*index.shape, *[1] * (values.ndim - 2)), axis=1
    )
