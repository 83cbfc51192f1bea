"""The layers' operators as pure functions of arrays, without Flax, torch or hidden state."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from jax_models.checks.arguments import checked as _checked
from jax_models.checks.removed import refusing as _refusing
from jax_models.ops.affine import affine, carry_dtype
from jax_models.ops.attention import AttentionMethod, attention
from jax_models.ops.attention.definition import LocalAttentionState
from jax_models.ops.attention.local_attention import local_attention
from jax_models.ops.conv import LongConvMethod, long_conv
from jax_models.ops.conv.causal_conv import CausalConv1DState, causal_conv, delayed
from jax_models.ops.conv.online_conv import (
    LongConvState,
    empty_long_conv_state,
    long_conv_state,
    online_conv,
)
from jax_models.ops.delta import (
    DeltaRuleMethod,
    GatedDeltaRuleMethod,
    delta_rule,
    gated_delta_rule,
)
from jax_models.ops.forms import Form, FormTable, forms_of
from jax_models.ops.gated import LSTMMethod, RecurrentMethod, lstm_stack, recurrent_stack
from jax_models.ops.gated.definition import (
    GRUState,
    LSTMState,
    Nonlinearity,
    RNNState,
    gru,
    lstm,
    recurrence,
    rnn,
)
from jax_models.ops.gated.hyper_lstm import HyperLSTMState, hyper_lstm
from jax_models.ops.gated.layer_norm_lstm import LSTMNorms, layer_norm_lstm
from jax_models.ops.gated.products import Pair, Product, Step
from jax_models.ops.gelu import gelu
from jax_models.ops.grouped import GroupedDotMethod, grouped_dot
from jax_models.ops.l2_normalize import l2_normalize
from jax_models.ops.library_function import LibraryFunction
from jax_models.ops.linear import LinearRecurrenceMethod, linear_recurrence
from jax_models.ops.linear.min_rnn import MinRNNState, min_gru, min_lstm
from jax_models.ops.linear.modal_conv import ModalConvMethod, ModalConvState, modal_conv
from jax_models.ops.linear.rg_lru import RGLRUState, decay, rg_lru, softplus_decay
from jax_models.ops.linear.selective_scan import SelectiveScanMethod, selective_scan
from jax_models.ops.linear.wkv import WKVMethod, empty_wkv_state, wkv
from jax_models.ops.linear.wkv.sums import WKVState
from jax_models.ops.linear_map import linear_map as _linear_map
from jax_models.ops.rotary import rotary
from jax_models.ops.rows import Rows
from jax_models.ops.rows import document_ends as _document_ends
from jax_models.ops.softplus import softplus

__all__ = [
    "AttentionMethod",
    "CausalConv1DState",
    "DeltaRuleMethod",
    "Form",
    "FormTable",
    "GRUState",
    "GatedDeltaRuleMethod",
    "GroupedDotMethod",
    "HyperLSTMState",
    "LSTMMethod",
    "LSTMNorms",
    "LSTMState",
    "LibraryFunction",
    "LinearRecurrenceMethod",
    "LocalAttentionState",
    "LongConvMethod",
    "LongConvState",
    "MinRNNState",
    "ModalConvMethod",
    "ModalConvState",
    "Nonlinearity",
    "Pair",
    "Product",
    "RGLRUState",
    "RNNState",
    "RecurrentMethod",
    "Rows",
    "SelectiveScanMethod",
    "Step",
    "WKVMethod",
    "WKVState",
    "affine",
    "attention",
    "carry_dtype",
    "causal_conv",
    "decay",
    "delayed",
    "delta_rule",
    "document_ends",
    "empty_long_conv_state",
    "empty_wkv_state",
    "forms_of",
    "gated_delta_rule",
    "gelu",
    "grouped_dot",
    "gru",
    "hyper_lstm",
    "l2_normalize",
    "layer_norm_lstm",
    "linear_map",
    "linear_recurrence",
    "local_attention",
    "long_conv",
    "long_conv_state",
    "lstm",
    "lstm_stack",
    "min_gru",
    "min_lstm",
    "modal_conv",
    "online_conv",
    "recurrence",
    "recurrent_stack",
    "rg_lru",
    "rnn",
    "rotary",
    "selective_scan",
    "softplus",
    "softplus_decay",
    "wkv",
]

document_ends, linear_map = _checked()(_document_ends), _checked()(_linear_map)

_REMOVED = {
    "cudnn_lstm": 'use lstm_stack with method="cudnn"',
    "cudnn_refusal": 'use forms_of(layer, x, platform="cuda"), which says what runs and why',
    "cudnn_pays": 'use forms_of(layer, x, platform="cuda"), which says what runs and why',
}
"""What to do instead of calling the functions that were removed."""

if not _TYPE_CHECKING:
    __getattr__ = _refusing(__name__, _REMOVED)
