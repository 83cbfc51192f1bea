"""The linear recurrent unit in plain PyTorch (arXiv 2303.06349, appendix A)."""

__all__ = ["LRU"]

import math

import torch
from torch import Tensor, nn

from torch_ref.layers.state import State


def as_complex(real: Tensor, imaginary: Tensor) -> Tensor:
    """Joins two parts in at least single precision, because 16-bit complex numbers do not exist."""
    dtype = torch.promote_types(real.dtype, torch.float32)
    return torch.complex(real.to(dtype), imaginary.to(dtype))


class LRU(nn.Module):
    """A diagonal state space with complex decays.

        λ = e^{−ν + iθ},   ν = e^{nu_log},   θ = e^{theta_log},   γ = e^{gamma_log}
        h_t = λ ⊙ h_{t−1} + γ ⊙ B x_t
        y_t = Re(C h_t) + D ⊙ x_t

    x and y are (batch, time, features). The state is (h,): the real and imaginary parts of h,
    (batch, state_features, 2).
    """

    def __init__(
        self,
        features: int,
        state_features: int,
        *,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 2 * math.pi,
    ):
        super().__init__()
        size = (state_features,)
        square = torch.rand(size) * (r_max**2 - r_min**2) + r_min**2
        self.nu_log = nn.Parameter((-square.log() / 2).log())
        self.theta_log = nn.Parameter((max_phase * torch.rand(size)).log())
        self.gamma_log = nn.Parameter((1 - square).log() / 2)
        self.B_re = nn.Parameter(torch.randn(state_features, features) / (2 * features) ** 0.5)
        self.B_im = nn.Parameter(torch.randn(state_features, features) / (2 * features) ** 0.5)
        self.C_re = nn.Parameter(torch.randn(features, state_features) / state_features**0.5)
        self.C_im = nn.Parameter(torch.randn(features, state_features) / state_features**0.5)
        self.D = nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        [h] = self.init_state(x.shape[0]) if state is None else state
        h = as_complex(h[..., 0], h[..., 1])
        decay = torch.exp(as_complex(-self.nu_log.exp(), self.theta_log.exp()))
        B, C = as_complex(self.B_re, self.B_im), as_complex(self.C_re, self.C_im)
        gamma = self.gamma_log.exp()

        outputs = []
        for x_t in x.unbind(1):
            h = decay * h + gamma * (x_t.to(B.dtype) @ B.T)
            outputs.append((h @ C.T).real + self.D * x_t)
        return torch.stack(outputs, dim=1).to(x.dtype), (torch.view_as_real(h),)

    def init_state(self, batch_size: int) -> State:
        return (self.nu_log.new_zeros(batch_size, len(self.nu_log), 2),)
