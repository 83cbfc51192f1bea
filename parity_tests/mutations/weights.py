"""Weights that arrive in the wrong place, or not as they are."""

import itertools
from functools import partial

import jax.numpy as jnp
import numpy as np

from parity_tests.mutations.mutation import Mutation, Plant, at, edited, replaced


def weight_mutations() -> list[Mutation]:
    """What a weight table may get wrong."""
    weights = partial(Mutation, kind="weights")
    in_two_dtypes = partial(weights, dtypes=("float64", "float32"))
    proj, hyena = "torch.nn.LSTM proj, 1 layer", "GPModel of hyena"
    cells = ("RNNScratch tanh", "LSTMScratch", "GRUScratch", proj)
    return [
        *(
            in_two_dtypes(f"gates {names} swapped", case, plant=gates_swapped("cells.0", count))
            for case, names, count in (
                ("LSTMScratch", "i and f", 4),
                ("GRUScratch", "r and z", 3),
                (proj, "i and f", 4),
            )
        ),
        *(
            in_two_dtypes("recurrent bias forgotten", case, plant=zeroed("cells.0.bias_hh"))
            for case in cells
        ),
        in_two_dtypes(
            "recurrent bias added to the input's", "GRUScratch", plant=edited(merge_biases)
        ),
        *(
            in_two_dtypes(
                "recurrent matrix transposed", case, plant=transposed("cells.0.kernel_hh")
            )
            for case in (*cells, "RNN U W b")
        ),
        *(
            weights(
                "two weights of one shape swapped",
                case,
                plant=replaced("parity_tests.registry.case.from_torch", swap_two),
            )
            for case in (
                "RNNBidirectional 1 layer",
                "RGLRU",
                "Hawk, kernel 1",
                "LayerNormLSTM",
                "RWKVChannelMix",
                "SelfAttentionBlock",
            )
        ),
        weights("taps in reverse order", "CausalConv1D, kernel 4", plant=edited(reverse_taps)),
        weights(
            "weights an ulp off on the way back",
            "RNNScratch tanh",
            plant=replaced("parity_tests.checks.to_torch", off_by_an_ulp),
            check="weights make the round trip bit for bit",
        ),
        weights(
            "gates i and f swapped",
            "RNNLanguageModel of LSTM",
            plant=gates_swapped("layers.cells.0", 4),
            culprit="rnn",
        ),
        *(
            weights(f"{name} forgotten", case, plant=zeroed(path), culprit=culprit)
            for name, case, path, culprit in (
                ("head's bias", "RNNLanguageModel of GRU", "head.bias", "proj"),
                (
                    "convolution's bias",
                    "HawkLanguageModel",
                    "layers.layers.0.hawk.conv.bias",
                    "blocks.0.hawk.conv.conv",
                ),
                ("ln0's bias", "RWKVLanguageModel", "layers.layers.0.ln0.bias", "blocks.0.ln0"),
                ("B", hyena, "layers.layers.0.B", "layers.0"),
                (
                    "filter's first bias",
                    "AuthenticHyenaBlock, implicit, order 2",
                    "filter.biases.0",
                    "filter",
                ),
                ("upper layer's z bias", "HyperLSTM 2 layers", "cells.1.z_bias", ""),
            )
        ),
        *(
            weights(f"{name} transposed", case, plant=transposed(path), culprit=culprit)
            for name, case, path, culprit in (
                ("input gate", "HawkBlock", "hawk.rglru.input_gate.kernel", "hawk.rglru"),
                (
                    "time mix's output",
                    "RWKVLanguageModel",
                    "layers.layers.1.att.output.kernel",
                    "blocks.1.att.output",
                ),
                (
                    "output projection",
                    hyena,
                    "layers.layers.1.proj_output.kernel",
                    "layers.1.proj_output",
                ),
            )
        ),
    ]


def gates_swapped(path: str, count: int) -> Plant:
    """The first two of `count` gates in each other's place."""

    def edit(layer):
        cell = at(layer, path)
        for name, array in cell.arrays().items():
            if not name.endswith("hr"):
                first, second, *rest = jnp.split(array, count, axis=-1)
                getattr(cell, name)[...] = jnp.concatenate([second, first, *rest], axis=-1)

    return edited(edit)


def zeroed(path: str) -> Plant:
    """A weight of zeros."""

    def edit(layer):
        at(layer, path)[...] = jnp.zeros_like(at(layer, path)[...])

    return edited(edit)


def transposed(path: str) -> Plant:
    """A square matrix, or the first square of a wide one, not transposed or once too often."""

    def edit(layer):
        kernel = at(layer, path)
        side = kernel.shape[0]
        kernel[...] = kernel[...].at[:, :side].set(kernel[...][:, :side].T)

    return edited(edit)


def merge_biases(layer):
    """It makes no difference, but in a GRU's candidate."""
    cell = layer.cells[0]
    cell.bias_ih[...] = cell.bias_ih[...] + cell.bias_hh[...]
    cell.bias_hh[...] = jnp.zeros_like(cell.bias_hh[...])


def swap_two(from_torch):
    """The first two different weights of one shape come under each other's keys."""

    def from_swapped(layer, weights, layout):
        first, second = next(
            (a, b)
            for a, b in itertools.combinations(weights, 2)
            if weights[a].shape == weights[b].shape and (weights[a] != weights[b]).any()
        )
        swapped = {first: weights[second], second: weights[first]}
        return from_torch(layer, {**weights, **swapped}, layout)

    return from_swapped


def reverse_taps(layer):
    """As if torch's convolution were no correlation."""
    layer.kernel[...] = layer.kernel[...][::-1]


def off_by_an_ulp(to_torch):
    """Each weight is rounded to its neighbour."""
    return lambda *args: {
        key: np.nextafter(a, a.dtype.type(1)) for key, a in to_torch(*args).items()
    }
