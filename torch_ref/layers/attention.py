"""Causal attention with grouped queries and rotary positions in plain PyTorch."""

__all__ = ["Attention"]

from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.griffin import ZeroCenteredRMSNorm, local_attention, no_keys
from torch_ref.layers.state import State


class Attention(nn.Module):
    """Each head is `softmax(q kᵀ / √d) v` over the steps up to the current one.

    x is (batch, time, features). The state is that of `local_attention`: (position, keys, values).
    With a window, it holds the last window − 1 steps. Otherwise, it has max_length slots; if
    max_length is None, it has a slot for each step so far.
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
        rotary_features: int | None = None,
        rope_theta: float = 10_000.0,
        qk_norm: str | None = None,
        zero_centered_norm: bool = False,
        epsilon: float = 1e-6,
        output_gate: bool = False,
        use_bias: bool = False,
        out_bias: bool = False,
    ):
        super().__init__()
        size = self.head_features = head_features or features // num_heads
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.window, self.max_length = window, max_length
        self.rotated = size if rotary_features is None else rotary_features
        self.rope_theta, self.output_gate, self.qk_norm = rope_theta, output_gate, qk_norm
        of_queries, of_keys = num_heads * size, self.num_kv_heads * size
        self.q_proj = nn.Linear(features, (1 + output_gate) * of_queries, bias=use_bias)
        self.k_proj = nn.Linear(features, of_keys, bias=use_bias)
        self.v_proj = nn.Linear(features, of_keys, bias=use_bias)
        self.o_proj = nn.Linear(of_queries, features, bias=out_bias)
        if qk_norm is not None:
            sizes = (of_queries, of_keys) if qk_norm == "all" else (size, size)
            self.q_norm, self.k_norm = (
                ZeroCenteredRMSNorm(n, epsilon=epsilon)
                if zero_centered_norm
                else nn.RMSNorm(n, eps=epsilon)
                for n in sizes
            )

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        # Each head of q_proj holds its query, and then its gate.
        q = self.q_proj(x).unflatten(-1, (self.num_heads, -1))
        gate = None
        if self.output_gate:
            q, gate = q.chunk(2, dim=-1)
        k, v = (p(x).unflatten(-1, (self.num_kv_heads, -1)) for p in (self.k_proj, self.v_proj))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        elif self.qk_norm == "all":
            q = self.q_norm(q.flatten(-2)).view_as(q)
            k = self.k_norm(k.flatten(-2)).view_as(k)

        position, keys, values = self.init_state(x.shape[0]) if state is None else state
        if self.window is None and self.max_length is None:
            keys, values = (F.pad(a, (0, 0, 0, 0, 0, x.shape[1])) for a in (keys, values))
        state = position, keys, values
        y, state = local_attention(q, k, v, state, rotated=self.rotated, theta=self.rope_theta)
        if gate is not None:
            y = y * gate.sigmoid()
        return self.o_proj(y.flatten(-2)), state

    def init_state(self, batch_size: int) -> State:
        slots = self.max_length or 0 if self.window is None else self.window - 1
        weight = self.k_proj.weight
        return no_keys(weight, batch_size, slots + 1, self.num_kv_heads, self.head_features)
