"""Multilayer perceptrons in plain PyTorch, with and without a gate."""

__all__ = ["MLP", "GatedMLP"]

from torch import Tensor, nn

from torch_ref.layers.activation import ACTIVATIONS


class GatedMLP(nn.Module):
    """`y = (gelu(x W_gate) ⊙ x W_up) W_down`, with the exact gelu or another `activation`."""

    def __init__(
        self,
        features: int,
        mlp_features: int,
        *,
        use_bias: bool = False,
        activation: str = "gelu",
    ):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate_proj = nn.Linear(features, mlp_features, bias=use_bias)
        self.up_proj = nn.Linear(features, mlp_features, bias=use_bias)
        self.down_proj = nn.Linear(mlp_features, features, bias=use_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class MLP(nn.Module):
    """`y = relu(x W_up)² W_down`, or with another `activation`."""

    def __init__(
        self,
        features: int,
        mlp_features: int,
        *,
        use_bias: bool = False,
        activation: str = "relu2",
    ):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.up_proj = nn.Linear(features, mlp_features, bias=use_bias)
        self.down_proj = nn.Linear(mlp_features, features, bias=use_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))
