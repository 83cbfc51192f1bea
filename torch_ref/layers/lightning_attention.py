"""Lightning attention in plain PyTorch (arXiv 2401.04658), with the keys of transformers."""

__all__ = ["LightningAttention"]

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.state import State


class LightningAttention(nn.Module):
    """The mixer of MiniMax-Text-01.

        q, k, v = silu(x W)                                  for each head side by side
        S_t = exp(−s) S_{t−1} + v_t k_tᵀ,   o_t = S_t q_t    by head
        y = (norm(o) ⊙ σ(x W_g)) W_o                         norm: RMSNorm of all heads together

    Head h of H in layer l of L forgets at the rate s = 2^{−8 (h + 1) / H} (1 − l / (L − 1 + 10⁻⁵) +
    10⁻⁵). x and y are (batch, time, features). The state is (S,), (batch, heads, value, key).
    """

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        head_features: int,
        layer_index: int = 0,
        num_layers: int = 1,
        epsilon: float = 1e-6,
    ):
        super().__init__()
        self.num_heads, self.head_features = num_heads, head_features
        factor = 1 - layer_index / (num_layers - 1 + 1e-5) + 1e-5
        self.slopes = [factor * 2 ** (-8 * (h + 1) / num_heads) for h in range(num_heads)]
        inner = num_heads * head_features
        self.norm = nn.RMSNorm(inner, eps=epsilon)
        self.qkv_proj = nn.Linear(features, 3 * inner, bias=False)
        self.out_proj = nn.Linear(inner, features, bias=False)
        self.output_gate = nn.Linear(features, inner, bias=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        (s,) = self.init_state(x.shape[0]) if state is None else state
        qkv = F.silu(self.qkv_proj(x)).unflatten(-1, (self.num_heads, 3, self.head_features))
        decay = torch.exp(-s.new_tensor(self.slopes))[:, None, None]
        # In each step, S decays and stores v under the key k.
        outputs = []
        for q_t, k_t, v_t in zip(*(part.unbind(1) for part in qkv.unbind(-2)), strict=True):
            s = decay * s + v_t[..., :, None] * k_t[..., None, :]
            outputs.append((s @ q_t[..., None])[..., 0])
        o = self.norm(torch.stack(outputs, dim=1).flatten(-2))
        return self.out_proj(o * torch.sigmoid(self.output_gate(x))), (s,)

    def init_state(self, batch_size: int) -> State:
        sizes = batch_size, self.num_heads, self.head_features, self.head_features
        return (self.out_proj.weight.new_zeros(sizes),)
