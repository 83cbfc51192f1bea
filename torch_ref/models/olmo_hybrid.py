"""OLMo Hybrid in plain PyTorch, with the keys of the `state_dict` in transformers."""

__all__ = ["OLMoHybridLanguageModel"]

from typing import Any

from torch import Tensor, nn

from torch_ref.layers.attention import Attention
from torch_ref.layers.gated_delta_net import OLMoHybridGatedDeltaNet
from torch_ref.layers.mlp import GatedMLP
from torch_ref.models.hybrid import HybridLanguageModel, State, delta_net_of


class OLMoHybridLinearBlock(nn.Module):
    """`x ← x + mixer(norm(x))`, then `x ← x + mlp(norm(x))`; the state is that of the mixer.

    The ε of the mixer's own norm is 1e-5, whatever the config says.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.linear_attn = delta_net_of(
            config,
            OLMoHybridGatedDeltaNet,
            negative_eigenvalues=config.negative_eigenvalues,
            epsilon=1e-5,
        )
        self.post_attention_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.mlp = GatedMLP(config.features, config.mlp_features, activation="silu")

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, last = self.linear_attn(self.input_layernorm(x), state)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), last


class OLMoHybridAttentionBlock(nn.Module):
    """`x ← x + norm(attention(x))`, then `x ← x + norm(mlp(x))`.

    Without a `rope_theta`, nothing is rotated.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.self_attn = Attention(
            config.features,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_features=config.head_features,
            rotary_features=0 if config.rope_theta is None else None,
            rope_theta=config.rope_theta or 1.0,
            qk_norm="all",
            epsilon=config.epsilon,
            use_bias=config.attention_bias,
            out_bias=config.attention_bias,
        )
        self.post_attention_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.mlp = GatedMLP(config.features, config.mlp_features, activation="silu")
        self.post_feedforward_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, last = self.self_attn(x, state)
        x = x + self.post_attention_layernorm(y)
        return x + self.post_feedforward_layernorm(self.mlp(x)), last


class OLMoHybridLanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Gated DeltaNet or attention → RMSNorm → Linear."""

    @classmethod
    def from_config(cls, config: Any) -> "OLMoHybridLanguageModel":
        """Builds the twin of the model of a JAX config."""
        kinds = {
            "linear_attention": OLMoHybridLinearBlock,
            "full_attention": OLMoHybridAttentionBlock,
        }
        blocks: list[nn.Module] = [kinds[kind](config) for kind in config.mixings]
        return cls(config, blocks, nn.RMSNorm(config.features, eps=config.epsilon))
