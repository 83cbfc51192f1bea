"""Recurrent sequence models in Flax NNX, each with a PyTorch twin."""

import contextlib

from jax.export import register_namedtuple_serialization

from jax_models.allocator import tune_allocator
from jax_models.importers.keras import from_keras, keras_table
from jax_models.importers.onnx import from_onnx, onnx_table
from jax_models.layers.attention import SelfAttentionBlock, SelfAttentionState
from jax_models.layers.bidirectional import Bidirectional, BidirectionalState
from jax_models.layers.griffin import (
    GriffinBlock,
    GriffinRecurrence,
    GriffinRecurrenceState,
    LocalAttention,
    LocalAttentionState,
)
from jax_models.layers.gru import GRU, GRUState
from jax_models.layers.hawk import (
    RGLRU,
    CausalConv1D,
    CausalConv1DState,
    GatedMLP,
    Hawk,
    HawkBlock,
    HawkState,
    RGLRUState,
)
from jax_models.layers.hippogriff import HippogriffBlock, HippogriffHawk, HippogriffState
from jax_models.layers.hyena import (
    AuthenticHyenaBlock,
    AuthenticHyenaFilter,
    HyenaBlock,
    HyenaFilter,
    HyenaState,
    LongConvState,
)
from jax_models.layers.hyena_dna import HyenaDNABlock, HyenaDNAFilter, HyenaDNAMixer
from jax_models.layers.hyper_lstm import HyperLSTM, HyperLSTMState
from jax_models.layers.layer_norm_lstm import LayerNormLSTM
from jax_models.layers.lstm import LSTM, LSTMState
from jax_models.layers.min_rnn import MinGRU, MinLSTM, MinRNNState
from jax_models.layers.norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm, ZeroCenteredRMSNorm
from jax_models.layers.reversed import Reversed
from jax_models.layers.rnn import RNN, RNNState
from jax_models.layers.rwkv import (
    RWKVBlock,
    RWKVBlockState,
    RWKVChannelMix,
    RWKVChannelMixState,
    RWKVTimeMix,
    RWKVTimeMixState,
    WKVState,
)
from jax_models.layers.rwkv6 import (
    RWKV6Block,
    RWKV6ChannelMix,
    RWKV6TimeMix,
    RWKV6TimeMixState,
)
from jax_models.layers.rwkv7 import (
    RWKV7Block,
    RWKV7ChannelMix,
    RWKV7TimeMix,
    RWKV7TimeMixState,
)
from jax_models.layers.stack import Stack
from jax_models.layers.striped_hyena import (
    ModalConvState,
    StripedHyenaBlock,
    StripedHyenaMixer,
    StripedHyenaState,
)
from jax_models.models.generation import generate, stream
from jax_models.models.gp import GPModel, GPModelConfig
from jax_models.models.griffin import GriffinLanguageModel, GriffinLanguageModelConfig
from jax_models.models.hawk import HawkLanguageModel, HawkLanguageModelConfig
from jax_models.models.hippogriff import (
    HippogriffLanguageModel,
    HippogriffLanguageModelConfig,
)
from jax_models.models.hyena_dna import HyenaDNALanguageModel, HyenaDNALanguageModelConfig
from jax_models.models.language_model import LanguageModel, LanguageModelConfig, LanguageModelState
from jax_models.models.load import (
    griffin_from_weights,
    hyena_dna_from_weights,
    load_pretrained,
    rwkv_from_torch,
)
from jax_models.models.rnn import RNNLanguageModel, RNNLanguageModelConfig
from jax_models.models.rwkv import RWKVLanguageModel, RWKVLanguageModelConfig
from jax_models.models.rwkv6 import RWKV6LanguageModel, RWKV6LanguageModelConfig
from jax_models.models.rwkv7 import RWKV7LanguageModel, RWKV7LanguageModelConfig
from jax_models.models.silero_vad import SileroVAD, SileroVADState
from jax_models.sequence import SequenceLayer, state_batch_axes
from jax_models.weights.bounds import project
from jax_models.weights.constant import Constant
from jax_models.weights.files import read_pth
from jax_models.weights.transfer import from_torch, to_torch

__version__ = "0.1.0"

__all__ = [
    "GRU",
    "LSTM",
    "RGLRU",
    "RNN",
    "AuthenticHyenaBlock",
    "AuthenticHyenaFilter",
    "BatchNorm",
    "Bidirectional",
    "BidirectionalState",
    "CausalConv1D",
    "CausalConv1DState",
    "Constant",
    "GPModel",
    "GPModelConfig",
    "GRUState",
    "GatedMLP",
    "GriffinBlock",
    "GriffinLanguageModel",
    "GriffinLanguageModelConfig",
    "GriffinRecurrence",
    "GriffinRecurrenceState",
    "GroupNorm",
    "Hawk",
    "HawkBlock",
    "HawkLanguageModel",
    "HawkLanguageModelConfig",
    "HawkState",
    "HippogriffBlock",
    "HippogriffHawk",
    "HippogriffLanguageModel",
    "HippogriffLanguageModelConfig",
    "HippogriffState",
    "HyenaBlock",
    "HyenaDNABlock",
    "HyenaDNAFilter",
    "HyenaDNALanguageModel",
    "HyenaDNALanguageModelConfig",
    "HyenaDNAMixer",
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
    "LocalAttention",
    "LocalAttentionState",
    "LongConvState",
    "MinGRU",
    "MinLSTM",
    "MinRNNState",
    "ModalConvState",
    "RGLRUState",
    "RMSNorm",
    "RNNLanguageModel",
    "RNNLanguageModelConfig",
    "RNNState",
    "RWKV6Block",
    "RWKV6ChannelMix",
    "RWKV6LanguageModel",
    "RWKV6LanguageModelConfig",
    "RWKV6TimeMix",
    "RWKV6TimeMixState",
    "RWKV7Block",
    "RWKV7ChannelMix",
    "RWKV7LanguageModel",
    "RWKV7LanguageModelConfig",
    "RWKV7TimeMix",
    "RWKV7TimeMixState",
    "RWKVBlock",
    "RWKVBlockState",
    "RWKVChannelMix",
    "RWKVChannelMixState",
    "RWKVLanguageModel",
    "RWKVLanguageModelConfig",
    "RWKVTimeMix",
    "RWKVTimeMixState",
    "Reversed",
    "SelfAttentionBlock",
    "SelfAttentionState",
    "SequenceLayer",
    "SileroVAD",
    "SileroVADState",
    "Stack",
    "StripedHyenaBlock",
    "StripedHyenaMixer",
    "StripedHyenaState",
    "WKVState",
    "ZeroCenteredRMSNorm",
    "from_keras",
    "from_onnx",
    "from_torch",
    "generate",
    "griffin_from_weights",
    "hyena_dna_from_weights",
    "keras_table",
    "load_pretrained",
    "onnx_table",
    "project",
    "read_pth",
    "rwkv_from_torch",
    "state_batch_axes",
    "stream",
    "to_torch",
    "tune_allocator",
]

for _name in __all__:
    if _name.endswith("State"):
        # `jax.export` serializes a program only if the types of its states are registered.
        with contextlib.suppress(ValueError):  # already registered, if this module is reloaded
            register_namedtuple_serialization(
                globals()[_name], serialized_name=f"{__name__}.{_name}"
            )
