"""The same models in plain PyTorch, written to be read beside the equations."""

from torch_ref.gru import GRUScratch
from torch_ref.hawk import RGLRU, CausalConv1d, Hawk
from torch_ref.hawk_language_model import GatedMLP, HawkBlock, HawkLanguageModel
from torch_ref.lstm import LSTMProj, LSTMScratch
from torch_ref.rnn import RNN, RNNBidirectional, RNNDeep, RNNScratch
from torch_ref.rnn_language_model import RNNLanguageModel
from torch_ref.rwkv import RWKVBlock, RWKVChannelMix, RWKVTimeMix
from torch_ref.rwkv_language_model import RWKVLanguageModel

__all__ = [
    "RGLRU",
    "RNN",
    "CausalConv1d",
    "GRUScratch",
    "GatedMLP",
    "Hawk",
    "HawkBlock",
    "HawkLanguageModel",
    "LSTMProj",
    "LSTMScratch",
    "RNNBidirectional",
    "RNNDeep",
    "RNNLanguageModel",
    "RNNScratch",
    "RWKVBlock",
    "RWKVChannelMix",
    "RWKVLanguageModel",
    "RWKVTimeMix",
]
