"""The GRU, with the keys of torch_ref and of torch.nn."""

from functools import partial

import jax.numpy as jnp
from torch import nn

import torch_ref
from jax_models import GRU
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import (
    Mutation,
    edited,
    gates_swapped,
    replaced,
    transposed,
    zeroed,
)
from parity_tests.registry.torch_nn import torch_nn_cases

gru = partial(paired, architecture="gru", layout="scratch")
torch_nn = torch_nn_cases("GRU", nn.GRU, GRU)

CASES = [
    gru("GRUScratch", partial(GRU, 5, 6), partial(torch_ref.GRUScratch, 5, 6)),
    gru(
        "GRUScratch no bias",
        partial(GRU, 5, 6, use_bias=False),
        partial(torch_ref.GRUScratch, 5, 6, use_bias=False),
    ),
    gru(
        "GRUScratch reset before",
        partial(GRU, 5, 6, reset_after=False),
        partial(torch_ref.GRUScratch, 5, 6, reset_after=False),
    ),
    *torch_nn,
]


def merge_biases(layer):
    """Merges both biases into one, which makes a difference only in a GRU's candidate state."""
    cell = layer.cells[0]
    cell.bias_ih[...] = cell.bias_ih[...] + cell.bias_hh[...]
    cell.bias_hh[...] = jnp.zeros_like(cell.bias_hh[...])


def resetting_after(gru):
    """Applies the reset gate after the product, as torch does."""
    return lambda *args, reset_after, **options: gru(*args, **options)


MUTATIONS = [
    Mutation(
        "reset gate after the product",
        "GRUScratch reset before",
        "forward",
        replaced("jax_models.ops.gru", resetting_after),
        dtypes=("float64", "float32"),
    ),
    *(
        Mutation(name, "GRUScratch", "weights", plant, dtypes=("float64", "float32"))
        for name, plant in (
            ("gates r and z swapped", gates_swapped("cells.0", 3)),
            ("recurrent bias forgotten", zeroed("cells.0.bias_hh")),
            ("recurrent bias added to the input's", edited(merge_biases)),
            ("recurrent matrix transposed", transposed("cells.0.kernel_hh")),
        )
    ),
]

# Without compiled kernels, so that the times do not depend on what is installed.
COMPARED = {"GRU": lambda width, **options: GRU(width, width, method="xla", **options)}
