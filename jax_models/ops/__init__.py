"""Recurrences as pure functions on arrays: no Flax, no torch, no state of their own."""

from jax_models.ops.affine import affine, carry_dtype, joined_affine
from jax_models.ops.gru import GRUState, gru
from jax_models.ops.lstm import LSTMState, lstm
from jax_models.ops.rnn import NONLINEARITIES, RNNState, rnn
from jax_models.ops.scan import document_ends, masked_scan

__all__ = [
    "NONLINEARITIES",
    "GRUState",
    "LSTMState",
    "RNNState",
    "affine",
    "carry_dtype",
    "document_ends",
    "gru",
    "joined_affine",
    "lstm",
    "masked_scan",
    "rnn",
]
