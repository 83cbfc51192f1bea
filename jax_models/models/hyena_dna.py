"""The language model of HyenaDNA (arXiv 2306.15794), over tokens of nucleotides."""

__all__ = ["HyenaDNALanguageModel", "HyenaDNALanguageModelConfig"]

import dataclasses
import re
from functools import partial
from typing import ClassVar, Unpack

from flax import nnx

from jax_models.checks.values import Rate
from jax_models.layers.activation import MixerActivation
from jax_models.layers.dropout import Dropout
from jax_models.layers.hyena_dna import HyenaDNABlock
from jax_models.layers.linear import Linear
from jax_models.layers.norm import LayerNorm
from jax_models.models.architecture import Checkpoint, Fields, Layout
from jax_models.models.configs import StackConfig
from jax_models.models.language_model import LanguageModel
from jax_models.options import NormOptions

normal = nnx.initializers.normal(0.02)
"""HyenaDNA's initializer of the embeddings and the head."""

HEAD, LIGHTNING = "lm_head.weight", "model."
"""The key of the head, and the prefix of all keys in checkpoints of PyTorch Lightning."""


def _sizes(part: str, checkpoint: Checkpoint) -> Fields:
    """Reads the fields, where `part` follows the names of the mixers and the MLPs in the keys."""
    mixer, mlp = f"*.mixer{part}", f"*.mlp{part}"
    # Count the linear layers of the filter network of the lowest block.
    block = re.escape(f"{checkpoint.layout.blocks}.0.mixer{part}.")
    weight = re.compile(rf"{block}filter_fn\.implicit_filter\..*\.weight")
    num_outputs = checkpoint.size(f"{mixer}.in_proj.weight", 0)
    return {
        "context_length": checkpoint.size(f"{mixer}.filter_fn.pos_emb.z", 1, rank=3),
        "embed_features": checkpoint.size(f"{mixer}.filter_fn.pos_emb.z", 2, rank=3),
        "mlp_features": checkpoint.size(f"{mlp}.fc1.weight", 0),
        "order": num_outputs // checkpoint.features - 1,
        "kernel_size": checkpoint.size(f"{mixer}.short_filter.weight", 2, rank=3),
        "filter_features": checkpoint.size(f"{mixer}.filter_fn.implicit_filter.0.weight", 0),
        "num_filter_layers": sum(weight.fullmatch(key) is not None for key in checkpoint.weights),
        "tied_head": checkpoint.tied_head,
    }


def _layout(prefix: str, head: str | None, blocks_layout: str, *, in_file: bool = False) -> Layout:
    """The layout of the model whose keys begin with a prefix."""
    part = ".layer" if blocks_layout.endswith("-checkpointed") else ""
    return Layout(
        f"{prefix}backbone.embeddings.word_embeddings.weight",
        f"{prefix}backbone.layers",
        f"{prefix}backbone.ln_f.weight",
        head,
        repeats_embedding=not in_file,
        blocks_layout=blocks_layout,
        sizes=partial(_sizes, part),
    )


