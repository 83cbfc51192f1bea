"""Recurrences as pure functions on arrays: no Flax, no torch, no state of their own."""

from jax_models.ops.affine import affine, carry_dtype, joined_affine
from jax_models.ops.causal_conv import CausalConv1DState, causal_conv, delayed
from jax_models.ops.gru import GRUState, gru
from jax_models.ops.linear_recurrence import LinearRecurrenceMethod, linear_recurrence
from jax_models.ops.lstm import LSTMState, lstm
from jax_models.ops.rg_lru import RGLRUState, decay, rg_lru
from jax_models.ops.rnn import NONLINEARITIES, RNNState, rnn
from jax_models.ops.scan import document_ends, masked_scan
from jax_models.ops.wkv import WKVMethod, WKVState, empty_wkv_state, wkv

__all__ = [
    "NONLINEARITIES",
    "CausalConv1DState",
    "GRUState",
    "LSTMState",
    "LinearRecurrenceMethod",
    "RGLRUState",
    "RNNState",
    "WKVMethod",
    "WKVState",
    "affine",
    "carry_dtype",
    "causal_conv",
    "decay",
    "delayed",
    "document_ends",
    "empty_wkv_state",
    "gru",
    "joined_affine",
    "linear_recurrence",
    "lstm",
    "masked_scan",
    "rg_lru",
    "rnn",
    "wkv",
]
