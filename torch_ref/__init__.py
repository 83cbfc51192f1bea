"""The same models in plain PyTorch, written to be easy to compare with the equations.

The public names are those that the modules below list in their `__all__`.
"""

from torch_ref.layers.attention import *
from torch_ref.layers.bidirectional import *
from torch_ref.layers.conv import *
from torch_ref.layers.experts import *
from torch_ref.layers.gated_delta_net import *
from torch_ref.layers.griffin import *
from torch_ref.layers.gru import *
from torch_ref.layers.hawk import *
from torch_ref.layers.hippogriff import *
from torch_ref.layers.hyena import *
from torch_ref.layers.hyena_dna import *
from torch_ref.layers.hyena_dna_filter import *
from torch_ref.layers.hyena_filter import *
from torch_ref.layers.hyper_lstm import *
from torch_ref.layers.kimi_delta_attention import *
from torch_ref.layers.latent_attention import *
from torch_ref.layers.layer_norm_lstm import *
from torch_ref.layers.lightning_attention import *
from torch_ref.layers.local_attention import *
from torch_ref.layers.lru import *
from torch_ref.layers.lstm import *
from torch_ref.layers.mamba import *
from torch_ref.layers.mamba2 import *
from torch_ref.layers.min_rnn import *
from torch_ref.layers.mlp import *
from torch_ref.layers.mlstm import *
from torch_ref.layers.norm import *
from torch_ref.layers.reversed import *
from torch_ref.layers.rg_lru import *
from torch_ref.layers.rnn import *
from torch_ref.layers.rwkv import *
from torch_ref.layers.rwkv6 import *
from torch_ref.layers.rwkv7 import *
from torch_ref.layers.s5 import *
from torch_ref.layers.self_attention import *
from torch_ref.layers.short_convolution import *
from torch_ref.layers.striped_hyena import *
from torch_ref.models.bamba import *
from torch_ref.models.falcon_h1 import *
from torch_ref.models.generation import *
from torch_ref.models.gp import *
from torch_ref.models.granite import *
from torch_ref.models.griffin import *
from torch_ref.models.hawk import *
from torch_ref.models.hippogriff import *
from torch_ref.models.hyena_dna import *
from torch_ref.models.jamba import *
from torch_ref.models.kimi_linear import *
from torch_ref.models.lara_mini import *
from torch_ref.models.lfm2 import *
from torch_ref.models.lfm3 import *
from torch_ref.models.ling import *
from torch_ref.models.mamba import *
from torch_ref.models.mamba2 import *
from torch_ref.models.minimax import *
from torch_ref.models.nemotron_h import *
from torch_ref.models.olmo_hybrid import *
from torch_ref.models.qwen3_5 import *
from torch_ref.models.qwen3_next import *
from torch_ref.models.rnn import *
from torch_ref.models.rwkv import *
from torch_ref.models.rwkv6 import *
from torch_ref.models.rwkv7 import *
from torch_ref.models.silero_vad import *
from torch_ref.models.xlstm import *
from torch_ref.models.zamba2 import *

__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    name for name, value in globals().items() if hasattr(value, "__module__") and name[0] != "_"
)
