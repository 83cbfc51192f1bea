"""MiniMax-Text-01 in plain PyTorch, with the keys of transformers."""

__all__ = ["MiniMaxLanguageModel"]

from typing import Any

from torch import Tensor, nn

from torch_ref.layers.attention import Attention
from torch_ref.layers.lightning_attention import LightningAttention
from torch_ref.models.hybrid import HybridLanguageModel, StackedExperts, State


class MiniMaxExperts(nn.Module):
    """Experts, of which the router chooses those with the largest s = softmax(x W) for each token.

    Their weights are s divided by the sum over the chosen experts.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.gate = nn.Linear(config.features, config.num_experts, bias=False)
        self.experts = StackedExperts(config.features, config.expert_features, config.num_experts)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(dim=-1).topk(self.experts_per_token)
        return self.experts(x, weights / weights.sum(dim=-1, keepdim=True), chosen)


class MiniMaxBlock(nn.Module):
    """`n = norm(x)`, `x ← α n + β mixer(n)`, then the same with the experts and with their factors.

    The state is that of the mixer.
    """

    def __init__(self, config: Any, kind: str, number: int):
        super().__init__()
        sizes = {"num_heads": config.num_heads, "head_features": config.head_size}
        if kind == "linear_attention":
            self.factors = config.lightning_alpha, config.lightning_beta
            place = {"layer_index": number, "num_layers": config.num_layers}
            self.self_attn = LightningAttention(config.features, **sizes, **place)
        else:
            self.factors = config.full_alpha, config.full_beta
            self.self_attn = Attention(
                config.features,
                **sizes,
                num_kv_heads=config.num_kv_heads,
                rotary_features=config.rotary_features,
                rope_theta=config.rope_theta,
            )
        self.mlp_factors = config.mlp_alpha, config.mlp_beta
        self.input_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.post_attention_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.mlp = MiniMaxExperts(config)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        n = self.input_layernorm(x)
        y, last = self.self_attn(n, state)
        alpha, beta = self.factors
        n = self.post_attention_layernorm(alpha * n + beta * y)
        alpha, beta = self.mlp_factors
        return alpha * n + beta * self.mlp(n), last


class MiniMaxLanguageModel(HybridLanguageModel):
    """Token embedding → blocks with lightning or full attention → RMSNorm → Linear."""

    @classmethod
    def from_config(cls, config: Any) -> "MiniMaxLanguageModel":
        """Builds the twin of the model of a JAX config."""
        blocks: list[nn.Module] = [
            MiniMaxBlock(config, kind, number) for number, kind in enumerate(config.mixings)
        ]
        return cls(config, blocks, nn.RMSNorm(config.features, eps=config.epsilon))
