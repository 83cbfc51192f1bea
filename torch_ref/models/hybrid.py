"""The frame of the hybrids of attention with other mixers, and parts that several of them have."""

__all__: list[str] = []  # only the modules of the models import it

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.gated_delta_net import GatedDeltaNet
from torch_ref.layers.mamba2 import Mamba2

State = tuple[Any, ...]


class Backbone(nn.Module):
    """Token embedding → blocks → RMSNorm. The norm's key is `norm_name`.

    The embeddings are multiplied by `multiplier`.
    """

    multiplier = 1.0

    def __init__(self, config: Any, blocks: list[nn.Module], norm: nn.Module, norm_name: str):
        super().__init__()
        self.norm_name = norm_name
        self.embed_tokens = nn.Embedding(config.vocab_size, config.features)
        self.layers = nn.ModuleList(blocks)
        setattr(self, norm_name, norm)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, states = self.multiplier * self.embed_tokens(tokens), []
        for i, layer in enumerate(self.layers):
            x, last = layer(x, None if state is None else state[i])
            states.append(last)
        return getattr(self, self.norm_name)(x), tuple(states)


class HybridLanguageModel(nn.Module):
    """The backbone → Linear, whose matrix may be the token embedding.

    tokens are (batch, time), the logits are (batch, time, vocab_size), and the state holds the
    states of the blocks.
    """

    context_length = None
    backbone = Backbone

    def __init__(
        self, config: Any, blocks: list[nn.Module], norm: nn.Module, norm_name: str = "norm"
    ):
        super().__init__()
        self.model = self.backbone(config, blocks, norm, norm_name)
        self.lm_head = nn.Linear(config.features, config.vocab_size, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, states = self.model(tokens, state)
        return self.lm_head(x), states


class StackedExperts(nn.Module):
    """`gate, up = x W_in,e`, `y = Σ w_e (silu(gate) ⊙ up) W_out,e` over the chosen experts.

    The matrices of all experts are stacked. `weights` and `chosen` are the weights and the numbers
    of each token's experts.
    """

    def __init__(self, features: int, expert_features: int, num_experts: int):
        super().__init__()
        inner, outer = (2 * expert_features, features), (features, expert_features)
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, *inner) / features**0.5)
        self.down_proj = nn.Parameter(torch.randn(num_experts, *outer) / expert_features**0.5)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for i, (inner, outer) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            weight = torch.where(chosen == i, weights, 0).sum(dim=-1, keepdim=True)
            gate, up = F.linear(x, inner).chunk(2, dim=-1)
            y = y + weight * F.linear(F.silu(gate) * up, outer)
        return y


def delta_net_of(
    config: Any, layer: type[GatedDeltaNet] = GatedDeltaNet, **options: Any
) -> GatedDeltaNet:
    """Builds the Gated DeltaNet of a block. `options` are arguments that only some models have."""
    return layer(
        config.features,
        num_key_heads=config.num_key_heads,
        num_value_heads=config.num_value_heads,
        key_features=config.key_features,
        value_features=config.value_features,
        kernel_size=config.kernel_size,
        **{"epsilon": config.epsilon, **options},
    )


def mamba2_of(config: Any, layer: type[Mamba2] = Mamba2, **options: Any) -> Mamba2:
    """Builds the Mamba-2 of a block. `options` are arguments that only some models have."""
    return layer(
        config.features,
        num_heads=config.mamba_heads,
        head_features=config.mamba_head_features,
        state_features=config.state_features,
        num_groups=config.num_groups,
        kernel_size=config.kernel_size,
        use_bias=config.mamba_bias,
        conv_bias=config.conv_bias,
        dt_limits=config.dt_limits,
        **{"epsilon": config.epsilon, **options},
    )
