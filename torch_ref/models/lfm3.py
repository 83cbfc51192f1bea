"""Liquid AI's LFM3 in plain PyTorch, with the keys of transformers."""

__all__ = ["LFM3LanguageModel"]

from typing import Any

from torch import Tensor, nn

from torch_ref.layers.attention import Attention
from torch_ref.layers.short_convolution import ShortConvolution
from torch_ref.models.hybrid import HybridLanguageModel, State
from torch_ref.models.lfm2 import LFM2MLP


class LFM3Block(nn.Module):
    """`x ← x + norm(mixer(norm(x)))`, then `x ← x + norm(mlp(norm(x)))`.

    The norms of the outputs are optional. The state is that of the mixer.
    """

    def __init__(self, config: Any, kind: str):
        super().__init__()

        def norm() -> nn.Module:
            return nn.RMSNorm(config.features, eps=config.epsilon)

        self.operator_norm, self.ffn_norm = norm(), norm()
        self.is_conv = kind == "conv"
        if self.is_conv:
            sizes = {"kernel_size": config.kernel_size, "use_bias": config.conv_bias}
            self.conv = ShortConvolution(config.features, **sizes)
        else:
            self.self_attn = attention_of(config, kind == "sliding_attention")
        self.feed_forward = LFM2MLP(config.features, config.mlp_features)
        both = config.sandwich_norm
        self.post_operator_norm = norm() if both else nn.Identity()
        self.post_ffn_norm = norm() if both else nn.Identity()

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        mixer = self.conv if self.is_conv else self.self_attn
        y, last = mixer(self.operator_norm(x), state)
        x = x + self.post_operator_norm(y)
        return x + self.post_ffn_norm(self.feed_forward(self.ffn_norm(x))), last


def attention_of(config: Any, slides: bool) -> Attention:
    """Builds the attention of a block, over a window if it slides."""
    fraction = config.sliding_rotary_fraction if slides else config.rotary_fraction
    return Attention(
        config.features,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_features=config.head_size,
        window=config.window if slides else None,
        rotary_pairs=int(fraction * config.head_size // 2),
        rope_theta=config.sliding_rope_theta if slides else config.rope_theta,
        qk_norm="head",
        epsilon=config.epsilon,
        head_gate=config.head_gate,
        use_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )


class LFM3LanguageModel(HybridLanguageModel):
    """Token embedding → blocks with a short convolution or attention → RMSNorm → Linear."""

    @classmethod
    def from_config(cls, config: Any) -> "LFM3LanguageModel":
        """Builds the twin of the model of a JAX config."""
        blocks: list[nn.Module] = [LFM3Block(config, kind) for kind in config.mixings]
        norm = nn.RMSNorm(config.features, eps=config.epsilon)
        return cls(config, blocks, norm, "embedding_norm")
