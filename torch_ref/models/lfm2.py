"""Liquid AI's LFM2 in plain PyTorch, also with experts, with the keys of transformers."""

__all__ = ["LFM2LanguageModel"]

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.attention import empty_cache, local_attention
from torch_ref.layers.short_convolution import ShortConvolution
from torch_ref.models.hybrid import HybridLanguageModel, StackedExperts, State


class LFM2Attention(nn.Module):
    """Causal attention with grouped queries, whose queries and keys are normed by head.

    The state is (position, keys, values), with a slot for each step so far.
    """

    def __init__(self, config: Any):
        super().__init__()
        features, self.theta = config.features, config.rope_theta
        self.size = config.head_size
        self.num_kv_heads = config.num_kv_heads
        self.q_proj = nn.Linear(features, config.num_heads * self.size, bias=False)
        self.k_proj = nn.Linear(features, self.num_kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(features, self.num_kv_heads * self.size, bias=False)
        self.out_proj = nn.Linear(config.num_heads * self.size, features, bias=False)
        self.q_layernorm = nn.RMSNorm(self.size, eps=config.epsilon)
        self.k_layernorm = nn.RMSNorm(self.size, eps=config.epsilon)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.size))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_layernorm(q), self.k_layernorm(k)
        if state is None:
            state = empty_cache(self.k_proj.weight, len(x), 1, self.num_kv_heads, self.size)
        position, *cache = state
        # Make room for the keys and values of these steps.
        keys, values = (F.pad(a, (0, 0, 0, 0, 0, x.shape[1])) for a in cache)
        state = position, keys, values
        y, state = local_attention(q, k, v, state, rotated=self.size, theta=self.theta)
        return self.out_proj(y.flatten(-2)), state


class LFM2MLP(nn.Module):
    """`y = (silu(x W_1) ⊙ x W_3) W_2`."""

    def __init__(self, features: int, mlp_features: int):
        super().__init__()
        self.w1 = nn.Linear(features, mlp_features, bias=False)
        self.w3 = nn.Linear(features, mlp_features, bias=False)
        self.w2 = nn.Linear(mlp_features, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LFM2Router(nn.Module):
    """Returns the weights and the numbers of the experts with the largest s + bias, s = σ(x W).

    The weights are s, or s / (Σ s + 1e-6) over the chosen experts, times a factor.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.experts_per_token, self.scale = config.experts_per_token, config.experts_scale
        self.normalize = config.normalize_experts
        self.weight = nn.Parameter(torch.randn(config.num_experts, config.features))

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).sigmoid()
        chosen = (scores + bias).topk(self.experts_per_token).indices
        weights = scores.gather(-1, chosen)
        if self.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-6)
        return self.scale * weights, chosen


class LFM2Experts(nn.Module):
    """Experts and their router, whose bias, if there is one, is not trained."""

    def __init__(self, config: Any):
        super().__init__()
        self.gate = LFM2Router(config)
        self.experts = StackedExperts(config.features, config.expert_features, config.num_experts)
        bias = torch.zeros(config.num_experts)
        self.register_buffer("expert_bias", bias if config.use_expert_bias else None)

    def forward(self, x: Tensor) -> Tensor:
        bias = x.new_zeros(()) if self.expert_bias is None else self.expert_bias
        return self.experts(x, *self.gate(x, bias))


class LFM2Block(nn.Module):
    """`x ← x + mixer(norm(x))`, then `x ← x + mlp(norm(x))`; the state is that of the mixer."""

    def __init__(self, config: Any, kind: str, number: int):
        super().__init__()
        self.operator_norm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.is_conv = kind == "conv"
        if self.is_conv:
            self.conv = ShortConvolution(
                config.features, kernel_size=config.kernel_size, use_bias=config.conv_bias
            )
        else:
            self.self_attn = LFM2Attention(config)
        self.ffn_norm = nn.RMSNorm(config.features, eps=config.epsilon)
        if config.num_experts and number >= config.num_dense_layers:
            self.feed_forward = LFM2Experts(config)
        else:
            self.feed_forward = LFM2MLP(config.features, config.mlp_features)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        mixer = self.conv if self.is_conv else self.self_attn
        y, last = mixer(self.operator_norm(x), state)
        x = x + y
        return x + self.feed_forward(self.ffn_norm(x)), last


class LFM2LanguageModel(HybridLanguageModel):
    """Token embedding → blocks with a short convolution or attention → RMSNorm → Linear."""

    @classmethod
    def from_config(cls, config: Any) -> "LFM2LanguageModel":
        """Builds the twin of the model of a JAX config."""
        blocks: list[nn.Module] = [
            LFM2Block(config, kind, number) for number, kind in enumerate(config.mixings)
        ]
        norm = nn.RMSNorm(config.features, eps=config.epsilon)
        return cls(config, blocks, norm, "embedding_norm")
