"""The layers of hippogriff in plain PyTorch, under its keys (Griffin, arXiv 2402.19427).

`version`, "0.0.2" or "0.0.3", decides the keys, the order of the layers, and whether c is stored.
"""

__all__ = ["HippogriffBlock", "HippogriffHawk"]

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.attention import empty_cache, local_attention
from torch_ref.layers.state import State


class HippogriffNorm(nn.Module):
    """`x / √mean(x²) · gamma`."""

    def __init__(self, features: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt() * self.gamma


class HippogriffHawk(nn.Module):
    """The recurrent block.

        y_t = (gelu(x_t W_gate) ⊙ h_t) W_out,   u = conv(x W_rec)
        a_t = e^{−c softplus(forget_base) ⊙ σ(u_t W_r + b_r)}
        h_t = a_t ⊙ h_{t−1} + √(1 − a_t² + 1e-6) ⊙ σ(u_t W_i + b_i) ⊙ u_t

    c is 8. In version 0.0.3, c is e^alpha_log_scale, which is saved but not trained. If kernel_size
    is None, there is no convolution, and u = x W_rec.

    x and y are (batch, time, features), and the state is (inputs, h): the last kernel_size − 1
    inputs of the convolution, (batch, hidden_features, kernel_size − 1), and h, (batch,
    hidden_features). Without a convolution, inputs is empty: (batch, hidden_features, 0).
    """

    def __init__(
        self,
        features: int,
        *,
        hidden_features: int,
        kernel_size: int | None = 4,
        version: str = "0.0.2",
    ):
        super().__init__()
        self.input = nn.Linear(features, 2 * hidden_features, bias=False)
        self.conv = None
        if kernel_size is not None:
            self.conv = nn.Conv1d(
                hidden_features, hidden_features, kernel_size, groups=hidden_features
            )
        self.gates = nn.Linear(hidden_features, 2 * hidden_features)
        self.forget_base = nn.Parameter(torch.linspace(-4.323, -9, hidden_features))
        self.output = nn.Linear(hidden_features, features, bias=False)
        self.alpha_log_scale = None
        if version == "0.0.3":
            self.alpha_log_scale = nn.Parameter(torch.tensor([math.log(8)]), requires_grad=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        inputs, h = self.init_state(x.shape[0]) if state is None else state
        # Project to the gate and the recurrent branch.
        gate, u = self.input(x).chunk(2, dim=-1)
        if self.conv is not None:
            window = torch.cat([inputs, u.mT], dim=-1)
            inputs = window[:, :, x.shape[1] :]
            u = self.conv(window).mT
        # Compute the decays and the scaled inputs of all steps: they do not depend on h.
        c = 8 if self.alpha_log_scale is None else self.alpha_log_scale.exp()
        r, i = torch.sigmoid(self.gates(u)).chunk(2, dim=-1)
        log_a = -c * F.softplus(self.forget_base) * r
        b = (1e-6 - torch.expm1(2 * log_a)).sqrt() * i * u
        # Run the recurrence, then gate and project its outputs.
        outputs = []
        for a_t, b_t in zip(log_a.exp().unbind(1), b.unbind(1), strict=True):
            h = a_t * h + b_t
            outputs.append(h)
        y = self.output(F.gelu(gate) * torch.stack(outputs, dim=1))
        return y, (inputs, h)

    def init_state(self, batch_size: int) -> State:
        h = self.forget_base.new_zeros(batch_size, len(self.forget_base))
        num_inputs = 0 if self.conv is None else self.conv.kernel_size[0] - 1
        return h.new_zeros(*h.shape, num_inputs), h


class HippogriffMLP(nn.Module):
    """`(gelu(x W_gate) ⊙ x W_up) W_down`, where `grow` has W_gate and W_up side by side."""

    def __init__(self, features: int, mlp_features: int):
        super().__init__()
        self.grow = nn.Linear(features, 2 * mlp_features, bias=False)
        self.shrink = nn.Linear(mlp_features, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, x = self.grow(x).chunk(2, dim=-1)
        return self.shrink(F.gelu(gate) * x)


class HippogriffAttention(nn.Module):
    """Each head is `softmax(q kᵀ / √d) v` over the current step and the window − 1 before it.

    Rotary positions apply to whole heads. x is (batch, time, features), and the state is that of
    `local_attention`.
    """

    def __init__(self, features: int, num_heads: int, *, num_kv_heads: int, window: int):
        super().__init__()
        self.head_features, self.window = features // num_heads, window
        self.q = nn.Linear(features, features, bias=False)
        self.kv = nn.Linear(features, 2 * num_kv_heads * self.head_features, bias=False)
        self.output = nn.Linear(features, features, bias=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v = (
            array.unflatten(-1, (-1, self.head_features))
            for array in (self.q(x), *self.kv(x).chunk(2, dim=-1))
        )
        state = self.init_state(x.shape[0]) if state is None else state
        y, state = local_attention(q, k, v, state, rotated=self.head_features, theta=10_000.0)
        return self.output(y.flatten(-2)), state

    def init_state(self, batch_size: int) -> State:
        weight, size = self.kv.weight, self.head_features
        return empty_cache(weight, batch_size, self.window, len(weight) // (2 * size), size)


class HippogriffBlock(nn.Module):
    """A recurrence and attention, each followed by an MLP.

        x ← x + hawk(norm(x)),    x ← x + mlp(norm(x))
        x ← x + smqa(norm(x)),    x ← x + mlp(norm(x))

    Version 0.0.3 runs the attention first, and calls the recurrence `time` and its MLP `gmlp`. If
    num_heads is None, there is no attention.

    x is (batch, time, features). The state is that of the recurrence, then that of `smqa`.
    """

    def __init__(
        self,
        features: int,
        mlp_features: int,
        num_heads: int | None,
        *,
        hidden_features: int,
        kernel_size: int | None = 4,
        num_kv_heads: int = 1,
        window: int = 513,
        version: str = "0.0.2",
    ):
        super().__init__()
        recurrence = ("hawk", "hawk_gmlp") if version == "0.0.2" else ("time", "gmlp")
        mixers: dict[str, nn.Module] = {
            recurrence[0]: HippogriffHawk(
                features, hidden_features=hidden_features, kernel_size=kernel_size, version=version
            )
        }
        self.recurrence = recurrence[0]
        self.pairs: list[tuple[str, str]] = [recurrence]
        if num_heads is not None:
            mixers["smqa"] = HippogriffAttention(
                features, num_heads, num_kv_heads=num_kv_heads, window=window
            )
            self.pairs.insert(1 if version == "0.0.2" else 0, ("smqa", "smqa_gmlp"))
        for mixer, mlp in self.pairs:
            self.add_module(f"{mixer}_norm", HippogriffNorm(features))
            self.add_module(mixer, mixers[mixer])
            self.add_module(f"{mlp}_norm", HippogriffNorm(features))
            self.add_module(mlp, HippogriffMLP(features, mlp_features))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        # The state of the whole block holds that of the recurrence, then that of the attention.
        states: dict[str, State] = {}
        if state is not None:
            states = {self.recurrence: state[:2], "smqa": state[2:]}
        for mixer, mlp in self.pairs:
            normed = self.get_submodule(f"{mixer}_norm")(x)
            y, states[mixer] = self.get_submodule(mixer)(normed, states.get(mixer))
            x = x + y
            x = x + self.get_submodule(mlp)(self.get_submodule(f"{mlp}_norm")(x))
        return x, (*states[self.recurrence], *states.get("smqa", ()))
