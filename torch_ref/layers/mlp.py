"""A gated multilayer perceptron in plain PyTorch."""

__all__ = ["GatedMLP"]

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
