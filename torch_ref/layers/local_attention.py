"""Attention over a window in plain PyTorch, as in RecurrentGemma (arXiv 2402.19427).

The keys are those of transformers' RecurrentGemma.
"""

__all__ = ["LocalAttention"]

import torch
from torch import Tensor, nn

from torch_ref.layers.state import State


def rotary(x: Tensor, positions: Tensor, *, rotated: int, theta: float) -> Tensor:
    """Rotates (x_i, x_{i + n/2}) by p · θ^{−2i/n}, n = `rotated`; x is (batch, time, heads, d)."""
    frequencies = theta ** (-torch.arange(0, rotated, 2).to(x) / rotated)
    angles = (positions[..., None].to(x) * frequencies)[:, :, None]
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = x.tensor_split((rotated // 2, rotated), dim=-1)
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


def empty_cache(weight: Tensor, batch_size: int, window: int, heads: int, size: int) -> State:
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
        return empty_cache(weight, batch_size, self.window, heads, self.head_features)
