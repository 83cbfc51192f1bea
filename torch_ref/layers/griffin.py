"""The blocks of Griffin in plain PyTorch, as in RecurrentGemma (arXiv 2402.19427).

The keys are those of transformers' RecurrentGemma.
"""

__all__ = ["GriffinBlock", "GriffinRecurrence", "LocalAttention", "ZeroCenteredRMSNorm"]

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.activation import ACTIVATIONS
from torch_ref.layers.hawk import RGLRU, CausalConv1d, GatedMLP
from torch_ref.layers.state import State


class ZeroCenteredRMSNorm(nn.Module):
    """`x / √(mean(x²) + ε) · (1 + weight)`."""

    def __init__(self, features: int, *, epsilon: float = 1e-6):
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.epsilon) * (1 + self.weight)


def rotary(x: Tensor, positions: Tensor, *, rotated: int, theta: float) -> Tensor:
    """Rotates (x_i, x_{i + ⌈n/2⌉}) by p · θ^{−2i/n}, n = `rotated`.

    x is (batch, time, heads, d).
    """
    frequencies = theta ** (-torch.arange(0, rotated, 2).to(x) / rotated)
    angles = (positions[..., None].to(x) * frequencies)[:, :, None]
    cos, sin = angles.cos(), angles.sin()
    half = len(frequencies)
    first, second, rest = x.tensor_split((half, 2 * half), dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def local_attention(
    q: Tensor, k: Tensor, v: Tensor, state: State, *, rotated: int, theta: float
) -> tuple[Tensor, State]:
    """Attends from rotated q to the rotated keys of the state and of the steps up to each step.

    q is (batch, time, heads, d). k and v may have fewer heads, each of which is shared by the same
    number of neighboring heads of q. The state is (position, keys, values): each row's number of
    steps so far, and the keys and values of the last window − 1 > 0 steps, (batch, window − 1,
    heads, d). Those of step p are in slot p mod (window − 1).
    """
    # Rotate queries and keys by their positions.
    position, keys, values = state
    positions = position[:, None] + torch.arange(q.shape[1], device=q.device)
    q = rotary(q, positions, rotated=rotated, theta=theta)
    k = rotary(k, positions, rotated=rotated, theta=theta)

    # Compute the step that each slot holds, to mask keys outside the window.
    slots = torch.arange(keys.shape[1], device=q.device)
    last = position[:, None] - 1
    of_slots = last - (last - slots) % len(slots)
    of_keys = torch.cat([of_slots, positions], dim=1)  # the step of each key
    distance = positions[:, None, :, None] - of_keys[:, None, None]
    unseen = (of_keys < 0)[:, None, None] | (distance < 0) | (distance > len(slots))
    # Attend to the stored and the new keys together.
    all_keys, all_values = (
        torch.cat(pair, dim=1).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        for pair in ((keys, k), (values, v))
    )
    scores = torch.einsum("bthd,bshd->bhts", q, all_keys) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
    y = torch.einsum("bhts,bshd->bthd", weights, all_values)

    # Write the last keys and values into their slots.
    rows = torch.arange(q.shape[0], device=q.device)[:, None]
    written = positions[:, -len(slots) :] % len(slots)
    keys, values = keys.clone(), values.clone()
    keys[rows, written] = k[:, -len(slots) :]
    values[rows, written] = v[:, -len(slots) :]
    return y, (positions[:, -1] + 1, keys, values)


def no_keys(weight: Tensor, batch_size: int, window: int, heads: int, size: int) -> State:
    """The state before the first step, on the device and in the dtype of the weight."""
    keys, values = weight.new_zeros(2, batch_size, window - 1, heads, size)
    return torch.zeros(batch_size, dtype=torch.int32, device=weight.device), keys, values


class LocalAttention(nn.Module):
    """Each head is `softmax(q kᵀ / √d) v` over the current step and the window − 1 before it.

    x is (batch, time, features). The state is that of `local_attention`.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int = 1,
        window: int = 2048,
        rotary_fraction: float = 0.5,
        rope_theta: float = 10_000.0,
        use_bias: bool = False,
    ):
        super().__init__()
        self.head_features = features // num_heads
        self.window = window
        self.rotated = int(self.head_features * rotary_fraction)
        self.rope_theta = rope_theta
        self.q_proj = nn.Linear(features, features, bias=use_bias)
        self.k_proj = nn.Linear(features, num_kv_heads * self.head_features, bias=use_bias)
        self.v_proj = nn.Linear(features, num_kv_heads * self.head_features, bias=use_bias)
        self.o_proj = nn.Linear(features, features)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_features))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        state = self.init_state(x.shape[0]) if state is None else state
        y, state = local_attention(q, k, v, state, rotated=self.rotated, theta=self.rope_theta)
        return self.o_proj(y.flatten(-2)), state

    def init_state(self, batch_size: int) -> State:
        weight = self.k_proj.weight
        heads = len(weight) // self.head_features
        return no_keys(weight, batch_size, self.window, heads, self.head_features)


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
        u = torch.cat([inputs, self.linear_x(x).mT], dim=-1)
        inputs = u[:, :, x.shape[1] :]
        h, (last, position) = self.rg_lru(self.conv_1d(u).mT, (h, position))
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
