"""The same models in plain PyTorch, written to be read beside the equations."""

from torch_ref.gru import GRUScratch
from torch_ref.language_model import RNNLanguageModel
from torch_ref.lstm import LSTMProj, LSTMScratch
from torch_ref.rnn import RNN, RNNBidirectional, RNNDeep, RNNScratch

__all__ = [
    "RNN",
    "GRUScratch",
    "LSTMProj",
    "LSTMScratch",
    "RNNBidirectional",
    "RNNDeep",
    "RNNLanguageModel",
    "RNNScratch",
]
