"""The Griffin language model of RecurrentGemma in plain PyTorch (arXiv 2402.19427)."""

__all__ = ["GriffinLanguageModel"]

from typing import Any

import torch
from torch import Tensor, nn

from torch_ref.layers.griffin import GriffinBlock
from torch_ref.layers.norm import ZeroCenteredRMSNorm

State = tuple[Any, ...]


class GriffinBackbone(nn.Module):
    """√features · token embedding → Griffin blocks → RMSNorm."""

    def __init__(self, config: Any):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.features)
        self.scale = 1.0
        if config.scale_embeddings:
            self.scale = torch.tensor(config.features**0.5, dtype=torch.bfloat16).item()
        kinds = config.block_types
        self.layers = nn.ModuleList(
            GriffinBlock(
                config.features,
                config.mlp_features,
                config.num_heads,
                mixing=kinds[i % len(kinds)],
                recurrent_features=config.recurrent_features,
                kernel_size=config.kernel_size,
                num_kv_heads=config.num_kv_heads,
                window=config.window,
                rotary_fraction=config.rotary_fraction,
                rope_theta=config.rope_theta,
                attention_bias=config.attention_bias,
                activation=config.activation,
                epsilon=config.epsilon,
            )
            for i in range(config.num_layers)
        )
        self.final_norm = ZeroCenteredRMSNorm(config.features, epsilon=config.epsilon)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, states = self.scale * self.embed_tokens(tokens), []
        for i, layer in enumerate(self.layers):
            x, last = layer(x, None if state is None else state[i])
            states.append(last)
        return self.final_norm(x), tuple(states)


class GriffinLanguageModel(nn.Module):
    """The backbone → the token embedding again → cap · tanh(logits / cap).

    tokens are (batch, time), the logits are (batch, time, vocab_size), and the state holds the
    states of the blocks.
    """

    context_length = None

    def __init__(self, config: Any):
        super().__init__()
        self.cap = config.logits_soft_cap
        self.model = GriffinBackbone(config)
        self.lm_head = nn.Linear(config.features, config.vocab_size, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def from_config(cls, config: Any) -> "GriffinLanguageModel":
        """Builds the twin of the model of a JAX config."""
        return cls(config)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, states = self.model(tokens, state)
        logits = self.lm_head(x)
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits, states
