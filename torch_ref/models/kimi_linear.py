"""Kimi Linear in plain PyTorch, with the keys of transformers."""

__all__ = ["KimiLinearLanguageModel"]

from typing import Any

from torch import Tensor, nn

from torch_ref.layers.kimi_delta_attention import KimiDeltaAttention
from torch_ref.layers.latent_attention import LatentAttention
from torch_ref.layers.mlp import GatedMLP
from torch_ref.models.hybrid import HybridLanguageModel, StackedExperts, State
from torch_ref.models.nemotron_h import NemotronHRouter


class KimiLinearExperts(nn.Module):
    """`y = experts(x) + shared_experts(x)`, with the router of Nemotron-H."""

    def __init__(self, config: Any):
        super().__init__()
        features, width = config.features, config.expert_features
        self.gate = NemotronHRouter(config)
        self.experts = StackedExperts(features, width, config.num_experts)
        shared = config.num_shared_experts * width
        self.shared_experts = GatedMLP(features, shared, activation="silu")

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x)) + self.shared_experts(x)


class KimiLinearBlock(nn.Module):
    """`x ← x + mixer(norm(x))`, then `x ← x + mlp(norm(x))`; the state is that of the mixer."""

    def __init__(self, config: Any, kind: str, number: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.self_attn = self.mixer(config, kind)
        self.post_attention_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        if config.num_experts and number >= config.num_dense_layers:
            self.mlp = KimiLinearExperts(config)
        else:
            self.mlp = GatedMLP(config.features, config.mlp_features, activation="silu")

    def mixer(self, config: Any, kind: str) -> nn.Module:
        """Builds the mixer of a block of a kind."""
        if kind == "linear_attention":
            return KimiDeltaAttention(
                config.features,
                num_heads=config.delta_heads,
                head_features=config.delta_head_features,
                kernel_size=config.kernel_size,
                epsilon=config.epsilon,
            )
        return LatentAttention(
            config.features,
            config.num_heads,
            latent_features=config.latent_features,
            key_features=config.key_features,
            shared_features=config.shared_features,
            value_features=config.value_features,
            query_features=config.query_features,
            use_bias=config.attention_bias,
        )

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, last = self.self_attn(self.input_layernorm(x), state)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), last


class KimiLinearLanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Kimi Delta Attention or latent attention → RMSNorm → Linear."""

    @classmethod
    def from_config(cls, config: Any) -> "KimiLinearLanguageModel":
        """Builds the twin of the model of a JAX config."""
        blocks: list[nn.Module] = [
            KimiLinearBlock(config, kind, number) for number, kind in enumerate(config.mixings)
        ]
        return cls(config, blocks, nn.RMSNorm(config.features, eps=config.epsilon))
