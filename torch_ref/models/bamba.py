"""Bamba in plain PyTorch, with the keys of transformers."""

__all__ = ["BambaLanguageModel"]

from typing import Any

from torch import Tensor, nn

from torch_ref.layers.attention import Attention
from torch_ref.layers.mlp import GatedMLP
from torch_ref.models.hybrid import HybridLanguageModel, State, mamba2_of


class BambaBlock(nn.Module):
    """`x ← x + mixer(norm(x))`, then `x ← x + mlp(norm(x))`; the state is that of the mixer."""

    def __init__(self, config: Any, kind: str):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.has_mamba = kind == "linear_attention"
        if self.has_mamba:
            self.mamba = mamba2_of(config)
        else:
            self.self_attn = Attention(
                config.features,
                config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_features=config.head_size,
                rotary_features=int(config.head_size * config.rotary_fraction),
                rope_theta=config.rope_theta,
                use_bias=config.attention_bias,
                out_bias=config.attention_bias,
            )
        self.pre_ff_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.feed_forward = GatedMLP(
            config.features, config.mlp_features, activation="silu", use_bias=config.mlp_bias
        )

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        mixer = self.mamba if self.has_mamba else self.self_attn
        y, last = mixer(self.input_layernorm(x), state)
        x = x + y
        return x + self.feed_forward(self.pre_ff_layernorm(x)), last


class BambaLanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Mamba-2 or half-rotated attention → RMSNorm → Linear."""

    @classmethod
    def from_config(cls, config: Any) -> "BambaLanguageModel":
        """Builds the twin of the model of a JAX config."""
        blocks: list[nn.Module] = [BambaBlock(config, kind) for kind in config.mixings]
        norm = nn.RMSNorm(config.features, eps=config.epsilon)
        return cls(config, blocks, norm, "final_layernorm")
