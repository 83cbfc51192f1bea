"""Lara Mini in plain PyTorch, with the keys of transformers."""

__all__ = ["LaraMiniLanguageModel"]

from typing import Any

from torch import Tensor, nn

from torch_ref.layers.attention import Attention
from torch_ref.models.hybrid import HybridLanguageModel, State, delta_net_of
from torch_ref.models.qwen3_5 import Qwen35Experts


class LaraMiniBlock(nn.Module):
    """`x ← x + mixer(norm(x))`, then `x ← x + experts(norm(x))`; the state is that of the mixer.

    Attention rotates queries and keys if it has a window.
    """

    def __init__(self, config: Any, kind: str):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.is_linear = kind == "linear_attention"
        slides = kind == "sliding_attention"
        if self.is_linear:
            self.linear_attn = delta_net_of(config)
        else:
            self.self_attn = Attention(
                config.features,
                config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_features=config.head_size,
                window=config.window if slides else None,
                rotary_features=None if slides else 0,
                rope_theta=config.rope_theta,
                qk_norm="head",
                epsilon=config.epsilon,
                use_bias=config.attention_bias,
                out_bias=config.attention_bias,
            )
        self.post_attention_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.mlp = Qwen35Experts(
            config, config.shared_features, config.normalize_experts, shared_gate=False
        )

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        mixer = self.linear_attn if self.is_linear else self.self_attn
        y, last = mixer(self.input_layernorm(x), state)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), last


class LaraMiniLanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Gated DeltaNet or attention → RMSNorm → Linear."""

    @classmethod
    def from_config(cls, config: Any) -> "LaraMiniLanguageModel":
        """Builds the twin of the model of a JAX config."""
        blocks: list[nn.Module] = [LaraMiniBlock(config, kind) for kind in config.mixings]
        return cls(config, blocks, nn.RMSNorm(config.features, eps=config.epsilon))
