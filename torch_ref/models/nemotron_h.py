"""Nemotron-H in plain PyTorch, with the keys of transformers."""

__all__ = ["NemotronHLanguageModel"]

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.attention import Attention
from torch_ref.layers.mlp import MLP
from torch_ref.models.hybrid import State, mamba2_of
from torch_ref.models.state_space import Backbone, StateSpaceBlock


class NemotronHRouter(nn.Module):
    """Chooses the experts with the largest s + bias from the best groups, s = σ(x W).

    A group is rated by the sum of its two largest s + bias. The weights are s ÷ Σ s of the chosen
    experts, times a factor.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.features))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        scores = F.linear(x, self.weight).sigmoid()
        groups = (scores + self.e_score_correction_bias).unflatten(-1, (c.num_expert_groups, -1))
        ratings = groups.topk(2).values.sum(dim=-1)
        best = ratings.topk(c.expert_groups_per_token).indices
        leaves = torch.ones_like(ratings, dtype=torch.bool).scatter(-1, best, False)
        biased = groups.masked_fill(leaves[..., None], -torch.inf).flatten(-2)
        chosen = biased.topk(c.experts_per_token).indices
        weights = scores.gather(-1, chosen)
        if c.normalize_experts:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return c.experts_scale * weights, chosen


class StackedExperts(nn.Module):
    """`y = Σ w_e relu(x W_up,e)² W_down,e` over the chosen experts, whose matrices are stacked."""

    def __init__(self, features: int, expert_features: int, num_experts: int):
        super().__init__()
        inner, outer = (expert_features, features), (features, expert_features)
        self.up_proj = nn.Parameter(torch.randn(num_experts, *inner) / features**0.5)
        self.down_proj = nn.Parameter(torch.randn(num_experts, *outer) / expert_features**0.5)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for i, (up, down) in enumerate(zip(self.up_proj, self.down_proj, strict=True)):
            weight = torch.where(chosen == i, weights, 0).sum(dim=-1, keepdim=True)
            y = y + weight * F.linear(F.linear(x, up).relu() ** 2, down)
        return y


class NemotronHExperts(nn.Module):
    """`y = experts(x W₁) W₂ + shared_experts(x)`, or without the projections `experts(x) + …`.

    The router reads x.
    """

    def __init__(self, config: Any):
        super().__init__()
        features, latent, bias = config.features, config.latent_features, config.mlp_bias
        self.gate = NemotronHRouter(config)
        self.experts = StackedExperts(
            latent or features, config.expert_features, config.num_experts
        )
        self.shared_experts = MLP(features, config.shared_features, use_bias=bias)
        self.fc1_latent_proj = nn.Linear(features, latent, bias=bias) if latent else nn.Identity()
        self.fc2_latent_proj = nn.Linear(latent, features, bias=bias) if latent else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.experts(self.fc1_latent_proj(x), *self.gate(x))
        return self.fc2_latent_proj(y) + self.shared_experts(x)


def mixer_of(config: Any, kind: str) -> nn.Module:
    """Builds the mixer of a block of a kind."""
    if kind == "linear_attention":
        return mamba2_of(config)
    if kind == "full_attention":
        return Attention(
            config.features,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_features=config.head_features,
            rotary_features=0,
        )
    if kind == "moe":
        return NemotronHExperts(config)
    return MLP(config.features, config.mlp_features, use_bias=config.mlp_bias)


def block_of(config: Any, kind: str) -> StateSpaceBlock:
    """Builds a block of a kind. MLPs and experts have no state."""
    has_state = kind in ("linear_attention", "full_attention")
    return StateSpaceBlock(config, mixer_of(config, kind), has_state=has_state)


class NemotronHLanguageModel(nn.Module):
    """The backbone → Linear."""

    context_length = None

    def __init__(self, config: Any):
        super().__init__()
        self.model = Backbone(config, [block_of(config, kind) for kind in config.mixings])
        self.lm_head = nn.Linear(config.features, config.vocab_size, bias=False)

    @classmethod
    def from_config(cls, config: Any) -> "NemotronHLanguageModel":
        """Builds the twin of the model of a JAX config."""
        return cls(config)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, states = self.model(tokens, state)
        return self.lm_head(x), states
