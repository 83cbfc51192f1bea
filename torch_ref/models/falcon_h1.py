"""Falcon-H1 in plain PyTorch, with the keys of transformers."""

__all__ = ["FalconH1LanguageModel"]

from typing import Any

import torch
from torch import Tensor, nn

from torch_ref.layers.attention import Attention
from torch_ref.layers.mamba2 import Mamba2
from torch_ref.layers.mlp import GatedMLP
from torch_ref.models.hybrid import HybridLanguageModel, State, mamba2_of


class FalconH1Mamba2(Mamba2):
    """A Mamba-2 that multiplies z, u, B, C and dt by `multipliers`."""

    multipliers: tuple[float, ...] = (1.0,) * 5

    def project(self, x: Tensor) -> Tensor:
        parts = super().project(x).split([self.sizes[0], *self.sizes, self.heads], dim=-1)
        return torch.cat([m * y for m, y in zip(self.multipliers, parts, strict=True)], dim=-1)


class FalconH1MLP(GatedMLP):
    """`y = m₁ (silu(m₀ x W_gate) ⊙ x W_up) W_down`."""

    multipliers: tuple[float, ...] = (1.0,) * 2

    def forward(self, x: Tensor) -> Tensor:
        of_gate, of_output = self.multipliers
        gate = self.activation(of_gate * self.gate_proj(x))
        return of_output * self.down_proj(gate * self.up_proj(x))


class FalconH1Block(nn.Module):
    """Two mixers side by side, then an MLP, each after a norm.

        n = norm(x)
        x ← x + m_out · mamba(m_in · n) + a_out · attention(a_in · n)
        x ← x + mlp(norm(x))

    m and a are the multipliers of the Mamba-2 and of the attention. The state is (that of the
    Mamba-2, that of the attention).
    """

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.input_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.mamba = mamba2_of(
            config,
            FalconH1Mamba2,
            out_bias=config.mamba_out_bias,
            use_norm=config.mamba_norm,
            norm_before_gate=config.norm_before_gate,
        )
        self.mamba.multipliers = config.mamba_multipliers
        self.self_attn = Attention(
            config.features,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_features=config.head_size,
            rope_theta=config.rope_theta,
            use_bias=config.attention_bias,
            out_bias=config.attention_bias,
            scale=config.key_multiplier * config.head_size**-0.5,
        )
        self.pre_ff_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.feed_forward = FalconH1MLP(
            config.features, config.mlp_features, activation="silu", use_bias=config.mlp_bias
        )
        self.feed_forward.multipliers = config.mlp_multipliers

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        c, (mamba, attention) = self.config, (None, None) if state is None else state
        n = self.input_layernorm(x)
        y, mamba = self.mamba(c.mamba_in_multiplier * n, mamba)
        z, attention = self.self_attn(c.attention_in_multiplier * n, attention)
        x = x + c.mamba_out_multiplier * y + c.attention_out_multiplier * z
        return x + self.feed_forward(self.pre_ff_layernorm(x)), (mamba, attention)


class FalconH1LanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Mamba-2 and attention → RMSNorm → Linear.

    The embeddings and the logits are multiplied.
    """

    head_multiplier = 1.0

    @classmethod
    def from_config(cls, config: Any) -> "FalconH1LanguageModel":
        """Builds the twin of the model of a JAX config."""
        blocks: list[nn.Module] = [FalconH1Block(config) for _ in config.mixings]
        norm = nn.RMSNorm(config.features, eps=config.epsilon)
        model = cls(config, blocks, norm, "final_layernorm")
        model.model.multiplier = config.embedding_multiplier
        model.head_multiplier = config.head_multiplier
        return model

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        logits, last = super().forward(tokens, state)
        return self.head_multiplier * logits, last
