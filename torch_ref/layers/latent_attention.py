"""Multi-head latent attention in plain PyTorch (arXiv 2405.04434), with transformers' keys."""

__all__ = ["LatentAttention"]

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.state import State


def rotate_pairs(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotates (x_{2i}, x_{2i + 1}) by p · θ^{−2i/d}. x is (batch, time, heads, d)."""
    size = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, size, 2).to(x) / size)
    angles = (positions[..., None].to(x) * frequencies)[:, :, None]
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are computed from c, and a shared part of keys, κ.

        q₁, q₂ = q_proj(x), or q_b_proj(norm(q_a_proj(x)))       by head
        c, κ = kv_a_proj_with_mqa(x),   c = norm(c)
        k, v = kv_b_proj(c)                                      by head
        a = softmax((q₁ kᵀ + rotary(q₂) rotary(κ)ᵀ) / √(key_features + shared_features))
        y = o_proj(a v ⊙ σ(g_proj(x)))

    Without `rope_theta`, nothing is rotated. The gate is a number for each head, and optional. x is
    (batch, time, features). The state is (position, latents): each row's number of steps so far,
    and c and the rotated κ of each step p in slot p. It has max_length slots; if max_length is
    None, it has a slot for each step so far.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        latent_features: int,
        key_features: int,
        shared_features: int,
        value_features: int,
        query_features: int | None = None,
        rope_theta: float | None = None,
        output_gate: bool = False,
        use_bias: bool = False,
        epsilon: float = 1e-6,
        max_length: int | None = None,
    ):
        super().__init__()
        self.heads, self.key_features, self.rope_theta = num_heads, key_features, rope_theta
        self.sizes, self.max_length = (latent_features, shared_features), max_length
        queries = num_heads * (key_features + shared_features)
        if query_features is None:
            self.q_proj = nn.Linear(features, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(features, query_features, bias=use_bias)
            self.q_a_layernorm = nn.RMSNorm(query_features, eps=epsilon)
            self.q_b_proj = nn.Linear(query_features, queries, bias=False)
        self.has_query_features = query_features is not None
        self.kv_a_proj_with_mqa = nn.Linear(features, sum(self.sizes), bias=use_bias)
        self.kv_a_layernorm = nn.RMSNorm(latent_features, eps=epsilon)
        keys_and_values = num_heads * (key_features + value_features)
        self.kv_b_proj = nn.Linear(latent_features, keys_and_values, bias=False)
        self.g_proj = nn.Linear(features, num_heads, bias=False) if output_gate else None
        self.o_proj = nn.Linear(num_heads * value_features, features, bias=use_bias)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        batch, time = x.shape[:2]
        position, latents = self.init_state(batch) if state is None else state
        positions = position[:, None] + torch.arange(time, device=x.device)

        # The queries, and c and κ.
        if self.has_query_features:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        else:
            q = self.q_proj(x)
        q, q_shared = q.unflatten(-1, (self.heads, -1)).tensor_split((self.key_features,), dim=-1)
        c, shared = self.kv_a_proj_with_mqa(x).split(self.sizes, dim=-1)
        if self.rope_theta is not None:
            q_shared = rotate_pairs(q_shared, positions, self.rope_theta)
            shared = rotate_pairs(shared[:, :, None], positions, self.rope_theta)[:, :, 0]

        # Write c and κ into the slots of their steps, and read those of all steps.
        room = time if self.max_length is None else 0
        latents = F.pad(latents, (0, 0, 0, room))
        rows = torch.arange(batch, device=x.device)[:, None]
        new = torch.cat([self.kv_a_layernorm(c), shared], dim=-1)
        latents = latents.index_put((rows, positions), new)
        all_c, all_shared = latents.split(self.sizes, dim=-1)
        k, v = (
            self.kv_b_proj(all_c)
            .unflatten(-1, (self.heads, -1))
            .tensor_split((self.key_features,), dim=-1)
        )

        # Attend to the steps up to each step, then gate and project the heads back.
        scores = torch.einsum("bthd,bshd->bhts", q, k)
        scores = scores + torch.einsum("bthd,bsd->bhts", q_shared, all_shared)
        scores = scores / (self.key_features + self.sizes[1]) ** 0.5
        slots = torch.arange(latents.shape[1], device=x.device)
        unseen = slots > positions[..., None]
        weights = scores.masked_fill(unseen[:, None], -torch.inf).softmax(dim=-1)
        y = torch.einsum("bhts,bshd->bthd", weights, v)
        if self.g_proj is not None:
            y = y * torch.sigmoid(self.g_proj(x))[..., None]
        return self.o_proj(y.flatten(-2)), (positions[:, -1] + 1, latents)

    def init_state(self, batch_size: int) -> State:
        weight = self.kv_b_proj.weight
        position = torch.zeros(batch_size, dtype=torch.int32, device=weight.device)
        return position, weight.new_zeros(batch_size, self.max_length or 0, sum(self.sizes))
