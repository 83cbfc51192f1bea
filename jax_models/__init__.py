"""Recurrent sequence models in Flax NNX, each with a PyTorch twin."""

from jax_models.allocator import tune_allocator
from jax_models.attention import SelfAttentionBlock, SelfAttentionState
from jax_models.bidirectional import Bidirectional, BidirectionalState
from jax_models.bounds import project
from jax_models.constant import Constant
from jax_models.generation import generate, stream
from jax_models.gp_model import GPModel, GPModelConfig
from jax_models.gru import GRU, GRUState
from jax_models.hawk import (
    RGLRU,
    CausalConv1D,
    CausalConv1DState,
    Hawk,
    HawkState,
    RGLRUState,
)
from jax_models.hawk_language_model import (
    GatedMLP,
    HawkBlock,
    HawkLanguageModel,
    HawkLanguageModelConfig,
)
from jax_models.hyena import (
    AuthenticHyenaBlock,
    AuthenticHyenaFilter,
    HyenaBlock,
    HyenaFilter,
    HyenaState,
    LongConvState,
)
from jax_models.hyper_lstm import HyperLSTM, HyperLSTMState
from jax_models.language_model import LanguageModel, LanguageModelConfig, LanguageModelState
from jax_models.layer_norm_lstm import LayerNormLSTM
from jax_models.lstm import LSTM, LSTMState
from jax_models.norm import LayerNorm, RMSNorm
from jax_models.rnn import RNN, RNNState
from jax_models.rnn_language_model import RNNLanguageModel, RNNLanguageModelConfig
from jax_models.rwkv import (
    RWKVBlock,
    RWKVBlockState,
    RWKVChannelMix,
    RWKVChannelMixState,
    RWKVTimeMix,
    RWKVTimeMixState,
    WKVState,
)
from jax_models.rwkv_language_model import RWKVLanguageModel, RWKVLanguageModelConfig
from jax_models.sequence import SequenceLayer, state_batch_axes
from jax_models.stack import Stack
from jax_models.torch_files import read_pth
from jax_models.torch_weights import from_torch, to_torch

__all__ = [
    "GRU",
    "LSTM",
    "RGLRU",
    "RNN",
    "AuthenticHyenaBlock",
    "AuthenticHyenaFilter",
    "Bidirectional",
    "BidirectionalState",
    "CausalConv1D",
    "CausalConv1DState",
    "Constant",
    "GPModel",
    "GPModelConfig",
    "GRUState",
    "GatedMLP",
    "Hawk",
    "HawkBlock",
    "HawkLanguageModel",
    "HawkLanguageModelConfig",
    "HawkState",
    "HyenaBlock",
    "HyenaFilter",
    "HyenaState",
    "HyperLSTM",
    "HyperLSTMState",
    "LSTMState",
    "LanguageModel",
    "LanguageModelConfig",
    "LanguageModelState",
    "LayerNorm",
    "LayerNormLSTM",
    "LongConvState",
    "RGLRUState",
    "RMSNorm",
    "RNNLanguageModel",
    "RNNLanguageModelConfig",
    "RNNState",
    "RWKVBlock",
    "RWKVBlockState",
    "RWKVChannelMix",
    "RWKVChannelMixState",
    "RWKVLanguageModel",
    "RWKVLanguageModelConfig",
    "RWKVTimeMix",
    "RWKVTimeMixState",
    "SelfAttentionBlock",
    "SelfAttentionState",
    "SequenceLayer",
    "Stack",
    "WKVState",
    "from_torch",
    "generate",
    "project",
    "read_pth",
    "state_batch_axes",
    "stream",
    "to_torch",
    "tune_allocator",
]
