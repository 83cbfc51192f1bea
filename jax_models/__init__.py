"""Recurrent sequence models in Flax NNX, each with a PyTorch twin."""

from jax_models.bidirectional import Bidirectional, BidirectionalState
from jax_models.generation import generate, stream
from jax_models.gru import GRU, GRUState
from jax_models.language_model import (
    LanguageModel,
    LanguageModelConfig,
    LanguageModelState,
    RNNLanguageModel,
    RNNLanguageModelConfig,
)
from jax_models.lstm import LSTM, LSTMState
from jax_models.rnn import RNN, RNNState
from jax_models.sequence import SequenceLayer, state_batch_axes
from jax_models.torch_weights import from_torch, to_torch

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Bidirectional",
    "BidirectionalState",
    "GRUState",
    "LSTMState",
    "LanguageModel",
    "LanguageModelConfig",
    "LanguageModelState",
    "RNNLanguageModel",
    "RNNLanguageModelConfig",
    "RNNState",
    "SequenceLayer",
    "from_torch",
    "generate",
    "state_batch_axes",
    "stream",
    "to_torch",
]
