"""The linear recurrent unit."""

from functools import partial

from jax_models import LRU
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import Mutation, edited, mask_ignored, zeroed

lru = partial(paired, architecture="lru", layout="lru")

CASES = [lru("LRU", partial(LRU, 5, 6))]


def conjugate(layer):
    """Turns the sign of every imaginary part of C, as if Re(h C̄) were computed."""
    layer.C_im[...] = -layer.C_im[...]


def exchange_parts(layer):
    """Exchanges the real and the imaginary part of B."""
    layer.B_re, layer.B_im = layer.B_im, layer.B_re


def double_output(layer):
    """Computes 2 Re(h C), as for the half of conjugate pairs."""
    layer.output_scale = 2.0


MUTATIONS = [
    Mutation("imaginary part of C negated", "LRU", "weights", edited(conjugate)),
    Mutation("parts of B exchanged", "LRU", "weights", edited(exchange_parts)),
    Mutation("γ forgotten", "LRU", "weights", zeroed("gamma_log")),
    Mutation("D forgotten", "LRU", "weights", zeroed("D")),
    Mutation("output doubled", "LRU", "forward", edited(double_output)),
    *mask_ignored("LRU", "jax_models.ops.linear_recurrence"),
]

COMPARED = {"LRU": lambda width, **options: LRU(width, width, **options)}
