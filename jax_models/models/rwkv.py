"""The RWKV-4 language model, and the parts that the language models of all versions share."""

__all__ = ["RWKVLanguageModel", "RWKVLanguageModelConfig", "undo_rescale"]

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Unpack

import jax
from flax import nnx
from jaxtyping import Array

from jax_models.layers.linear import Linear
from jax_models.layers.norm import LayerNorm
from jax_models.layers.rwkv import RWKVBlock
from jax_models.layers.rwkv_parts import orthogonal, scaled_orthogonal
from jax_models.layers.rwkv_version import describe_other_version, rwkv_version
from jax_models.models.architecture import Checkpoint, Fields, Layout
from jax_models.models.configs import BlocksConfig
from jax_models.models.language_model import LanguageModel
from jax_models.options import Initializer, NormOptions, checked_options
from jax_models.sequence import SequenceLayer

BLINKDL = Layout("emb.weight", "blocks", "ln_out.weight", "head.weight")
FLA = Layout("model.embeddings.weight", "model.layers", "model.norm.weight", "lm_head.weight")
HF = Layout("rwkv.embeddings.weight", "rwkv.blocks", "rwkv.ln_out.weight", "head.weight")


@dataclasses.dataclass(frozen=True)
class RWKVConfig(BlocksConfig):
    """The base class of the configs of RWKV language models. The `family` is the version."""

    @classmethod
    def recognizes(cls, weights: Mapping[str, Any]) -> bool:
        return (rwkv_version(weights) or ("", ""))[0] == cls.family

    @classmethod
    def confused_with(cls, keys: Iterable[object]) -> str | None:
        return describe_other_version(keys, cls.family)


@checked_options
def undo_rescale(state_dict: Mapping[str, Any], every: int) -> dict[str, Any]:
    """Undoes the division of weights by transformers' RwkvForCausalLM in evaluation mode.

        >>> weights = to_torch(RWKVLanguageModelConfig(features=64).build(rngs=nnx.Rngs(0)), "hf")
        >>> model = from_weights(undo_rescale(weights, 6))

    When a model with a `rescale_every` first runs in evaluation mode, it divides the last matrices
    of block i in place by 2^(i // rescale_every). Weights that are saved afterwards are still
    divided.

    Args:
        state_dict: the weights of transformers' model, saved after it ran.
        every: the `rescale_every` of its config.

    """
    last = re.compile(r"rwkv\.blocks\.(\d+)\.(attention\.output|feed_forward\.value)\.weight")
    return {
        key: value * 2 ** (int(block[1]) // every) if (block := last.fullmatch(key)) else value
        for key, value in state_dict.items()
    }


half_orthogonal = scaled_orthogonal(0.5)


def model_parts(
    config: RWKVConfig,
    block: Callable[..., SequenceLayer],
    embedding_init: Initializer,
    **options: Unpack[NormOptions],
) -> dict[str, Any]:
    """Builds the parts that the language models of all versions share."""
    sizes = config.features, config.vocab_size
    return {
        "blocks": [config.make(block, layer_index=i, **options) for i in range(config.num_layers)],
        "embedding": nnx.Embed(
            config.vocab_size, config.features, embedding_init=embedding_init, **options
        ),
        "norm": LayerNorm(config.features, **options),
        "head": Linear(*sizes, use_bias=False, kernel_init=half_orthogonal, **options),
    }


def small_uniform(key, shape: tuple[int, int], dtype, **_) -> Array:
    """The initializer of embeddings in RWKV-6 and RWKV-7: uniform in ±1e-4."""
    return jax.random.uniform(key, shape, dtype, -1e-4, 1e-4)


def _sizes(feed_forward: str, checkpoint: Checkpoint) -> Fields:
    return {"hidden_features": checkpoint.size(f"*.{feed_forward}.key.weight", 0)}


@dataclasses.dataclass(frozen=True)
class RWKVLanguageModelConfig(RWKVConfig):
    """The RWKV-4 language model."""

    family: ClassVar = "RWKV-4"
    model_types: ClassVar = ("rwkv",)
    layouts: ClassVar = {
        "blinkdl": BLINKDL._replace(sizes=partial(_sizes, "ffn")),
        "hf": HF._replace(sizes=partial(_sizes, "feed_forward")),
    }
    presets: ClassVar = {"rwkv": {}}

    hidden_features: int = 768
    """Width of the channel mixes; four times `features` in RWKV-4."""

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json with which transformers' RWKV is the same model."""
        return {
            "architectures": ["RwkvForCausalLM"],
            "model_type": "rwkv",
            "vocab_size": self.vocab_size,
            "hidden_size": self.features,
            "attention_hidden_size": self.features,
            "num_hidden_layers": self.num_layers,
            "intermediate_size": self.hidden_features,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": False,
        }

    def build(self, **options: Unpack[NormOptions]) -> "RWKVLanguageModel":
        return RWKVLanguageModel(self, **options)


class RWKVLanguageModel(LanguageModel):
    """Token embedding → RWKV-4 blocks → LayerNorm → Linear.

        >>> model = RWKVLanguageModelConfig(features=64, num_layers=2).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

    Args:
        config: the sizes. `RWKVLanguageModelConfig.from_state_dict` reads them from a checkpoint.
        **options: as for every layer. Parameters are initialized as in RWKV-4.

    Layouts: `blinkdl` (RWKV-LM's checkpoints of RWKV-4), `hf` (transformers' RwkvForCausalLM).

    """

    def __init__(self, config: RWKVLanguageModelConfig, **options: Unpack[NormOptions]):
        gain = 1e-4 * max(config.vocab_size, config.features) ** 0.5
        init = partial(orthogonal, gain=gain)
        super().__init__(config, **model_parts(config, RWKVBlock, init, **options))
