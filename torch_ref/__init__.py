"""The same models in plain PyTorch, written to be read beside the equations."""

from torch_ref.layers.attention import CausalSelfAttention, SelfAttentionBlock
from torch_ref.layers.bidirectional import RNNBidirectional
from torch_ref.layers.griffin import (
    GriffinBlock,
    GriffinRecurrence,
    LocalAttention,
    ZeroCenteredRMSNorm,
)
from torch_ref.layers.gru import GRUScratch
from torch_ref.layers.hawk import RGLRU, CausalConv1d, GatedMLP, Hawk, HawkBlock
from torch_ref.layers.hippogriff import HippogriffBlock, HippogriffHawk
from torch_ref.layers.hyena import AuthenticHyenaBlock, HyenaBlock, Projection
from torch_ref.layers.hyena_dna import HyenaDNABlock, HyenaDNAFilter, HyenaDNAMixer
from torch_ref.layers.hyena_filter import (
    AuthenticHyenaFilter,
    AuthenticWindow,
    HyenaFilter,
    PositionalEmbedding,
    Sin,
    Window,
)
from torch_ref.layers.hyper_lstm import HyperLSTM, HyperLSTMCell
from torch_ref.layers.layer_norm_lstm import LayerNormLSTM
from torch_ref.layers.lstm import LSTMDeep, LSTMProj, LSTMScratch
from torch_ref.layers.min_rnn import MinGRU, MinLSTM
from torch_ref.layers.reversed import Reversed
from torch_ref.layers.rnn import RNN, RNNDeep, RNNScratch
from torch_ref.layers.rwkv import RWKVBlock, RWKVChannelMix, RWKVTimeMix
from torch_ref.layers.rwkv6 import RWKV6Block, RWKV6ChannelMix, RWKV6TimeMix
from torch_ref.layers.rwkv7 import RWKV7Block, RWKV7ChannelMix, RWKV7TimeMix
from torch_ref.layers.striped_hyena import StripedHyenaBlock, StripedHyenaMixer
from torch_ref.models.generation import generate
from torch_ref.models.gp import GPModel
from torch_ref.models.griffin import GriffinLanguageModel
from torch_ref.models.hawk import HawkLanguageModel
from torch_ref.models.hippogriff import HippogriffLanguageModel
from torch_ref.models.hyena_dna import HyenaDNALanguageModel
from torch_ref.models.rnn import RNNLanguageModel
from torch_ref.models.rwkv import RWKVLanguageModel
from torch_ref.models.rwkv6 import RWKV6LanguageModel
from torch_ref.models.rwkv7 import RWKV7LanguageModel
from torch_ref.models.silero_vad import SileroVAD

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
    "GriffinBlock",
    "GriffinLanguageModel",
    "GriffinRecurrence",
    "Hawk",
    "HawkBlock",
    "HawkLanguageModel",
    "HippogriffBlock",
    "HippogriffHawk",
    "HippogriffLanguageModel",
    "HyenaBlock",
    "HyenaDNABlock",
    "HyenaDNAFilter",
    "HyenaDNALanguageModel",
    "HyenaDNAMixer",
    "HyenaFilter",
    "HyperLSTM",
    "HyperLSTMCell",
    "LSTMDeep",
    "LSTMProj",
    "LSTMScratch",
    "LayerNormLSTM",
    "LocalAttention",
    "MinGRU",
    "MinLSTM",
    "PositionalEmbedding",
    "Projection",
    "RNNBidirectional",
    "RNNDeep",
    "RNNLanguageModel",
    "RNNScratch",
    "RWKV6Block",
    "RWKV6ChannelMix",
    "RWKV6LanguageModel",
    "RWKV6TimeMix",
    "RWKV7Block",
    "RWKV7ChannelMix",
    "RWKV7LanguageModel",
    "RWKV7TimeMix",
    "RWKVBlock",
    "RWKVChannelMix",
    "RWKVLanguageModel",
    "RWKVTimeMix",
    "Reversed",
    "SelfAttentionBlock",
    "SileroVAD",
    "Sin",
    "StripedHyenaBlock",
    "StripedHyenaMixer",
    "Window",
    "ZeroCenteredRMSNorm",
    "generate",
]
