"""The language model over Hyena or attention blocks in plain PyTorch."""

__all__ = ["GPModel"]

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_ref.layers.hyena import AuthenticHyenaBlock, HyenaBlock
from torch_ref.layers.self_attention import SelfAttentionBlock

State = tuple[Any, int]


class GPModel(nn.Module):
    """Token and position embeddings → dropout → blocks → LayerNorm → the token embedding again.

    tokens are (batch, time), and the logits are (batch, time, vocab_size). The state holds the
    states of the blocks and the number of tokens so far. `block` is called once per layer and
    returns a module `block(x, state) -> (y, state)` with x and y (batch, time, features).
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
        self.layers = nn.ModuleList(block() for _ in range(num_layers))
        self.ln = nn.LayerNorm(features)
        self.head = nn.Linear(features, vocab_size, bias=False)
        self.head.weight = self.tok_emb.weight

    @classmethod
    def from_config(cls, config: Any) -> "GPModel":
        """Builds the twin of the model of a JAX config."""

        def block() -> nn.Module:
            if config.block == "attention":
                return SelfAttentionBlock(
                    config.features, config.num_heads, dropout_rate=config.block_dropout_rate
                )
            sizes = (config.features, config.context_length)
            options = {
                "order": config.order,
                "kernel_size": config.kernel_size,
                "dropout_rate": config.block_dropout_rate,
            }
            if config.block == "hyena":
                return HyenaBlock(*sizes, **options)
            if config.block == "authentic-hyena":
                return AuthenticHyenaBlock(
                    *sizes,
                    **options,
                    embed_features=config.embed_features,
                    mlp_features=config.mlp_features,
                    num_filter_layers=config.num_filter_layers,
                    omega=config.omega,
                    implicit=config.implicit,
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

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        before, start = ([None] * len(self.layers), 0) if state is None else state
        end = start + tokens.shape[1]
        if end > self.context_length:
            raise ValueError(f"tokens: expected at most {self.context_length}, got {end}")
        x = self.drop(self.tok_emb(tokens) + self.pos_emb[:, start:end])
        after = []
        for layer, layer_state in zip(self.layers, before, strict=True):
            x, layer_state = layer(x, layer_state)
            after.append(layer_state)
        return self.head(self.ln(x)), (after, end)