@dataclasses.dataclass(frozen=True)
class HyenaDNALanguageModelConfig(StackConfig):
    """The config of HyenaDNA, by default with the sizes of the smallest published model."""

    family: ClassVar = "HyenaDNA"
    model_types: ClassVar = ("hyenadna",)
    marks: ClassVar = (".filter_fn.pos_emb.",)
    tokenizer: ClassVar = "nucleotides"
    layouts: ClassVar = {
        "hyena-dna": _layout("", None, "hyena-dna"),
        "hyena-dna-file": _layout("", None, "hyena-dna-file"),
        "safari": _layout("", HEAD, "safari"),
        "safari-checkpointed": _layout("", HEAD, "safari-checkpointed"),
        "safari-lightning": _layout(LIGHTNING, LIGHTNING + HEAD, "safari"),
        "safari-lightning-checkpointed": _layout(
            LIGHTNING, LIGHTNING + HEAD, "safari-checkpointed"
        ),
        "hyena-dna-hf": _layout("hyena.", HEAD, "hyena-dna"),
        "hyena-dna-hf-file": _layout("hyena.", HEAD, "hyena-dna-file", in_file=True),
        "hyena-dna-hf-file-with-head": _layout("hyena.", HEAD, "hyena-dna-file"),
    }
    presets: ClassVar = {"hyena-dna": {"model.context_length": 128}}

    vocab_size: int = 16
    """Number of rows of the embedding: 12 tokens and 4 unused rows."""
    context_length: int = 1024
    """The longest sequence, in tokens. The filters depend on it."""
    features: int = 128
    """Width of the model."""
    num_layers: int = 2
    """Number of blocks."""
    mlp_features: int = 512
    """Width of the MLPs."""
    order: int = 2
    """Order of the Hyena operators, at least 2. Each has order − 1 long convolutions."""
    embed_features: int = 3
    """Size of the position embedding in the filter network, an odd number."""
    filter_features: int = 64
    """Width of the filter network."""
    num_filter_layers: int = 4
    """Number of linear layers of the filter network."""
    omega: float = 10.0
    """Initial frequency of the filter network's sines."""
    shift: float = 0.05
    """The value to which the filters' windows decay: 0.05 in HyenaDNA, by default 0 in safari."""
    kernel_size: int = 3
    """Number of taps of the short convolutions: safari's `short_filter_order`."""
    modulate: bool = True
    """Whether the filters' windows are applied."""
    normalized: bool = False
    """Whether the windowed taps of all filters at a step are divided by their L1 norm."""
    filter_bias: bool = True
    """Whether each long convolution adds its input, scaled by a trained bias: safari's `bias`."""
    activation: MixerActivation = "identity"
    """The activation before the output projection of each Hyena operator."""
    tied_head: bool = True
    """Whether the head shares the embedding's weights."""
    block_dropout_rate: Rate = 0.0
    """Rate of the dropout of the outputs of mixers and MLPs before they are added."""
    embedding_dropout_rate: Rate = 0.0
    """Rate of the dropout of the embeddings. HyenaDNA is trained with 0.1."""

    def build(self, **options: Unpack[NormOptions]) -> "HyenaDNALanguageModel":
        return HyenaDNALanguageModel(self, **options)


class HyenaDNALanguageModel(LanguageModel):
    """Token embedding → dropout → HyenaDNA blocks → LayerNorm → the token embedding again.

        >>> config = HyenaDNALanguageModelConfig(features=64, mlp_features=96, context_length=128)
        >>> model = config.build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        logits = norm(blocks(dropout(E[tokens]))) Eᵀ

    There are no position embeddings outside the filters. A step costs O(log² context_length) on
    average. `generate` and `stream` use the carried state until the text has context_length tokens,
    and then run over the last context_length tokens.

    Args:
        config: the sizes. `HyenaDNALanguageModelConfig.from_state_dict` reads them from a
            checkpoint.
        **options: as for every layer.

    Layouts: `hyena-dna` (the model of HyenaDNA's standalone file, which has no head),
    `hyena-dna-file` (the same in safetensors, which store shared tensors once). With a head, which
    may be tied to the embedding: `safari` (safari's language models, and those that HyenaDNA's
    repository trains), `hyena-dna-hf` (the port to transformers), `hyena-dna-hf-file` (the same in
    safetensors, without the key of a tied head) and `hyena-dna-hf-file-with-head`. In files of
    safari's training program, `model.` precedes each key (`safari-lightning`). Models with
    `checkpoint_mixer` and `checkpoint_mlp`, such as the longest published ones, have keys with
    `mixer.layer` and `mlp.layer` (`safari-checkpointed`, `safari-lightning-checkpointed`).

    From order 3 on, safari numbers the features of its filters feature by feature, and the
    standalone file filter by filter, under the same keys and shapes. If a file of safari has no
    `lm_head.weight`, name the layout: `from_torch(model, weights, "safari")`.

    """

    def __init__(self, config: HyenaDNALanguageModelConfig, **options: Unpack[NormOptions]):
        features, vocab_size = config.features, config.vocab_size
        own_head = partial(Linear, use_bias=False, kernel_init=normal, **options)
        super().__init__(
            config,
            embedding=nnx.Embed(vocab_size, features, embedding_init=normal, **options),
            dropout=Dropout(config.embedding_dropout_rate, rngs=options["rngs"]),
            blocks=[
                config.make(
                    HyenaDNABlock,
                    max_length=config.context_length,
                    dropout_rate=config.block_dropout_rate,
                    **options,
                )
                for _ in range(config.num_layers)
            ],
            norm=LayerNorm(features, **options),
            head=None if config.tied_head else own_head(features, vocab_size),
        )
