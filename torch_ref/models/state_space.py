"""What the language models of Mamba, Mamba-2 and Nemotron-H share, in plain PyTorch."""

__all__: list[str] = []  # only the modules of the models import it

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from torch_ref.models.hybrid import State


class StateSpaceBlock(nn.Module):
    """`x ← x + mixer(norm(x))`; the state is that of the mixer, or None if it has none."""

    def __init__(self, config: Any, mixer: nn.Module, *, has_state: bool = True):
        super().__init__()
        self.norm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.mixer = mixer
        self.has_state = has_state

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        n = self.norm(x)
        y, last = self.mixer(n, state) if self.has_state else (self.mixer(n), None)
        return x + y, last


class Backbone(nn.Module):
    """Token embedding → blocks → RMSNorm."""

    def __init__(self, config: Any, blocks: Iterable[nn.Module]):
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.features)
        self.layers = nn.ModuleList(blocks)
        self.norm_f = nn.RMSNorm(config.features, eps=config.epsilon)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, states = self.embeddings(tokens), []
        for i, layer in enumerate(self.layers):
            x, last = layer(x, None if state is None else state[i])
            states.append(last)
        return self.norm_f(x), tuple(states)


class StateSpaceLanguageModel(nn.Module):
    """The backbone → Linear, whose matrix may be the token embedding.

    tokens are (batch, time), the logits are (batch, time, vocab_size), and the state holds the
    states of the blocks.
    """

    context_length = None

    def __init__(self, config: Any):
        super().__init__()
        blocks = [StateSpaceBlock(config, self.mixer(config)) for _ in range(config.num_layers)]
        self.backbone = Backbone(config, blocks)
        self.lm_head = nn.Linear(config.features, config.vocab_size, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.backbone.embeddings.weight

    @staticmethod
    def mixer(config: Any) -> nn.Module:
        """Builds the mixer of a block."""
        raise NotImplementedError  # a subclass defines it

    @classmethod
    def from_config(cls, config: Any) -> "StateSpaceLanguageModel":
        """Builds the twin of the model of a JAX config."""
        return cls(config)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, states = self.backbone(tokens, state)
        return self.lm_head(x), states
