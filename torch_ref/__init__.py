"""The same models in plain PyTorch, written to be read beside the equations."""

from torch_ref.attention import CausalSelfAttention, SelfAttentionBlock
from torch_ref.gp_model import GPModel
from torch_ref.gru import GRUScratch
from torch_ref.hawk import RGLRU, CausalConv1d, Hawk
from torch_ref.hawk_language_model import GatedMLP, HawkBlock, HawkLanguageModel
from torch_ref.hyena import AuthenticHyenaBlock, HyenaBlock, Projection
from torch_ref.hyena_filter import (
    AuthenticHyenaFilter,
    AuthenticWindow,
    HyenaFilter,
    PositionalEmbedding,
    Sin,
    Window,
)
from torch_ref.hyper_lstm import HyperLSTM, HyperLSTMCell
from torch_ref.layer_norm_lstm import LayerNormLSTMCell
from torch_ref.lstm import LSTMProj, LSTMScratch
from torch_ref.rnn import RNN, RNNBidirectional, RNNDeep, RNNScratch
from torch_ref.rnn_language_model import RNNLanguageModel
from torch_ref.rwkv import RWKVBlock, RWKVChannelMix, RWKVTimeMix
from torch_ref.rwkv_language_model import RWKVLanguageModel

__all__ = [
    "RGLRU",
    "RNN",
    "AuthenticHyenaBlock",
    "AuthenticHyenaFilter",
    "AuthenticWindow",
    "CausalConv1d",
    "CausalSelfAttention",
    "GPModel",
    "GRUScratch",
    "GatedMLP",
    "Hawk",
    "HawkBlock",
    "HawkLanguageModel",
    "HyenaBlock",
    "HyenaFilter",
    "HyperLSTM",
    "HyperLSTMCell",
    "LSTMProj",
    "LSTMScratch",
    "LayerNormLSTMCell",
    "PositionalEmbedding",
    "Projection",
    "RNNBidirectional",
    "RNNDeep",
    "RNNLanguageModel",
    "RNNScratch",
    "RWKVBlock",
    "RWKVChannelMix",
    "RWKVLanguageModel",
    "RWKVTimeMix",
    "SelfAttentionBlock",
    "Sin",
    "Window",
]
