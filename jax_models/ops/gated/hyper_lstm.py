"""The HyperLSTM's recurrence: a small LSTM scales the products of a large one."""

from typing import Annotated, NamedTuple, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.checks.arguments import checked
from jax_models.ops.affine import affine
from jax_models.ops.gated.definition import ScanOptions, recurrence
from jax_models.ops.gated.layer_norm_lstm import LSTMNorms, layer_norm_cell
from jax_models.ops.gated.products import Product, Step


class HyperLSTMState(NamedTuple):
    """The state of a HyperLSTM: its own h and c, and those of its hyper network."""

    h: Float[Array, "*layers batch hidden"]
    c: Float[Array, "*layers batch hidden"]
    hyper_h: Float[Array, "*layers batch hyper"]
    hyper_c: Float[Array, "*layers batch hyper"]


@checked(layers=())
def hyper_lstm(
    x: Float[Array, "batch time features"],
    state: HyperLSTMState,
    *,
    kernel_ih: Float[Array, "features 4*hidden"],
    kernel_hh: Float[Array, "hidden 4*hidden"],
    norms: LSTMNorms,
    hyper_kernel_ih: Float[Array, "hidden+features 4*hyper"],
    hyper_kernel_hh: Float[Array, "hyper 4*hyper"],
    hyper_bias: Float[Array, " 4*hyper"],
    hyper_norms: Annotated[LSTMNorms, ("hidden", "hyper")],
    z_kernel: Float[Array, "hyper 12*embedding"],
    z_bias: Float[Array, " 8*embedding"],
    d_kernel: Float[Array, "embedding 12*hidden"],
    d_bias: Float[Array, " 4*hidden"],
    **options: Unpack[ScanOptions],
) -> tuple[Float[Array, "batch time hidden"], HyperLSTMState]:
    """Runs a HyperLSTM over a sequence, with its gates side by side in the order i, f, g, o.

        ĥ_t, ĉ_t = the layer-normalized LSTM of [h_{t−1}, x_t], ĥ_{t−1} and ĉ_{t−1}
        z_h, z_x, z_b = ĥ_t W_z + b_z       each with a part for each gate; z_b has no bias
        d_h, d_x, d_b = z_h D_h, z_x D_x, z_b D_b + b_d          each gate's part with its own D
        i, f, g, o = d_h ⊙ (h_{t−1} W_hh) + d_x ⊙ (x_t W_ih) + d_b
        c_t, h_t   as `layer_norm_cell` makes them of the gates and c_{t−1}

    The columns of W_z and D are those of h, then of x, then of b. The products that depend on x
    alone are computed for all steps at once, and so is the gradient of each weight. `options` are
    those of `ScanOptions`: `lengths`, `reset`, `rows`, `reverse` and `method`.
    """
    hidden, embedding = len(kernel_hh), len(d_kernel)
    # The loop multiplies the hyper network's concatenated state by one matrix, so the rows of its
    # input kernel that read h join the recurrent kernel. Zeros stand for the biases that z_b, d_h
    # and d_x do not have.
    products = {
        "hyper gates": Product(
            jnp.concatenate([hyper_kernel_ih[:hidden], hyper_kernel_hh]),
            None,
            hyper_kernel_ih[hidden:],
            hyper_bias,
        ),
        "z": Product(z_kernel, jnp.pad(z_bias, (0, 4 * embedding))),
        "d": Product(
            jnp.swapaxes(d_kernel.reshape(embedding, 12, hidden), 0, 1),
            jnp.pad(d_bias, (8 * hidden, 0)),
        ),
        "h": Product(kernel_hh),
    }
    return recurrence(
        _step,
        state,
        products,
        x,
        inputs=affine(x, kernel_ih),
        params=(norms, hyper_norms),
        **options,
    )


def _step(state: HyperLSTMState, now: Step) -> HyperLSTMState:
    norms, hyper_norms = now.params
    hyper_gates = now.product("hyper gates", jnp.concatenate([state.h, state.hyper_h], axis=-1))
    hyper = layer_norm_cell(hyper_gates, state.hyper_c, hyper_norms)
    d_h, d_x, d_b = jnp.split(now.product("d", now.product("z", hyper.h)), 3, axis=-1)
    gates = d_h * now.product("h", state.h) + d_x * now.inputs + d_b
    return HyperLSTMState(*layer_norm_cell(gates, state.c, norms), *hyper)
