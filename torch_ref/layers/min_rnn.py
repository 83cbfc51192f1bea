"""minGRU and minLSTM in plain PyTorch (arXiv 2410.01201)."""

import torch
from torch import Tensor, nn

State = tuple[Tensor, ...]


class MinRNN(nn.Module):
    """Layers of a recurrence with a Linear a gate, `linear_z`, …; subclasses say what a step does.

    x is (batch, time, in_features), the state (h,) with h (num_layers, batch, hidden_features).
    """

    gate_names: str

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        num_layers=1,
        use_bias=True,
        dropout_rate=0.0,
    ):
        super().__init__()
        self.num_layers, self.hidden_features = num_layers, hidden_features
        self.dropout = nn.Dropout(dropout_rate)
        sizes = [in_features] + [hidden_features] * (num_layers - 1)
        for gate in self.gate_names:
            linears = (nn.Linear(size, hidden_features, bias=use_bias) for size in sizes)
            self.add_module(f"linear_{gate}", nn.ModuleList(linears))

    def step(self, x_t: Tensor, h: Tensor, layer: int) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        [hs] = self.init_state(x.shape[0]) if state is None else state
        last = []
        for layer, h in enumerate(hs):
            outputs = []
            for x_t in (self.dropout(x) if layer else x).unbind(1):
                h = self.step(x_t, h, layer)
                outputs.append(h)
            x = torch.stack(outputs, dim=1)
            last.append(h)
        return x, (torch.stack(last),)

    def init_state(self, batch_size: int) -> State:
        weight = next(self.parameters())
        return (weight.new_zeros(self.num_layers, batch_size, self.hidden_features),)


class MinGRU(MinRNN):
    """`h_t = (1 − z_t) ⊙ h_{t−1} + z_t ⊙ (x_t W_h + b_h)`, z_t = σ(x_t W_z + b_z)."""

    gate_names = "zh"

    def step(self, x_t: Tensor, h: Tensor, layer: int) -> Tensor:
        z = torch.sigmoid(self.linear_z[layer](x_t))
        return (1 - z) * h + z * self.linear_h[layer](x_t)


class MinLSTM(MinRNN):
    """`h_t = f'_t ⊙ h_{t−1} + i'_t ⊙ (x_t W_h + b_h)`, f' = f / (f + i), i' = i / (f + i)."""

    gate_names = "fih"

    def step(self, x_t: Tensor, h: Tensor, layer: int) -> Tensor:
        f = torch.sigmoid(self.linear_f[layer](x_t))
        i = torch.sigmoid(self.linear_i[layer](x_t))
        return f / (f + i) * h + i / (f + i) * self.linear_h[layer](x_t)
