"""The Mamba-2 language model in plain PyTorch, with the keys of transformers."""

__all__ = ["Mamba2LanguageModel"]

from typing import Any

from torch import Tensor, nn

from torch_ref.layers.mamba2 import Mamba2
from torch_ref.models.hybrid import State


class Mamba2Block(nn.Module):
    """`x ← x + mixer(norm(x))`; the state is that of the mixer."""

    def __init__(self, config: Any):
        super().__init__()
        self.norm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.mixer = Mamba2(
            config.features,
            num_heads=config.num_heads,
            head_features=config.head_features,
            state_features=config.state_features,
            num_groups=config.num_groups,
            kernel_size=config.kernel_size,
            use_bias=config.use_bias,
            conv_bias=config.conv_bias,
            dt_limits=config.dt_limits,
            epsilon=config.epsilon,
        )

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, last = self.mixer(self.norm(x), state)
        return x + y, last


class Backbone(nn.Module):
    """Token embedding → blocks → RMSNorm."""

    def __init__(self, config: Any):
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.features)
        self.layers = nn.ModuleList(Mamba2Block(config) for _ in range(config.num_layers))
        self.norm_f = nn.RMSNorm(config.features, eps=config.epsilon)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, states = self.embeddings(tokens), []
        for i, layer in enumerate(self.layers):
            x, last = layer(x, None if state is None else state[i])
            states.append(last)
        return self.norm_f(x), tuple(states)


class Mamba2LanguageModel(nn.Module):
    """The backbone → Linear, whose matrix may be the token embedding.

    tokens are (batch, time), the logits are (batch, time, vocab_size), and the state holds the
    states of the blocks.
    """

    context_length = None

    def __init__(self, config: Any):
        super().__init__()
        self.backbone = Backbone(config)
        self.lm_head = nn.Linear(config.features, config.vocab_size, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.backbone.embeddings.weight

    @classmethod
    def from_config(cls, config: Any) -> "Mamba2LanguageModel":
        """Builds the twin of the model of a JAX config."""
        return cls(config)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, states = self.backbone(tokens, state)
        return self.lm_head(x), states
