"""The Hawk language model in plain PyTorch (Griffin, arXiv 2402.19427)."""

__all__ = ["HawkLanguageModel"]

from typing import Any

from torch import Tensor, nn

from torch_ref.layers.hawk import HawkBlock

State = tuple[Any, ...]


class HawkLanguageModel(nn.Module):
    """Token embedding → Hawk blocks → RMSNorm → Linear.

    tokens are (batch, time), the logits are (batch, time, vocab_size), and the state holds the
    states of the blocks.
    """

    context_length = None

    def __init__(
        self,
        vocab_size: int,
        features: int,
        num_layers: int,
        mlp_features: int,
        *,
        kernel_size: int = 4,
        parameterization: str = "softplus",
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, features)
        self.blocks = nn.ModuleList(
            HawkBlock(
                features, mlp_features, kernel_size=kernel_size, parameterization=parameterization
            )
            for _ in range(num_layers)
        )
        self.final_norm = nn.RMSNorm(features, eps=1e-6)
        self.head = nn.Linear(features, vocab_size, bias=False)

    @classmethod
    def from_config(cls, config: Any) -> "HawkLanguageModel":
        """Builds the twin of the model of a JAX config."""
        return cls(
            config.vocab_size,
            config.features,
            config.num_layers,
            config.mlp_features,
            kernel_size=config.kernel_size,
            parameterization=config.parameterization or "softplus",
        )

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, states = self.embedding(tokens), []
        for i, block in enumerate(self.blocks):
            x, last = block(x, None if state is None else state[i])
            states.append(last)
        return self.head(self.final_norm(x)), tuple(states)
