"""The language model over Hyena or attention blocks in plain PyTorch (seed 002)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.attention import SelfAttentionBlock
from torch_ref.layers.hyena import AuthenticHyenaBlock, HyenaBlock


class GPModel(nn.Module):
    """Token and position embeddings → dropout → blocks → LayerNorm → the token embedding again.

    index is (batch, time), the logits (batch, time, vocab_size). `block` is called once a layer,
    for a module from (batch, time, features) to the same. `generate` reads the last
    context_length tokens (the seed went on reading the first).
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        features: int,
        num_layers: int,
        block: Callable[[], nn.Module],
        embedding_dropout_rate: float = 0.0,
    ):
        super().__init__()
        self.context_length = context_length
        self.tok_emb = nn.Embedding(vocab_size, features)
        self.pos_emb = nn.Parameter(torch.randn(1, context_length, features))
        self.drop = nn.Dropout(embedding_dropout_rate)
        self.layers = nn.Sequential(*(block() for _ in range(num_layers)))
        self.ln = nn.LayerNorm(features)
        self.head = nn.Linear(features, vocab_size, bias=False)
        self.head.weight = self.tok_emb.weight

    @classmethod
    def from_config(cls, config: Any) -> "GPModel":
        """The twin of the model that a config of the same fields describes."""

        def block() -> nn.Module:
            if config.block == "attention":
                return SelfAttentionBlock(
                    config.features, config.num_heads, config.block_dropout_rate
                )
            sizes = (config.features, config.context_length, config.order, config.kernel_size)
            if config.block == "hyena":
                return HyenaBlock(*sizes, config.block_dropout_rate)
            if config.block == "authentic-hyena":
                return AuthenticHyenaBlock(
                    *sizes,
                    config.block_dropout_rate,
                    config.embed_features,
                    config.mlp_features,
                    config.num_filter_layers,
                    config.omega,
                    config.implicit,
                )
            raise ValueError(
                f"block: expected hyena, authentic-hyena or attention, got {config.block}"
            )

        return cls(
            config.vocab_size,
            config.context_length,
            config.features,
            config.num_layers,
            block,
            config.embedding_dropout_rate,
        )

    def forward(self, index: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        time = index.shape[1]
        if time > self.context_length:
            raise ValueError(f"index: expected at most {self.context_length} steps, got {time}")
        x = self.drop(self.tok_emb(index) + self.pos_emb[:, :time])
        logits = self.head(self.ln(self.layers(x)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, index: Tensor, max_new_tokens: int) -> Tensor:
        for _ in range(max_new_tokens):
            probs = F.softmax(self(index[:, -self.context_length :])[0][:, -1], dim=-1)
            index = torch.cat([index, torch.multinomial(probs, num_samples=1)], dim=1)
        return index
