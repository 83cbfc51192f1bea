"""The language model of hippogriff in plain PyTorch (Griffin, arXiv 2402.19427)."""

__all__ = ["HippogriffLanguageModel"]

from typing import Any

from torch import Tensor, nn

from torch_ref.layers.hippogriff import HippogriffBlock, HippogriffNorm

State = tuple[Any, ...]


class HippogriffLanguageModel(nn.Module):
    """Token embedding → blocks → RMSNorm → the token embedding again.

    tokens are (batch, time), the logits are (batch, time, vocab_size), and the state holds the
    states of the blocks.
    """

    context_length = None

    def __init__(self, config: Any):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.features)
        self.backbone = nn.ModuleList(
            HippogriffBlock(
                config.features,
                config.mlp_features,
                config.num_heads,
                hidden_features=config.hidden_features,
                kernel_size=config.kernel_size,
                num_kv_heads=config.num_kv_heads,
                window=config.window,
                version=config.version,
            )
            for _ in range(config.num_layers)
        )
        self.output_norm = HippogriffNorm(config.features)
        self.lm_head = nn.Linear(config.features, config.vocab_size, bias=False)
        self.lm_head.weight = self.embedding.weight

    @classmethod
    def from_config(cls, config: Any) -> "HippogriffLanguageModel":
        """Builds the twin of the model of a JAX config."""
        return cls(config)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, states = self.embedding(tokens), []
        for i, block in enumerate(self.backbone):
            x, last = block(x, None if state is None else state[i])
            states.append(last)
        return self.lm_head(self.output_norm(x)), tuple(states)
