"""The HyperLSTM's recurrence: a small LSTM scales the products of a large one."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.affine import affine, carry_dtype, joined_affine
from jax_models.ops.layer_norm_lstm import LSTMNorms, layer_norm_cell
from jax_models.ops.scan import masked_scan


class HyperLSTMState(NamedTuple):
    """What a HyperLSTM carries: its own h and c, and those of its hyper network."""

    h: Float[Array, "*layers batch hidden"]
    c: Float[Array, "*layers batch hidden"]
    hyper_h: Float[Array, "*layers batch hyper"]
    hyper_c: Float[Array, "*layers batch hyper"]


def hyper_lstm(
    x: Float[Array, "batch time in"],
    state: HyperLSTMState,
    *,
    kernel_ih: Float[Array, "in 4*hidden"],
    kernel_hh: Float[Array, "hidden 4*hidden"],
    norms: LSTMNorms,
    hyper_kernel_ih: Float[Array, "hidden_and_in 4*hyper"],
    hyper_kernel_hh: Float[Array, "hyper 4*hyper"],
    hyper_bias: Float[Array, " 4*hyper"],
    hyper_norms: LSTMNorms,
    z_kernel: Float[Array, "hyper 12*embedding"],
    z_bias: Float[Array, " 8*embedding"],
    d_kernel: Float[Array, "embedding 12*hidden"],
    d_bias: Float[Array, " 4*hidden"],
    **masks,
) -> tuple[Float[Array, "batch time hidden"], HyperLSTMState]:
    """The HyperLSTM, its gates side by side in the order i, f, g, o.

        ĥ_t, ĉ_t = the layer-normalised LSTM of [h_{t−1}, x_t], ĥ_{t−1} and ĉ_{t−1}
        z_h, z_x, z_b = ĥ_t W_z + b_z       each with a part for each gate; z_b has no bias
        d_h, d_x, d_b = z_h D_h, z_x D_x, z_b D_b + b_d          each gate's part with its own D
        i, f, g, o = d_h ⊙ (h_{t−1} W_hh) + d_x ⊙ (x_t W_ih) + d_b
        c_t, h_t   as `layer_norm_cell` makes them of the gates and c_{t−1}

    The columns of W_z and D are those of h, x and b one after the other. What depends on x alone is
    one product over all steps. `masks` are `lengths`, `reset` and `reverse`, as in `masked_scan`.
    """
    hidden, gates = kernel_hh.shape
    products_of_x = affine(
        x,
        jnp.concatenate([kernel_ih, hyper_kernel_ih[hidden:]], axis=1),
        jnp.pad(hyper_bias, (gates, 0)),
    )
    hyper_gates = joined_affine(hyper_kernel_ih[:hidden], hyper_kernel_hh)
    z_bias = jnp.pad(z_bias, (0, z_kernel.shape[1] - len(z_bias)))
    d_bias = jnp.pad(d_bias, (2 * gates, 0))

    def step(state: HyperLSTMState, products_of_x: Float[Array, "batch 4*hidden+4*hyper"]):
        of_x, hyper_of_x = jnp.split(products_of_x, [gates], axis=-1)
        hyper = layer_norm_cell(
            hyper_of_x + hyper_gates(state.h, state.hyper_h), state.hyper_c, hyper_norms
        )
        z = affine(hyper.h, z_kernel, z_bias)
        d_h, d_x, d_b = jnp.split(blockwise_affine(z, d_kernel, d_bias), 3, axis=-1)
        main = layer_norm_cell(d_h * affine(state.h, kernel_hh) + d_x * of_x + d_b, state.c, norms)
        return HyperLSTMState(*main, *hyper), main.h

    return masked_scan(step, state, products_of_x, **masks)


def blockwise_affine(
    x: Float[Array, "batch blocks*in"],
    kernel: Float[Array, "in blocks*out"],
    bias: Float[Array, " blocks*out"],
) -> Float[Array, "batch blocks*out"]:
    """`affine` of each block of x and the same block of the kernel's columns, side by side."""
    accumulator = carry_dtype(kernel.dtype)
    features, blocks = len(kernel), x.shape[1] // len(kernel)
    y = jnp.einsum(
        "bki,iko->bko",
        x.reshape(len(x), blocks, features).astype(kernel.dtype),
        kernel.reshape(features, blocks, -1),
        preferred_element_type=accumulator,
    ).reshape(len(x), len(bias))
    return y + jnp.broadcast_to(bias.astype(accumulator), y.shape)
