"""Recurrences as pure functions on arrays: no Flax, no torch, no state of their own.

A name that is imported as itself is public.
"""

# isort: off
from jax_models.ops.affine import affine as affine, carry_dtype as carry_dtype
from jax_models.ops.arguments import checked as _checked
from jax_models.ops.attention import attention as attention
from jax_models.ops.causal_conv import (
    CausalConv1DState as CausalConv1DState,
    causal_conv as causal_conv,
    delayed as delayed,
)
from jax_models.ops.delta_rule import DeltaRuleMethod as DeltaRuleMethod, delta_rule as delta_rule
from jax_models.ops.gelu import gelu as gelu
from jax_models.ops.gru import GRUState as GRUState, gru as gru
from jax_models.ops.hyper_lstm import HyperLSTMState as HyperLSTMState, hyper_lstm as hyper_lstm
from jax_models.ops.kernels.cudnn_lstm import (
    cudnn_lstm as cudnn_lstm,
    cudnn_pays as cudnn_pays,
    cudnn_refusal as cudnn_refusal,
)
from jax_models.ops.l2_normalize import l2_normalize as l2_normalize
from jax_models.ops.layer_norm_lstm import (
    LSTMNorms as LSTMNorms,
    layer_norm_lstm as layer_norm_lstm,
)
from jax_models.ops.linear_recurrence import (
    LinearRecurrenceMethod as LinearRecurrenceMethod,
    linear_recurrence as linear_recurrence,
)
from jax_models.ops.local_attention import (
    LocalAttentionState as LocalAttentionState,
    local_attention as local_attention,
)
from jax_models.ops.long_conv import LongConvMethod as LongConvMethod, long_conv as long_conv
from jax_models.ops.lstm import LSTMState as LSTMState, lstm as lstm
from jax_models.ops.min_rnn import (
    MinRNNState as MinRNNState,
    min_gru as min_gru,
    min_lstm as min_lstm,
)
from jax_models.ops.modal_conv import ModalConvState as ModalConvState, modal_conv as modal_conv
from jax_models.ops.online_conv import (
    LongConvState as LongConvState,
    empty_long_conv_state as empty_long_conv_state,
    long_conv_state as long_conv_state,
    online_conv as online_conv,
)
from jax_models.ops.products import Pair as Pair, Product as Product
from jax_models.ops.recurrence import Step as Step, recurrence as recurrence
from jax_models.ops.recurrent_stack import (
    LSTMMethod as LSTMMethod,
    lstm_stack as lstm_stack,
    recurrent_stack as recurrent_stack,
)
from jax_models.ops.rg_lru import (
    RGLRUState as RGLRUState,
    decay as decay,
    rg_lru as rg_lru,
    softplus_decay as softplus_decay,
)
from jax_models.ops.rnn import Nonlinearity as Nonlinearity, RNNState as RNNState, rnn as rnn
from jax_models.ops.rotary import rotary as rotary
from jax_models.ops.rows import Rows as Rows, document_ends as _document_ends
from jax_models.ops.scaled_sums import WKVState as WKVState
from jax_models.ops.wkv import (
    WKVMethod as WKVMethod,
    empty_wkv_state as empty_wkv_state,
    wkv as wkv,
)

document_ends = _checked()(_document_ends)
