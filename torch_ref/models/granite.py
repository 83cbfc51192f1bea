"""The hybrids of Granite 4 in plain PyTorch, with the keys of transformers."""

__all__ = ["GraniteLanguageModel"]

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.attention import Attention
from torch_ref.models.hybrid import HybridLanguageModel, StackedExperts, State, mamba2_of


class GraniteMLP(nn.Module):
    """`gate, up = x W_in` side by side, `y = (silu(gate) ⊙ up) W_out`."""

    def __init__(self, features: int, mlp_features: int):
        super().__init__()
        self.input_linear = nn.Linear(features, 2 * mlp_features, bias=False)
        self.output_linear = nn.Linear(mlp_features, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.input_linear(x).chunk(2, dim=-1)
        return self.output_linear(F.silu(gate) * up)


class GraniteExperts(nn.Module):
    """Experts, of which the router chooses those with the largest logits for each token.

    Their weights are the softmax of these logits.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.router = nn.Linear(config.features, config.num_experts, bias=False)
        self.experts = StackedExperts(config.features, config.expert_features, config.num_experts)

    def forward(self, x: Tensor) -> Tensor:
        logits, chosen = self.router(x).topk(self.experts_per_token)
        return self.experts(x, logits.softmax(dim=-1), chosen)


class GraniteBlock(nn.Module):
    """`x ← x + r · mixer(norm(x))`, then `x ← x + r · mlp(norm(x))`, r the residual multiplier.

    If there are experts, `mlp(x) = experts(x) + shared_mlp(x)`. The state is that of the mixer.
    """

    def __init__(self, config: Any, kind: str):
        super().__init__()
        self.multiplier = config.residual_multiplier
        self.input_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.has_mamba = kind == "linear_attention"
        if self.has_mamba:
            self.mamba = mamba2_of(config)
        else:
            has_positions = config.rope_theta is not None
            self.self_attn = Attention(
                config.features,
                config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_features=config.head_features,
                rotary_features=None if has_positions else 0,
                rope_theta=config.rope_theta if has_positions else 1.0,
                use_bias=config.attention_bias,
                out_bias=config.attention_bias,
                scale=config.attention_multiplier,
            )
        self.post_attention_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.block_sparse_moe = GraniteExperts(config) if config.num_experts else None
        self.shared_mlp = GraniteMLP(config.features, config.mlp_features)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        mixer = self.mamba if self.has_mamba else self.self_attn
        y, last = mixer(self.input_layernorm(x), state)
        x = x + self.multiplier * y
        normed = self.post_attention_layernorm(x)
        y = self.shared_mlp(normed)
        if self.block_sparse_moe is not None:
            y = self.block_sparse_moe(normed) + y
        return x + self.multiplier * y, last


class GraniteLanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Mamba-2 or attention → RMSNorm → Linear.

    The embeddings are multiplied, and the logits are divided by `divisor`.
    """

    divisor = 1.0

    @classmethod
    def from_config(cls, config: Any) -> "GraniteLanguageModel":
        """Builds the twin of the model of a JAX config."""
        blocks: list[nn.Module] = [GraniteBlock(config, kind) for kind in config.mixings]
        model = cls(config, blocks, nn.RMSNorm(config.features, eps=config.epsilon))
        model.model.multiplier = config.embedding_multiplier
        model.divisor = config.logits_scaling
        return model

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        logits, last = super().forward(tokens, state)
        return logits / self.divisor, last
