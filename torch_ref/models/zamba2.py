"""Zamba2 in plain PyTorch, with the keys of transformers."""

__all__ = ["Zamba2LanguageModel"]

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.attention import Attention
from torch_ref.models.hybrid import Backbone, HybridLanguageModel, State, mamba2_of


def low_ranks(numbers: range, features: int, rank: int, outputs: int) -> nn.ModuleDict:
    """The adapters `x W_down W_up` of the hybrid blocks with these numbers."""

    def adapter() -> nn.Module:
        down, up = nn.Linear(features, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        return nn.Sequential(down, up)

    return nn.ModuleDict({str(number): adapter() for number in numbers})


class Zamba2Attention(Attention):
    """Attention with the matrices of several blocks, whose scores are divided by √(d / 2).

    Each block may add the terms of its own adapters to the queries, keys and values.
    """

    def __init__(self, config: Any, numbers: range):
        features, has_positions = 2 * config.features, config.rope_theta is not None
        super().__init__(
            features,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            out_features=config.features,
            rotary_features=None if has_positions else 0,
            rope_theta=config.rope_theta if has_positions else 1.0,
            scale=(features // config.num_heads / 2) ** -0.5,
        )
        self.has_adapters = config.attention_adapters
        if self.has_adapters:
            sizes = numbers, features, config.adapter_rank, features
            self.linear_q_adapter_list = low_ranks(*sizes)
            self.linear_k_adapter_list = low_ranks(*sizes)
            self.linear_v_adapter_list = low_ranks(*sizes)

    def attend(self, number: int, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Attends with the adapters of the hybrid block with this number."""
        if not self.has_adapters:
            return self(x, state)
        lists = self.linear_q_adapter_list, self.linear_k_adapter_list, self.linear_v_adapter_list
        return self(x, state, [adapters[str(number)](x) for adapters in lists])


class Zamba2MLP(nn.Module):
    """`gate, up = x W_in + adapter(x)` side by side, `y = (gelu(gate) ⊙ up) W_out`."""

    def __init__(self, config: Any, numbers: range):
        super().__init__()
        features, width, bias = config.features, config.mlp_features, config.mamba_bias
        self.gate_up_proj = nn.Linear(features, 2 * width, bias=bias)
        self.down_proj = nn.Linear(width, features, bias=bias)
        sizes = features, config.adapter_rank, 2 * width
        self.gate_up_proj_adapter_list = low_ranks(numbers, *sizes)

    def forward(self, x: Tensor, number: int) -> Tensor:
        adapter = self.gate_up_proj_adapter_list[str(number)]
        gate, up = (self.gate_up_proj(x) + adapter(x)).chunk(2, dim=-1)
        return self.down_proj(F.gelu(gate) * up)


class Zamba2Transformer(nn.Module):
    """`mlp(norm(attention(norm([x, e]))))` with the matrices of several blocks, and no residuals.

    `numbers` are those of the hybrid blocks that share it.
    """

    def __init__(self, config: Any, numbers: range):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(2 * config.features, eps=config.epsilon)
        self.self_attn = Zamba2Attention(config, numbers)
        self.pre_ff_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.feed_forward = Zamba2MLP(config, numbers)

    def forward(
        self, x: Tensor, e: Tensor, number: int, state: State | None
    ) -> tuple[Tensor, State]:
        n = self.input_layernorm(torch.cat([x, e], dim=-1))
        y, state = self.self_attn.attend(number, n, state)
        return self.feed_forward(self.pre_ff_layernorm(y), number), state


class Zamba2MambaBlock(nn.Module):
    """`x ← x + mamba(norm(x + t))`; t is zero unless a hybrid block gives it."""

    def __init__(self, config: Any):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.mamba = mamba2_of(config, epsilon=1e-5)

    def forward(
        self, x: Tensor, e: Tensor, state: State | None = None, t: float | Tensor = 0.0
    ) -> tuple[Tensor, State]:
        y, last = self.mamba(self.input_layernorm(x + t), state)
        return x + y, last


class Zamba2HybridBlock(nn.Module):
    """`t = transformer([x, e]) W`, then a block with Mamba-2.

    The state is (that of the Mamba-2, that of the attention).
    """

    def __init__(self, config: Any, shared_transformer: Zamba2Transformer, number: int):
        super().__init__()
        self.number = number
        self.shared_transformer = shared_transformer
        self.linear = nn.Linear(config.features, config.features, bias=False)
        self.mamba_decoder = Zamba2MambaBlock(config)

    def forward(self, x: Tensor, e: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        mamba, attention = (None, None) if state is None else state
        t, attention = self.shared_transformer(x, e, self.number, attention)
        x, mamba = self.mamba_decoder(x, e, mamba, self.linear(t))
        return x, (mamba, attention)


class Zamba2Backbone(Backbone):
    """Token embedding e → blocks, each of which also reads e → RMSNorm."""

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        e = x = self.embed_tokens(tokens)
        states = []
        for i, layer in enumerate(self.layers):
            x, last = layer(x, e, None if state is None else state[i])
            states.append(last)
        return getattr(self, self.norm_name)(x), tuple(states)


class Zamba2LanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Mamba-2, or with a shared transformer, too → RMSNorm → Linear.

    The j-th hybrid block has the shared transformer j mod num_shared_blocks.
    """

    backbone = Zamba2Backbone

    @classmethod
    def from_config(cls, config: Any) -> "Zamba2LanguageModel":
        """Builds the twin of the model of a JAX config."""
        kinds, count = config.mixings, config.num_shared_blocks
        hybrids = kinds.count("hybrid")
        shared = [Zamba2Transformer(config, range(i, hybrids, count)) for i in range(count)]
        blocks: list[nn.Module] = []
        for i, kind in enumerate(kinds):
            j = kinds[:i].count("hybrid")
            blocks.append(
                Zamba2HybridBlock(config, shared[j % count], j)
                if kind == "hybrid"
                else Zamba2MambaBlock(config)
            )
        norm = nn.RMSNorm(config.features, eps=config.epsilon)
        return cls(config, blocks, norm, "final_layernorm")
