"""Recurrent sequence models in Flax NNX, each with a PyTorch twin.

The public names are those that the modules below list in their `__all__`.
"""

import contextlib as _contextlib
from typing import TYPE_CHECKING as _TYPE_CHECKING

from jax.export import register_namedtuple_serialization as _register

from jax_models.allocator import *
from jax_models.call_arguments import *
from jax_models.checks.removed import refusing as _refusing
from jax_models.importers.keras import *
from jax_models.importers.onnx import *
from jax_models.layers.attention import *
from jax_models.layers.bidirectional import *
from jax_models.layers.conv import *
from jax_models.layers.experts import *
from jax_models.layers.gated_delta_net import *
from jax_models.layers.griffin import *
from jax_models.layers.gru import *
from jax_models.layers.hawk import *
from jax_models.layers.hippogriff import *
from jax_models.layers.hyena import *
from jax_models.layers.hyena_dna import *
from jax_models.layers.hyena_dna_filter import *
from jax_models.layers.hyper_lstm import *
from jax_models.layers.kimi_delta_attention import *
from jax_models.layers.latent_attention import *
from jax_models.layers.layer_norm_lstm import *
from jax_models.layers.lightning_attention import *
from jax_models.layers.load_balancing import *
from jax_models.layers.local_attention import *
from jax_models.layers.lru import *
from jax_models.layers.lstm import *
from jax_models.layers.mamba import *
from jax_models.layers.mamba2 import *
from jax_models.layers.min_rnn import *
from jax_models.layers.mlp import *
from jax_models.layers.mlstm import *
from jax_models.layers.norm import *
from jax_models.layers.residual import *
from jax_models.layers.reversed import *
from jax_models.layers.rg_lru import *
from jax_models.layers.rnn import *
from jax_models.layers.rwkv import *
from jax_models.layers.rwkv6 import *
from jax_models.layers.rwkv7 import *
from jax_models.layers.rwkv_parts import *
from jax_models.layers.s5 import *
from jax_models.layers.self_attention import *
from jax_models.layers.short_convolution import *
from jax_models.layers.stack import *
from jax_models.layers.striped_hyena import *
from jax_models.models.bamba import *
from jax_models.models.configs import *
from jax_models.models.falcon_h1 import *
from jax_models.models.generation import *
from jax_models.models.gp import *
from jax_models.models.granite import *
from jax_models.models.griffin import *
from jax_models.models.hawk import *
from jax_models.models.hippogriff import *
from jax_models.models.hyena_dna import *
from jax_models.models.jamba import *
from jax_models.models.kimi_linear import *
from jax_models.models.language_model import *
from jax_models.models.lara_mini import *
from jax_models.models.lfm2 import *
from jax_models.models.lfm3 import *
from jax_models.models.ling import *
from jax_models.models.load import *
from jax_models.models.mamba import *
from jax_models.models.mamba2 import *
from jax_models.models.minimax import *
from jax_models.models.nemotron_h import *
from jax_models.models.olmo_hybrid import *
from jax_models.models.qwen3_5 import *
from jax_models.models.qwen3_next import *
from jax_models.models.rnn import *
from jax_models.models.rwkv import *
from jax_models.models.rwkv6 import *
from jax_models.models.rwkv7 import *
from jax_models.models.silero_vad import *
from jax_models.models.xlstm import *
from jax_models.models.zamba2 import *
from jax_models.sequence import *
from jax_models.weights.bounds import *
from jax_models.weights.constant import *
from jax_models.weights.files import *
from jax_models.weights.transfer import *

__version__ = "0.2.0"
__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    name for name, value in globals().items() if hasattr(value, "__module__") and name[0] != "_"
)

for _name in __all__:
    if _name.endswith("State"):
        # `jax.export` serializes a program only if the types of its states are registered.
        with _contextlib.suppress(ValueError):  # already registered, if this module is reloaded
            _register(globals()[_name], serialized_name=f"{__name__}.{_name}")

_REMOVED = {
    "rwkv_from_torch": "use from_weights, after undo_rescale if you gave rescaled_every",
    "griffin_from_weights": "use from_weights",
    "hyena_dna_from_weights": "use from_weights",
}
"""What to do instead of calling the functions that were removed."""

if not _TYPE_CHECKING:
    __getattr__ = _refusing(__name__, _REMOVED)
