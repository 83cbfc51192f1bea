"""labml's HyperLSTM."""

from functools import partial

import jax.numpy as jnp

from jax_models import HyperLSTM
from parity_tests.registry.case import paired
from parity_tests.registry.layer_norm_lstm import carrying_normalised
from parity_tests.registry.mutation import Mutation, replaced, zeroed

CASES = [
    paired(
        f"HyperLSTM {num_layers} layer{'s' if num_layers > 1 else ''}",
        partial(HyperLSTM, 5, 6, 4, 3, num_layers=num_layers),
        layout="labml",
        architecture="hyper_lstm",
    )
    for num_layers in (1, 2)
]


def with_hyper_kernel(wrong):
    """A HyperLSTM in which `wrong` changes the kernel of the hyper network."""

    def faulty(hyper_lstm):
        def hyper_lstm_with_kernel(x, state, *, hyper_kernel_ih, **options):
            return hyper_lstm(x, state, hyper_kernel_ih=wrong(x, hyper_kernel_ih), **options)

        return hyper_lstm_with_kernel

    return faulty


def x_before_h(x, kernel):
    """Moves the rows of the kernel, as if the hyper network read [x, h] instead of [h, x]."""
    return jnp.roll(kernel, -x.shape[-1], axis=0)


def f_before_i(x, kernel):
    """Swaps the first two gates."""
    i, f, g, o = jnp.split(kernel, 4, axis=1)
    return jnp.concatenate([f, i, g, o], axis=1)


forward = partial(Mutation, case="HyperLSTM 1 layer", kind="forward")

MUTATIONS = [
    Mutation(
        "upper layer's z bias forgotten",
        "HyperLSTM 2 layers",
        "weights",
        zeroed("cells.1.z_bias"),
        culprit="cells.1",
    ),
    *(
        forward(
            f"hyper network {name}",
            plant=replaced("jax_models.ops.hyper_lstm", with_hyper_kernel(wrong)),
        )
        for name, wrong in (("of [x, h]", x_before_h), ("with gate f before i", f_before_i))
    ),
    forward(
        "normalised cell carried",
        plant=replaced("jax_models.ops.gated.hyper_lstm.layer_norm_cell", carrying_normalised),
    ),
]
