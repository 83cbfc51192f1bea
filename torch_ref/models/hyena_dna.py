"""The language model of HyenaDNA in plain PyTorch (arXiv 2306.15794), with HyenaDNA's keys."""

__all__ = ["HyenaDNALanguageModel"]

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.hyena_dna import HyenaDNABlock

State = tuple[Any, ...]


class HyenaDNAEmbeddings(nn.Module):
    """The embeddings of the tokens."""

    def __init__(self, vocab_size: int, features: int):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, features)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.word_embeddings(tokens)


class HyenaDNABackbone(nn.Module):
    """Token embedding → dropout → blocks → LayerNorm."""

    def __init__(self, config: Any):
        super().__init__()
        self.embeddings = HyenaDNAEmbeddings(config.vocab_size, config.features)
        self.dropout = nn.Dropout(config.embedding_dropout_rate)
        self.layers = nn.ModuleList(
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
            )
            for _ in range(config.num_layers)
        )
        self.ln_f = nn.LayerNorm(config.features)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, states = self.dropout(self.embeddings(tokens)), []
        for i, layer in enumerate(self.layers):
            x, last = layer(x, None if state is None else state[i])
            states.append(last)
        return self.ln_f(x), tuple(states)


class HyenaDNALanguageModel(nn.Module):
    """The backbone → the token embedding again, or a separate head if not `tied_head`.

    tokens are (batch, time), the logits are (batch, time, vocab_size), and the state holds the
    states of the blocks.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.context_length = config.context_length
        self.backbone = HyenaDNABackbone(config)
        self.lm_head = None
        if not config.tied_head:
            self.lm_head = nn.Linear(config.features, config.vocab_size, bias=False)

    @classmethod
    def from_config(cls, config: Any) -> "HyenaDNALanguageModel":
        """Builds the twin of the model of a JAX config."""
        return cls(config)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, states = self.backbone(tokens, state)
        head = self.lm_head or self.backbone.embeddings.word_embeddings
        return F.linear(x, head.weight), states
