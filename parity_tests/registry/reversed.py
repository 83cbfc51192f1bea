"""Stacks that run from the last step to the first."""

from collections.abc import Callable
from functools import partial

from torch import nn

import torch_ref
from jax_models import GRU, LSTM, Reversed
from jax_models.layers.recurrent import RecurrentStack
from parity_tests.registry.case import Case
from parity_tests.registry.mutation import (
    DOCUMENTS,
    PAST_AND_FUTURE,
    Mutation,
    identity,
    replaced,
    zeroed,
)


def twin(kind: Callable[..., nn.Module]) -> torch_ref.Reversed:
    """The twin: a reversed recurrence of torch.nn with two layers."""
    return torch_ref.Reversed(kind(5, 6, num_layers=2, batch_first=True))


def stack(kind: type[RecurrentStack], **options) -> Reversed:
    """The JAX layer: a reversed stack with two layers."""
    return Reversed(kind(in_features=5, hidden_features=6, num_layers=2, **options))


CASES = [
    Case(
        f"Reversed {twin_kind.__name__}",
        partial(twin, twin_kind),
        partial(stack, kind),
        layout="torch.nn",
        architecture="reversed",
    )
    for twin_kind, kind in ((nn.LSTM, LSTM), (nn.GRU, GRU))
]

MUTATIONS = [
    Mutation(
        "recurrent bias forgotten",
        "Reversed GRU",
        "weights",
        zeroed("layer.cells.1.bias_hh"),
    ),
    Mutation(
        "not reversed",
        "Reversed LSTM",
        "states and masks",
        replaced("jax_models.layers.reversed.reverse_time", identity),
        PAST_AND_FUTURE,
    ),
    Mutation(
        "resets not reversed",
        "Reversed LSTM",
        "states and masks",
        replaced("jax_models.ops.rows.document_ends", identity),
        DOCUMENTS,
    ),
]
