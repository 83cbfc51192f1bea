"""Hawk and its block in plain PyTorch (Griffin, arXiv 2402.19427)."""

__all__ = ["Hawk", "HawkBlock"]

from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.conv import CausalConv1d
from torch_ref.layers.mlp import GatedMLP
from torch_ref.layers.rg_lru import RGLRU
from torch_ref.layers.state import State


class Hawk(nn.Module):
    """The recurrent block of Griffin.

        y_t = (gelu(x_t W_gate) ⊙ rglru(conv(x_t W_rec))) W_out

    gelu is the exact GELU, with erf. x and y are (batch, time, features). The state is that of
    `conv`, then that of `rglru`.
    """

    def __init__(self, features: int, *, kernel_size: int = 4, parameterization: str = "softplus"):
        super().__init__()
        self.gate_proj = nn.Linear(features, features, bias=False)
        self.recurrent_proj = nn.Linear(features, features, bias=False)
        self.conv = CausalConv1d(features, kernel_size)
        self.rglru = RGLRU(features, parameterization=parameterization)
        self.out_proj = nn.Linear(features, features, bias=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        conv_state, rglru_state = (None, None) if state is None else (state[:1], state[1:])
        gate = F.gelu(self.gate_proj(x))
        x, conv_state = self.conv(self.recurrent_proj(x), conv_state)
        x, rglru_state = self.rglru(x, rglru_state)
        return self.out_proj(gate * x), conv_state + rglru_state


class HawkBlock(nn.Module):
    """`x ← x + hawk(norm(x))`, then `x ← x + mlp(norm(x))`; the state is that of `hawk`."""

    def __init__(
        self,
        features: int,
        mlp_features: int,
        *,
        kernel_size: int = 4,
        parameterization: str = "softplus",
    ):
        super().__init__()
        self.temporal_pre_norm = nn.RMSNorm(features, eps=1e-6)
        self.hawk = Hawk(features, kernel_size=kernel_size, parameterization=parameterization)
        self.channel_pre_norm = nn.RMSNorm(features, eps=1e-6)
        self.mlp = GatedMLP(features, mlp_features)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, last = self.hawk(self.temporal_pre_norm(x), state)
        x = x + y
        return x + self.mlp(self.channel_pre_norm(x)), last
