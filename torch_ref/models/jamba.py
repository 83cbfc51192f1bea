"""AI21's Jamba in plain PyTorch, with the keys of transformers."""

__all__ = ["JambaLanguageModel"]

from typing import Any

from torch import Tensor, nn

from torch_ref.layers.attention import Attention
from torch_ref.layers.mamba import Mamba
from torch_ref.layers.mlp import GatedMLP
from torch_ref.models.hybrid import HybridLanguageModel, StackedExperts, State


class JambaExperts(nn.Module):
    """Experts, of which the router chooses those with the largest s = softmax(x W) for each token.

    Their weights are s, which do not add up to one.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.router = nn.Linear(config.features, config.num_experts, bias=False)
        self.experts = StackedExperts(config.features, config.mlp_features, config.num_experts)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(dim=-1).topk(self.experts_per_token)
        return self.experts(x, weights, chosen)


class JambaBlock(nn.Module):
    """`x ← x + mixer(norm(x))`, then `x ← x + mlp(norm(x))`; the state is that of the mixer."""

    def __init__(self, config: Any, kind: str, number: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.has_mamba = kind == "linear_attention"
        if self.has_mamba:
            self.mamba = Mamba(
                config.features,
                inner_features=config.inner_features,
                state_features=config.state_features,
                dt_rank=config.dt_rank,
                kernel_size=config.kernel_size,
                use_bias=config.mamba_bias,
                conv_bias=config.conv_bias,
                norm="scaled",
                epsilon=config.epsilon,
            )
        else:
            self.self_attn = Attention(
                config.features,
                config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_features=config.head_features,
                rotary_features=0,
            )
        self.pre_ff_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        is_chosen = number % config.experts_period == config.experts_offset
        if config.num_experts > 1 and is_chosen:
            self.feed_forward = JambaExperts(config)
        else:
            self.feed_forward = GatedMLP(config.features, config.mlp_features, activation="silu")

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        mixer = self.mamba if self.has_mamba else self.self_attn
        y, last = mixer(self.input_layernorm(x), state)
        x = x + y
        return x + self.feed_forward(self.pre_ff_layernorm(x)), last


class JambaLanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Mamba or attention → RMSNorm → Linear."""

    @classmethod
    def from_config(cls, config: Any) -> "JambaLanguageModel":
        """Builds the twin of the model of a JAX config."""
        blocks: list[nn.Module] = [
            JambaBlock(config, kind, number) for number, kind in enumerate(config.mixings)
        ]
        norm = nn.RMSNorm(config.features, eps=config.epsilon)
        return cls(config, blocks, norm, "final_layernorm")
