"""The HyperLSTM in plain PyTorch (labml.ai; HyperNetworks, arXiv 1609.09106)."""

__all__ = ["HyperLSTM", "HyperLSTMCell"]

import torch
from torch import Tensor, nn

from torch_ref.layers.layer_norm_lstm import LayerNormLSTM

State = tuple[Tensor, Tensor, Tensor, Tensor]


class HyperLSTMCell(nn.Module):
    """One step of an LSTM whose matrix products are scaled by a smaller LSTM, `hyper`.

        ĥ_t, ĉ_t = hyper([h_{t−1}, x_t], ĥ_{t−1}, ĉ_{t−1})
        z_h, z_x, z_b = Linears of ĥ_t, a part a gate                 z_b without bias
        i, f, g, o = LN(d_h(z_h) ⊙ (W_h h_{t−1}) + d_x(z_x) ⊙ (W_x x_t) + d_b(z_b))
        c_t = σ(f) ⊙ c_{t−1} + σ(i) ⊙ tanh(g)
        h_t = σ(o) ⊙ tanh(LN(c_t))

    Each gate has its own d, W and layer norm; only d_b has a bias. x is (batch, in_features), and
    the state is (h, c, ĥ, ĉ), each (batch, features). Each W_h is initialized to an orthogonal
    matrix, and each W_x is drawn from a normal distribution with variance 1 / in_features. With
    `zero_init`, both are zero, as in labml's code.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        hyper_features: int,
        embedding_features: int,
        *,
        zero_init: bool = False,
    ):
        super().__init__()
        self.hyper = LayerNormLSTM(hidden_features + in_features, hyper_features)
        self.z_h = nn.Linear(hyper_features, 4 * embedding_features)
        self.z_x = nn.Linear(hyper_features, 4 * embedding_features)
        self.z_b = nn.Linear(hyper_features, 4 * embedding_features, bias=False)
        self.d_h = nn.ModuleList(
            nn.Linear(embedding_features, hidden_features, bias=False) for _ in range(4)
        )
        self.d_x = nn.ModuleList(
            nn.Linear(embedding_features, hidden_features, bias=False) for _ in range(4)
        )
        self.d_b = nn.ModuleList(nn.Linear(embedding_features, hidden_features) for _ in range(4))
        self.w_h = nn.ParameterList(torch.zeros(hidden_features, hidden_features) for _ in range(4))
        self.w_x = nn.ParameterList(torch.zeros(hidden_features, in_features) for _ in range(4))
        self.layer_norm = nn.ModuleList(nn.LayerNorm(hidden_features) for _ in range(4))
        self.layer_norm_c = nn.LayerNorm(hidden_features)
        if not zero_init:
            for w_h, w_x in zip(self.w_h, self.w_x, strict=True):
                nn.init.orthogonal_(w_h)
                nn.init.normal_(w_x, std=in_features**-0.5)

    def forward(self, x: Tensor, state: State) -> State:
        h, c, h_hat, c_hat = state
        # The hyper network reads the hidden state and the input.
        h_hat, c_hat = self.hyper.step(torch.cat([h, x], dim=-1), (h_hat, c_hat))
        # Embed its output for each gate, once for h, once for x and once for the bias.
        z_h = self.z_h(h_hat).chunk(4, dim=-1)
        z_x = self.z_x(h_hat).chunk(4, dim=-1)
        z_b = self.z_b(h_hat).chunk(4, dim=-1)
        # The embeddings scale the products of the main LSTM, whose gates are normalized.
        i, f, g, o = (
            self.layer_norm[k](
                self.d_h[k](z_h[k]) * (h @ self.w_h[k].T)
                + self.d_x[k](z_x[k]) * (x @ self.w_x[k].T)
                + self.d_b[k](z_b[k])
            )
            for k in range(4)
        )
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(self.layer_norm_c(c))
        return h, c, h_hat, c_hat


class HyperLSTM(nn.Module):
    """A stack of HyperLSTM cells, run over a sequence.

    x is (batch, time, in_features), the outputs are (batch, time, hidden_features), and the state
    is (h, c, ĥ, ĉ), each (num_layers, batch, features).
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        hyper_features: int,
        embedding_features: int,
        *,
        num_layers: int = 1,
        zero_init: bool = False,
    ):
        super().__init__()
        self.sizes = (hidden_features, hidden_features, hyper_features, hyper_features)
        self.cells = nn.ModuleList(
            HyperLSTMCell(
                hidden_features if layer else in_features,
                hidden_features,
                hyper_features,
                embedding_features,
                zero_init=zero_init,
            )
            for layer in range(num_layers)
        )

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        states = list(zip(*(self.init_state(x.shape[0]) if state is None else state), strict=True))
        outputs = []
        # In each step, run all layers from the lowest to the highest.
        for y in x.unbind(1):
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(y, states[layer])
                y = states[layer][0]
            outputs.append(y)
        h, c, h_hat, c_hat = (torch.stack(leaves) for leaves in zip(*states, strict=True))
        return torch.stack(outputs, dim=1), (h, c, h_hat, c_hat)

    def init_state(self, batch_size: int) -> State:
        zeros = next(self.parameters()).new_zeros
        h, c, h_hat, c_hat = (zeros(len(self.cells), batch_size, size) for size in self.sizes)
        return h, c, h_hat, c_hat
