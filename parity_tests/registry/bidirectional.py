"""Bidirectional RNNs of two whole stacks, one of which runs from the last step to the first."""

from functools import partial

import jax.numpy as jnp

import torch_ref
from jax_models import RNN, Bidirectional
from parity_tests.registry.case import Case
from parity_tests.registry.mutation import (
    DOCUMENTS,
    LEFT_PADDING,
    PADDING,
    PAST_AND_FUTURE,
    Mutation,
    identity,
    replaced,
    two_swapped,
)


def two_stacks(num_layers: int, **options) -> Bidirectional:
    """The JAX layer of an `RNNBidirectional`: one stack for each direction."""
    return Bidirectional(*(RNN(5, 6, num_layers=num_layers, **options) for _ in range(2)))


CASES = [
    Case(
        f"RNNBidirectional {num_layers} layer{'s' if num_layers > 1 else ''}",
        partial(torch_ref.RNNBidirectional, 5, 6, num_layers=num_layers),
        partial(two_stacks, num_layers),
        layout="deep",
        architecture="bidirectional",
    )
    for num_layers in (1, 3)
]


def unmoved(_):
    """Leaves rows that are padded on the left in place."""
    return lambda x, steps, *, back=False: x


def reversing_padding(_):
    """Reverses each row from its last column, whatever its length."""
    return lambda x, lengths: jnp.flip(x, axis=1)


MUTATIONS = [
    Mutation(
        "two weights of one shape swapped", "RNNBidirectional 1 layer", "weights", two_swapped()
    ),
    *(
        Mutation(
            name,
            "RNNBidirectional 1 layer",
            "states and masks",
            replaced(f"jax_models.{function}", wrong),
            check,
        )
        for name, function, wrong, check in (
            ("starts ignored", "sequence.roll_rows", unmoved, LEFT_PADDING),
            ("padding reversed, too", "layers.reversed.reverse_time", reversing_padding, PADDING),
            ("resets not reversed", "ops.rows.document_ends", identity, DOCUMENTS),
            ("nothing reversed", "layers.reversed.reverse_time", identity, PAST_AND_FUTURE),
        )
    ),
]
