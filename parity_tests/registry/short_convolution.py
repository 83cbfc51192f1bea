"""LFM2's gated short convolution."""

from functools import partial

import jax.numpy as jnp

from jax_models import ShortConvolution
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import Mutation, edited, mask_ignored, zeroed

short = partial(paired, layout="lfm2", architecture="short_convolution")
CASES = [
    short("ShortConvolution", partial(ShortConvolution, 5), reach=3),
    short(
        "ShortConvolution, biases, 4 taps",
        partial(ShortConvolution, 6, kernel_size=4, use_bias=True),
        reach=4,
    ),
]
WITH_BIASES = "ShortConvolution, biases, 4 taps"


def gates_exchanged(layer):
    """Exchanges B and C, the gates before and after the convolution."""
    layer.in_gate_proj, layer.out_gate_proj = layer.out_gate_proj, layer.in_gate_proj


def taps_reversed(layer):
    """Reverses the taps, as if the first weighed the current input."""
    layer.conv.kernel[...] = jnp.flip(layer.conv.kernel[...], axis=0)


OPERATOR = "jax_models.ops.causal_conv"
MUTATIONS = [
    Mutation("B and C exchanged", "ShortConvolution", "forward", edited(gates_exchanged)),
    Mutation("taps reversed", "ShortConvolution", "weights", edited(taps_reversed), culprit="conv"),
    Mutation("the convolution's bias forgotten", WITH_BIASES, "weights", zeroed("conv.bias")),
    *mask_ignored("ShortConvolution", OPERATOR),
]
