"""Causal attention with grouped queries and rotary positions in plain PyTorch."""

__all__ = ["Attention"]

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.norm import ZeroCenteredRMSNorm
from torch_ref.layers.state import State


def rotary(
    x: Tensor, positions: Tensor, *, rotated: int, theta: float, pairs: int | None = None
) -> Tensor:
    """Rotates (x_i, x_{i + ⌈n/2⌉}) by p · θ^{−2i/n}, n = `rotated`, for i < `pairs`.

    x is (batch, time, heads, d). If `pairs` is None, all pairs are rotated.
    """
    frequencies = theta ** (-torch.arange(0, rotated, 2).to(x) / rotated)
    if pairs is not None:
        frequencies[pairs:] = 0
    angles = (positions[..., None].to(x) * frequencies)[:, :, None]
    cos, sin = angles.cos(), angles.sin()
    half = len(frequencies)
    first, second, rest = x.tensor_split((half, 2 * half), dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    *,
    rotated: int,
    theta: float,
    pairs: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, State]:
    """Attends from rotated q to the rotated keys of the state and of the steps up to each step.

    q is (batch, time, heads, d). k and v may have fewer heads, each of which is shared by the same
    number of neighboring heads of q. The state is (position, keys, values): each row's number of
    steps so far, and the keys and values of the last window − 1 > 0 steps, (batch, window − 1,
    heads, d). Those of step p are in slot p mod (window − 1). Scores are multiplied by `scale`, by
    default 1 / √d.
    """
    # Rotate queries and keys by their positions.
    position, keys, values = state
    positions = position[:, None] + torch.arange(q.shape[1], device=q.device)
    q = rotary(q, positions, rotated=rotated, theta=theta, pairs=pairs)
    k = rotary(k, positions, rotated=rotated, theta=theta, pairs=pairs)

    # Compute the step that each slot holds, to mask keys outside the window.
    slots = torch.arange(keys.shape[1], device=q.device)
    last = position[:, None] - 1
    slot_steps = last - (last - slots) % len(slots)
    key_steps = torch.cat([slot_steps, positions], dim=1)  # the step of each key
    distance = positions[:, None, :, None] - key_steps[:, None, None]
    unseen = (key_steps < 0)[:, None, None] | (distance < 0) | (distance > len(slots))
    # Attend to the stored and the new keys together.
    all_keys, all_values = (
        torch.cat(pair, dim=1).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        for pair in ((keys, k), (values, v))
    )
    scores = torch.einsum("bthd,bshd->bhts", q, all_keys)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
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


class Attention(nn.Module):
    """Each head is `softmax(scale · q kᵀ) v` over the steps up to the current one.

    The scale is 1 / √d by default.

    x is (batch, time, features), and y is (batch, time, out_features), by default as wide as x. The
    state is that of `local_attention`: (position, keys, values). With a window, it holds the last
    window − 1 steps. Otherwise, it has max_length slots; if max_length is None, it has a slot for
    each step so far. `added` is what is added to the queries, keys and values of all heads.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_features: int | None = None,
        window: int | None = None,
        max_length: int | None = None,
        out_features: int | None = None,
        rotary_features: int | None = None,
        rotary_pairs: int | None = None,
        rope_theta: float = 10_000.0,
        qk_norm: str | None = None,
        zero_centered_norm: bool = False,
        epsilon: float = 1e-6,
        output_gate: bool = False,
        head_gate: bool = False,
        use_bias: bool = False,
        out_bias: bool = False,
        scale: float | None = None,
    ):
        super().__init__()
        size = self.head_features = head_features or features // num_heads
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.window, self.max_length = window, max_length
        self.rotated = size if rotary_features is None else rotary_features
        self.rotary_pairs = rotary_pairs
        self.rope_theta, self.output_gate, self.qk_norm = rope_theta, output_gate, qk_norm
        self.scale = scale
        query_size, key_size = num_heads * size, self.num_kv_heads * size
        self.q_proj = nn.Linear(features, (1 + output_gate) * query_size, bias=use_bias)
        self.k_proj = nn.Linear(features, key_size, bias=use_bias)
        self.v_proj = nn.Linear(features, key_size, bias=use_bias)
        self.o_proj = nn.Linear(query_size, out_features or features, bias=out_bias)
        self.g_proj = nn.Linear(features, num_heads, bias=False) if head_gate else None
        if qk_norm is not None:
            sizes = (query_size, key_size) if qk_norm == "all" else (size, size)
            self.q_norm, self.k_norm = (
                ZeroCenteredRMSNorm(n, epsilon=epsilon)
                if zero_centered_norm
                else nn.RMSNorm(n, eps=epsilon)
                for n in sizes
            )

    def forward(
        self, x: Tensor, state: State | None = None, added: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, State]:
        # Project to heads. With an output gate, each head of q_proj holds its query, and then its
        # gate.
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if added is not None:
            q, k, v = (y + term for y, term in zip((q, k, v), added, strict=True))
        q = q.unflatten(-1, (self.num_heads, -1))
        gate = None
        if self.output_gate:
            q, gate = q.chunk(2, dim=-1)
        k, v = (y.unflatten(-1, (self.num_kv_heads, -1)) for y in (k, v))
        # Norm queries and keys, by head or over all heads.
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        elif self.qk_norm == "all":
            q = self.q_norm(q.flatten(-2)).view_as(q)
            k = self.k_norm(k.flatten(-2)).view_as(k)

        # Without a window or a max_length, make room for the keys and values of these steps.
        position, keys, values = self.init_state(x.shape[0]) if state is None else state
        if self.window is None and self.max_length is None:
            keys, values = (F.pad(a, (0, 0, 0, 0, 0, x.shape[1])) for a in (keys, values))
        state = position, keys, values
        # Attend, then gate and project the heads back.
        rotary = {"rotated": self.rotated, "theta": self.rope_theta, "pairs": self.rotary_pairs}
        y, state = local_attention(q, k, v, state, **rotary, scale=self.scale)
        if gate is not None:
            y = y * gate.sigmoid()
        if self.g_proj is not None:
            y = y * self.g_proj(x).sigmoid()[..., None]
        return self.o_proj(y.flatten(-2)), state

    def init_state(self, batch_size: int) -> State:
        slots = self.max_length or 0 if self.window is None else self.window - 1
        weight = self.k_proj.weight
        return empty_cache(weight, batch_size, slots + 1, self.num_kv_heads, self.head_features)
