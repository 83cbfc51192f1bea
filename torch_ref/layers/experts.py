"""A mixture of experts in plain PyTorch."""

__all__ = ["Experts"]

from typing import Any

import torch
from torch import Tensor, nn

from torch_ref.layers.mlp import MLP, GatedMLP


class Experts(nn.Module):
    """A router chooses some of many MLPs for each token.

        s = softmax(x W_router),    or σ(x W_router)
        chosen: the experts with the largest s + expert_bias, from the best groups
        w_e = scale · s_e / (Σ s + ε)        over the chosen experts
        y = Σ_e w_e expert_e(x) + σ(x w_shared) shared(x)

    A group is rated by the sum of its two largest s + expert_bias. Without `normalize`, w_e = scale
    · s_e. expert_bias, groups, the shared expert and its gate are optional. With `latent_features`,
    the experts read x W_in + b_in, and their weighted sum is mapped by W_out and b_out. The router
    and the shared expert still read x.
    """

    def __init__(
        self,
        features: int,
        expert_features: int,
        num_experts: int,
        experts_per_token: int,
        *,
        scores: str = "softmax",
        normalize: bool = True,
        epsilon: float = 1e-20,
        scale: float = 1.0,
        use_expert_bias: bool = False,
        num_groups: int = 1,
        groups_per_token: int = 1,
        activation: str = "silu",
        gated: bool = True,
        shared_features: int | None = None,
        shared_gate: bool = False,
        latent_features: int | None = None,
        use_bias: bool = False,
    ):
        super().__init__()
        self.experts_per_token = experts_per_token
        self.scores, self.normalize, self.epsilon, self.scale = scores, normalize, epsilon, scale
        self.num_groups, self.groups_per_token = num_groups, groups_per_token
        self.router = nn.Linear(features, num_experts, bias=False)
        if use_expert_bias:
            self.register_buffer("expert_bias", torch.zeros(num_experts))
        else:
            self.expert_bias = None
        mlp: Any = GatedMLP if gated else MLP
        self.experts = nn.ModuleList(
            mlp(latent_features or features, expert_features, activation=activation)
            for _ in range(num_experts)
        )
        if shared_features is None:
            self.shared = None
        else:
            self.shared = mlp(features, shared_features, activation=activation, use_bias=use_bias)
        self.shared_gate = nn.Linear(features, 1, bias=False) if shared_gate else None
        latent = latent_features
        self.latent_in = nn.Linear(features, latent, bias=use_bias) if latent else nn.Identity()
        self.latent_out = nn.Linear(latent, features, bias=use_bias) if latent else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        inputs = self.latent_in(x)
        y = torch.zeros_like(inputs)
        for i, expert in enumerate(self.experts):
            weight = torch.where(chosen == i, weights, 0).sum(dim=-1, keepdim=True)
            y = y + weight * expert(inputs)
        y = self.latent_out(y)
        if self.shared is None:
            return y
        if self.shared_gate is None:
            return y + self.shared(x)
        return y + torch.sigmoid(self.shared_gate(x)) * self.shared(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights and the numbers of the chosen experts."""
        logits = self.router(x)
        scores = logits.softmax(dim=-1) if self.scores == "softmax" else logits.sigmoid()
        biased = scores if self.expert_bias is None else scores + self.expert_bias
        if self.num_groups > 1:
            groups = biased.unflatten(-1, (self.num_groups, -1))
            ratings = groups.topk(2).values.sum(dim=-1)
            best = ratings.topk(self.groups_per_token).indices
            leaves = torch.ones_like(ratings, dtype=torch.bool).scatter(-1, best, False)
            biased = groups.masked_fill(leaves[..., None], -torch.inf).flatten(-2)
        chosen = biased.topk(self.experts_per_token).indices
        weights = scores.gather(-1, chosen)
        if self.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + self.epsilon)
        return self.scale * weights, chosen
