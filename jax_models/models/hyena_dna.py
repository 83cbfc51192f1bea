"""The language model of HyenaDNA (arXiv 2306.15794), over tokens of nucleotides."""

import dataclasses
import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any, Self, Unpack

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_models import ops
from jax_models.layers.activation import MixerActivation
from jax_models.layers.dropout import Dropout
from jax_models.layers.hyena_dna import HyenaDNABlock
from jax_models.layers.linear import Linear
from jax_models.layers.norm import LayerNorm
from jax_models.models.language_model import BuildOptions, LanguageModel, StackConfig
from jax_models.ops.checks import checked_rate
from jax_models.options import FloatingDtype
from jax_models.weights import Layouts, Weight, layer_norm, nested, same, tied, transposed
from jax_models.weights.keys import elsewhere
from jax_models.weights.stored import as_numpy

EMBEDDING, HEAD = "backbone.embeddings.word_embeddings.weight", "lm_head.weight"
HF, LIGHTNING = "hyena.", "model."
"""What the port to transformers, and a training program of PyTorch Lightning, puts before keys."""
normal = nnx.initializers.normal(0.02)
"""How HyenaDNA draws embeddings and the head."""


@dataclasses.dataclass(frozen=True)
class HyenaDNALanguageModelConfig(StackConfig):
    """The language model of HyenaDNA. By default it has the size of the smallest published one."""

    vocab_size: int = 16
    """Rows of the embedding: 12 tokens and 4 unused rows."""
    context_length: int = 1024
    """The longest sequence, in tokens. The filters depend on it."""
    features: int = 128
    """Width of the model."""
    num_layers: int = 2
    """Blocks."""
    mlp_features: int = 512
    """Width of the MLPs."""
    order: int = 2
    """Order of the Hyena operators, at least 2. Each has order − 1 long convolutions."""
    embed_features: int = 3
    """Size of a position's embedding in the filter network, odd."""
    filter_features: int = 64
    """Width of the filter network."""
    num_filter_layers: int = 4
    """Layers of the filter network."""
    omega: float = 10.0
    """Frequency of the filter network's sines at first."""
    shift: float = 0.05
    """The value to which the filters' windows decay."""
    kernel_size: int = 3
    """Taps of the short convolutions."""
    modulate: bool = True
    """Whether the filters' windows are applied."""
    normalized: bool = False
    """Whether the filter network's outputs at a step are divided by their L1 norm."""
    filter_bias: bool = True
    """Whether each long convolution adds its input, scaled by a trained bias."""
    activation: MixerActivation = "identity"
    """Applied before the Hyenas' output projections."""
    tied_head: bool = True
    """Whether the head shares the embedding's weights."""
    block_dropout_rate: float = 0.0
    """Dropout of the blocks' outputs before they are added."""
    embedding_dropout_rate: float = 0.0
    """Dropout of the embeddings: 0.1 in HyenaDNA's training."""

    def __post_init__(self):
        """Refuse sizes and rates that there are not."""
        super().__post_init__()
        checked_rate("block_dropout_rate", self.block_dropout_rate)
        checked_rate("embedding_dropout_rate", self.embedding_dropout_rate)

    def build(self, **options: Unpack[BuildOptions]) -> "HyenaDNALanguageModel":
        """The model of this config."""
        return HyenaDNALanguageModel(self, **options)

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], **options: Any) -> Self:
        """The config of a checkpoint, read from its shapes, in any of the model's layouts.

        Some fields cannot be inferred from shapes. They default to HyenaDNA's values, unless
        `options` give others: `shift` (0 in safari by default), `modulate`, `normalized`,
        `filter_bias` (safari's `bias`), `activation`, and the rates of dropout.

        Raises:
            TypeError: the state_dict is no mapping, or there is no such option.
            ValueError: it is not a checkpoint of such a model.

        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict: expected a mapping, got {type(state_dict).__name__}")
        prefixes = (prefix for prefix in ("", HF, LIGHTNING) if prefix + EMBEDDING in state_dict)
        prefix = next(prefixes, None)
        if prefix is None:
            found = elsewhere(state_dict, [{EMBEDDING}])
            raise ValueError(f"state_dict: {found or f'not of a HyenaDNA, it has no {EMBEDDING}'}")

        def shape(key: str, rank: int) -> tuple[int, ...]:
            array = state_dict.get(prefix + key)
            if array is None:
                raise ValueError(f"state_dict: not of a HyenaDNA, it has no {prefix}{key}")
            if len(array.shape) != rank:
                found = f"{prefix}{key}: expected {rank} axes, got {tuple(array.shape)}"
                raise ValueError(f"state_dict: {found}")
            return tuple(array.shape)

        keys = {str(key).removeprefix(prefix) for key in state_dict}
        norms = (f"backbone.layers.{i}.norm1.weight" for i in itertools.count())
        is_wrapped = any(".mixer.layer." in key for key in keys)
        mixer, mlp = (
            f"backbone.layers.0.{part}{'.layer' if is_wrapped else ''}" for part in ("mixer", "mlp")
        )
        network = f"{mixer}.filter_fn.implicit_filter"
        vocab_size, features = shape(EMBEDDING, 2)
        _, context_length, embed_features = shape(f"{mixer}.filter_fn.pos_emb.z", 3)
        linears = sum(key.startswith(network) and key.endswith(".weight") for key in keys)
        fields: dict[str, Any] = {
            "vocab_size": vocab_size,
            "context_length": context_length,
            "features": features,
            "num_layers": sum(1 for _ in itertools.takewhile(keys.__contains__, norms)),
            "mlp_features": shape(f"{mlp}.fc1.weight", 2)[0],
            "order": shape(f"{mixer}.in_proj.weight", 2)[0] // max(features, 1) - 1,
            "kernel_size": shape(f"{mixer}.short_filter.weight", 3)[2],
            "embed_features": embed_features,
            "filter_features": shape(f"{network}.0.weight", 2)[0],
            "num_filter_layers": linears,
        }
        head = LIGHTNING + HEAD if prefix == LIGHTNING else HEAD
        if head in state_dict:
            head, table = (as_numpy(state_dict[key]) for key in (head, prefix + EMBEDDING))
            fields["tied_head"] = bool(np.array_equal(head, table))
        return cls(**fields | options)


class HyenaDNALanguageModel(LanguageModel):
    """Token embedding → dropout → HyenaDNA blocks → LayerNorm → the token embedding again.

        >>> config = HyenaDNALanguageModelConfig(features=64, mlp_features=96, context_length=128)
        >>> model = config.build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        logits = norm(layers(dropout(E[tokens]))) Eᵀ

    There are no positions but those of the filters. A step costs O(log² context_length) on average.
    `generate` and `stream` draw from the carried state until context_length is full, and from the
    last context_length tokens from then on.

    Args:
        config: the sizes; `HyenaDNALanguageModelConfig.from_state_dict` reads them from a
            checkpoint.
        dtype: of the computation; by default the parameters'.
        param_dtype: of the parameters.
        rngs: draws the parameters (`params`) and the dropout masks (`dropout`).

    Layouts: `hyena-dna` (the model of HyenaDNA's standalone file, which has no head),
    `hyena-dna-file` (the same in safetensors, which hold shared tensors once); with a head that is
    or is not the embedding, `safari` (its language models, and those that HyenaDNA's repository
    trains), `hyena-dna-hf` (the port to transformers), `hyena-dna-hf-file` (the same in
    safetensors) and `hyena-dna-hf-file-with-head`.

    """

    def __init__(
        self,
        config: HyenaDNALanguageModelConfig,
        *,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.config = config
        self.max_length = config.context_length
        self.embedding = nnx.Embed(
            config.vocab_size, config.features, embedding_init=normal, **options
        )
        self.pos_embedding = None
        self.dropout = Dropout(config.embedding_dropout_rate, rngs=rngs)
        blocks = (
            HyenaDNABlock(
                config.features,
                config.mlp_features,
                config.context_length,
                order=config.order,
                dropout_rate=config.block_dropout_rate,
                embed_features=config.embed_features,
                filter_features=config.filter_features,
                num_filter_layers=config.num_filter_layers,
                omega=config.omega,
                shift=config.shift,
                kernel_size=config.kernel_size,
                modulate=config.modulate,
                normalized=config.normalized,
                filter_bias=config.filter_bias,
                activation=config.activation,
                **options,
            )
            for _ in range(config.num_layers)
        )
        self.layers = config.stack(blocks)
        self.norm = LayerNorm(config.features, **options)
        sizes = (config.features, config.vocab_size)
        own = partial(Linear, *sizes, use_bias=False, kernel_init=normal, **options)
        self.lm_head = None if config.tied_head else own()

    @property
    def context_length(self) -> int:
        """The most tokens of a sequence."""
        return self.max_length

    def embed(self, tokens, positions):
        """The embeddings, and dropout when training."""
        return self.dropout(super().embed(tokens, positions))

    def head(self, x):
        """`x Eᵀ`, or the product with a matrix of its own."""
        if self.lm_head is not None:
            return self.lm_head(x)
        return ops.affine(x, self.embedding.embedding[...].T.astype(x.dtype)).astype(x.dtype)

    def torch_layouts(self) -> Layouts:
        """Those of HyenaDNA's standalone file, if the head is the embedding; those with a head."""
        of_layers = self.layers.torch_layouts()

        def table(layout: str, prefix: str = "", *heads: str) -> list[Weight]:
            embedding = prefix + EMBEDDING
            if self.lm_head is not None:
                ends = [
                    same("embedding.embedding", embedding),
                    *(transposed("lm_head.kernel", head) for head in heads),
                ]
            else:
                ends = [tied("embedding.embedding", (embedding, *heads))]
            return [
                *ends,
                *nested(of_layers[layout], "layers", f"{prefix}backbone.layers"),
                *layer_norm("norm", f"{prefix}backbone.ln_f"),
            ]

        layouts = {
            **{
                f"safari{of_file}{of_blocks}": table(f"safari{of_blocks}", prefix, prefix + HEAD)
                for of_file, prefix in (("", ""), ("-lightning", LIGHTNING))
                for of_blocks in ("", "-checkpointed")
            },
            "hyena-dna-hf": table("hyena-dna", HF, HEAD),
            "hyena-dna-hf-file": table("hyena-dna-file", HF, *([HEAD] if self.lm_head else [])),
        }
        if self.lm_head is not None:
            return layouts
        return {
            "hyena-dna": table("hyena-dna"),
            "hyena-dna-file": table("hyena-dna-file"),
            **layouts,
            "hyena-dna-hf-file-with-head": table("hyena-dna-file", HF, HEAD),
        }
