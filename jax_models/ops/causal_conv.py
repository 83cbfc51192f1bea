"""The causal depthwise convolution, and the window of past inputs under it."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_models.ops.affine import carry_dtype
from jax_models.ops.checks import checked


class CausalConv1DState(NamedTuple):
    """What a causal convolution carries: the last kernel_size − 1 inputs, oldest first."""

    inputs: Float[Array, "batch features kernel_size-1"]


@checked()
def causal_conv(
    x: Float[Array, "batch time features"],
    state: CausalConv1DState,
    *,
    kernel: Float[Array, "kernel_size features"],
    bias: Float[Array, " features"],
    lengths: Int[Array, " batch"] | None = None,
    reset: Bool[Array, "batch time"] | None = None,
) -> tuple[Float[Array, "batch time features"], CausalConv1DState]:
    """`y_t = Σ_j kernel_j ⊙ x_{t−K+1+j} + bias`: the kernel's last row weighs the current input.

    Inputs from before the sequence come from the state; those of another document (before a
    `reset`) count as zero. Computed in the dtype of x.
    """
    window, state = delayed(x, state, lengths=lengths, reset=reset)
    y = jnp.broadcast_to(bias, x.shape)
    for weight, tap in zip(kernel, window, strict=True):
        y = y + jnp.broadcast_to(weight, tap.shape) * tap
    return y, state


@checked()
def delayed(
    x: Float[Array, "batch time features"],
    state: CausalConv1DState,
    *,
    lengths: Int[Array, " batch"] | None = None,
    reset: Bool[Array, "batch time"] | None = None,
) -> tuple[list[Float[Array, "batch time features"]], CausalConv1DState]:
    """`[x_{t−K+1}, …, x_{t−1}, x_t]`, each as long as x, and the last K−1 inputs of each row."""
    time, past = x.shape[1], state.inputs.shape[2]
    inputs = jnp.concatenate([jnp.swapaxes(state.inputs, 1, 2).astype(x.dtype), x], axis=1)
    taps = [inputs[:, delay : delay + time] for delay in range(past + 1)]
    ends = jnp.full(x.shape[:1], time) if lengths is None else lengths
    index = ends[:, None] + jnp.arange(past, dtype=ends.dtype)[None]
    last = jnp.take_along_axis(inputs, index[..., None], axis=1)
    if reset is not None:
        document = jnp.pad(jnp.cumsum(reset, axis=1), ((0, 0), (past, 0)))
        taps = [
            jnp.where((document[:, delay : delay + time] == document[:, past:])[..., None], tap, 0)
            for delay, tap in enumerate(taps)
        ]
        of_last = jnp.take_along_axis(document, index, axis=1)
        last = jnp.where((of_last == of_last[:, -1:])[..., None], last, 0)
    return taps, CausalConv1DState(jnp.swapaxes(last, 1, 2).astype(carry_dtype(x.dtype)))
