"""The text model of Qwen3.5 in plain PyTorch, also with experts, with the keys of transformers."""

__all__ = ["Qwen35LanguageModel"]

from typing import Any

import torch
from torch import Tensor, nn

from torch_ref.layers.attention import Attention
from torch_ref.layers.gated_delta_net import GatedDeltaNet
from torch_ref.layers.mlp import GatedMLP
from torch_ref.layers.norm import ZeroCenteredRMSNorm
from torch_ref.models.hybrid import HybridLanguageModel, StackedExperts, State, delta_net_of


class Qwen35Experts(nn.Module):
    """`Σ w_e expert_e(x) + σ(x w_shared) shared_expert(x)` over the experts with the largest w.

    w is the softmax of all experts' logits, and is divided by its sum over the chosen ones if
    `normalize`. Without a `shared_gate`, the shared expert is added as it is.
    """

    def __init__(
        self, config: Any, shared_features: int, normalize: bool, shared_gate: bool = True
    ):
        super().__init__()
        features = config.features
        self.experts_per_token, self.normalize = config.experts_per_token, normalize
        self.gate = nn.Linear(features, config.num_experts, bias=False)
        self.experts = StackedExperts(features, config.expert_features, config.num_experts)
        self.shared_expert = GatedMLP(features, shared_features, activation="silu")
        self.shared_expert_gate = nn.Linear(features, 1, bias=False) if shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(dim=-1).topk(self.experts_per_token)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        shared = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = torch.sigmoid(self.shared_expert_gate(x)) * shared
        return self.experts(x, weights, chosen) + shared


class Qwen35Block(nn.Module):
    """`x ← x + mixer(norm(x))`, then `x ← x + mlp(norm(x))`; the state is that of the mixer."""

    mixer: type[GatedDeltaNet] = GatedDeltaNet

    def __init__(self, config: Any, kind: str, mlp: nn.Module):
        super().__init__()
        self.input_layernorm = ZeroCenteredRMSNorm(config.features, epsilon=config.epsilon)
        self.is_linear = kind == "linear_attention"
        if self.is_linear:
            self.linear_attn = delta_net_of(config, self.mixer)
        else:
            self.self_attn = Attention(
                config.features,
                config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_features=config.head_size,
                rotary_features=int(config.head_size * config.rotary_fraction),
                rope_theta=config.rope_theta,
                qk_norm="head",
                zero_centered_norm=True,
                epsilon=config.epsilon,
                output_gate=True,
                use_bias=config.attention_bias,
                out_bias=config.attention_bias,
            )
        self.post_attention_layernorm = ZeroCenteredRMSNorm(config.features, epsilon=config.epsilon)
        self.mlp = mlp

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        mixer = self.linear_attn if self.is_linear else self.self_attn
        y, last = mixer(self.input_layernorm(x), state)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), last


class Qwen35LanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Gated DeltaNet or gated attention → RMSNorm → Linear."""

    @classmethod
    def from_config(cls, config: Any) -> "Qwen35LanguageModel":
        """Builds the twin of the model of a JAX config."""

        def mlp() -> nn.Module:
            if config.num_experts:
                return Qwen35Experts(config, config.mlp_features, normalize=True)
            return GatedMLP(config.features, config.mlp_features, activation="silu")

        blocks: list[nn.Module] = [Qwen35Block(config, kind, mlp()) for kind in config.mixings]
        return cls(config, blocks, ZeroCenteredRMSNorm(config.features, epsilon=config.epsilon))
