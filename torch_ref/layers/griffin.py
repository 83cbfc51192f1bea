"""The blocks of Griffin in plain PyTorch, as in RecurrentGemma (arXiv 2402.19427).

The keys are those of transformers' RecurrentGemma.
"""

__all__ = ["GriffinBlock", "GriffinRecurrence"]

import torch
from torch import Tensor, nn

from torch_ref.layers.activation import ACTIVATIONS
from torch_ref.layers.conv import CausalConv1d
from torch_ref.layers.local_attention import LocalAttention
from torch_ref.layers.mlp import GatedMLP
from torch_ref.layers.norm import ZeroCenteredRMSNorm
from torch_ref.layers.rg_lru import RGLRU
from torch_ref.layers.state import State


class GriffinRecurrence(nn.Module):
    """The recurrent block of RecurrentGemma.

        y_t = (gelu(x_t W_gate + b_gate) ⊙ rglru(conv(x_t W_rec + b_rec))) W_out + b_out

    x and y are (batch, time, features), and the state is (position, inputs, h): each row's number
    of steps so far, then the states of `conv_1d` and `rg_lru`.
    """

    def __init__(
        self,
        features: int,
        num_blocks: int,
        *,
        hidden_features: int | None = None,
        kernel_size: int = 4,
        activation: str = "gelu_tanh",
    ):
        super().__init__()
        hidden = features if hidden_features is None else hidden_features
        self.activation = ACTIVATIONS[activation]
        self.linear_y = nn.Linear(features, hidden)
        self.linear_x = nn.Linear(features, hidden)
        self.conv_1d = CausalConv1d(hidden, kernel_size).conv
        self.rg_lru = RGLRU(hidden, num_blocks=num_blocks, scale_first_step=False)
        self.linear_out = nn.Linear(hidden, features)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        position, inputs, h = self.init_state(x.shape[0]) if state is None else state
        # The short convolution continues from the last inputs, then the RG-LRU runs over its
        # outputs.
        u = torch.cat([inputs, self.linear_x(x).mT], dim=-1)
        inputs = u[:, :, x.shape[1] :]
        h, (last, position) = self.rg_lru(self.conv_1d(u).mT, (h, position))
        # The other branch is the gate.
        y = self.linear_out(self.activation(self.linear_y(x)) * h)
        return y, (position, inputs, last)

    def init_state(self, batch_size: int) -> State:
        weight = self.conv_1d.weight
        inputs = weight.new_zeros(batch_size, len(weight), weight.shape[2] - 1)
        h, position = self.rg_lru.init_state(batch_size)
        return position, inputs, h


class GriffinBlock(nn.Module):
    """`x ← x + mixing(norm(x))`, then `x ← x + mlp(norm(x))`; the state is that of `mixing`."""

    def __init__(
        self,
        features: int,
        mlp_features: int,
        num_heads: int,
        *,
        mixing: str = "recurrent",
        recurrent_features: int | None = None,
        kernel_size: int = 4,
        num_kv_heads: int = 1,
        window: int = 2048,
        rotary_fraction: float = 0.5,
        rope_theta: float = 10_000.0,
        attention_bias: bool = False,
        activation: str = "gelu_tanh",
        epsilon: float = 1e-6,
    ):
        super().__init__()
        self.temporal_pre_norm = ZeroCenteredRMSNorm(features, epsilon=epsilon)
        if mixing == "recurrent":
            self.temporal_block = GriffinRecurrence(
                features,
                num_heads,
                hidden_features=recurrent_features,
                kernel_size=kernel_size,
                activation=activation,
            )
        else:
            self.temporal_block = LocalAttention(
                features,
                num_heads,
                num_kv_heads=num_kv_heads,
                window=window,
                rotary_fraction=rotary_fraction,
                rope_theta=rope_theta,
                use_bias=attention_bias,
            )
        self.channel_pre_norm = ZeroCenteredRMSNorm(features, epsilon=epsilon)
        self.mlp_block = GatedMLP(features, mlp_features, use_bias=True, activation=activation)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, last = self.temporal_block(self.temporal_pre_norm(x), state)
        x = x + y
        return x + self.mlp_block(self.channel_pre_norm(x)), last
