"""S5 in plain PyTorch (arXiv 2208.04933)."""

__all__ = ["S5"]

import torch
from torch import Tensor, nn

from torch_ref.layers.lru import as_complex
from torch_ref.layers.state import State


class S5(nn.Module):
    """A diagonal state space that discretizes a linear system in continuous time.

        Λ = Lambda_re + i Lambda_im,   Δ = step_rescale · e^{log_step}
        λ = e^{ΛΔ},   γ = (λ − 1) / Λ                              zero-order hold
        λ = (1 + ΛΔ/2) / (1 − ΛΔ/2),   γ = Δ / (1 − ΛΔ/2)          bilinear
        h_t = λ ⊙ h_{t−1} + γ ⊙ B x_t
        y_t = 2 Re(C h_t) + D ⊙ x_t

    x and y are (batch, time, features). The state is (h,): the real and imaginary parts of h,
    (batch, state_features, 2). If `bidirectional`, a second h runs from the last step to the first,
    and follows the first in the state; `C1` reads the first and `C2` the second.
    """

    def __init__(
        self,
        features: int,
        state_features: int,
        *,
        num_blocks: int = 1,
        conjugate_pairs: bool = True,
        bidirectional: bool = False,
        discretization: str = "zoh",
        clip_eigenvalues: bool = False,
        step_rescale: float = 1.0,
        step_min: float = 0.001,
        step_max: float = 0.1,
    ):
        super().__init__()
        self.bidirectional, self.output_scale = bidirectional, 2 if conjugate_pairs else 1
        self.discretization, self.clip_eigenvalues = discretization, clip_eigenvalues
        self.step_rescale = step_rescale
        size = state_features // num_blocks
        frequencies, vectors = hippo_eigenvectors(size * (1 + conjugate_pairs))
        vectors = vectors[:, :size].to(torch.complex64)
        self.Lambda_re = nn.Parameter(torch.full((state_features,), -0.5))
        self.Lambda_im = nn.Parameter(frequencies[:size].repeat(num_blocks).float())
        log_min, log_max = torch.tensor([step_min, step_max]).log()
        self.log_step = nn.Parameter(log_min + (log_max - log_min) * torch.rand(state_features, 1))
        # B and C belong to the system before it is diagonalized by the eigenvectors V of each
        # block: V⁻¹ B and C V are trained. The layer truncates these normal distributions.
        states = num_blocks * len(vectors)
        V = torch.block_diag(*[vectors] * num_blocks)
        B = torch.randn(states, features) / states**0.5
        self.B = nn.Parameter(torch.view_as_real(V.mH @ B.to(V.dtype)))
        C = [torch.randn(features, states, dtype=V.dtype) * (2 / states) ** 0.5 for _ in range(2)]
        C1, C2 = (nn.Parameter(torch.view_as_real(matrix @ V)) for matrix in C)
        if bidirectional:
            self.C1, self.C2 = C1, C2
        else:
            self.C = C1
        self.D = nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        [h] = self.init_state(x.shape[0]) if state is None else state
        decay, scale = self.discretized()
        B = as_complex(*self.B.unbind(-1))
        inputs = scale * (x.to(B.dtype) @ B.T)

        y = self.D * x
        matrices = (self.C1, self.C2) if self.bidirectional else (self.C,)
        starts = as_complex(*h.unbind(-1)).chunk(len(matrices), dim=1)
        ends = []
        for reverse, (C, h) in enumerate(zip(matrices, starts, strict=True)):
            steps = inputs.flip(1) if reverse else inputs
            outputs = []
            for input_t in steps.unbind(1):
                h = decay * h + input_t
                outputs.append(h)
            hs = torch.stack(outputs, dim=1)
            hs = hs.flip(1) if reverse else hs
            y = y + self.output_scale * (hs @ as_complex(*C.unbind(-1)).T).real
            ends.append(h)
        return y.to(x.dtype), (torch.view_as_real(torch.cat(ends, dim=1)),)

    def discretized(self) -> tuple[Tensor, Tensor]:
        """λ and γ."""
        real = self.Lambda_re.clamp(max=-1e-4) if self.clip_eigenvalues else self.Lambda_re
        eigenvalues = as_complex(real, self.Lambda_im)
        step = self.step_rescale * self.log_step[:, 0].exp()
        if self.discretization == "zoh":
            decay = torch.exp(eigenvalues * step)
            return decay, (decay - 1) / eigenvalues
        denominator = 1 - eigenvalues * step / 2
        return (1 + eigenvalues * step / 2) / denominator, step / denominator

    def init_state(self, batch_size: int) -> State:
        numbers = len(self.Lambda_re) * (1 + self.bidirectional)
        return (self.Lambda_re.new_zeros(batch_size, numbers, 2),)


def hippo_eigenvectors(size: int) -> tuple[Tensor, Tensor]:
    """The eigenvectors of the normal part of HiPPO-LegS, and the imaginary parts of eigenvalues.

    HiPPO-LegS is −√(2n + 1) √(2m + 1) below its diagonal, and −(n + 1) on it. Adding P Pᵀ with
    P_n = √(n + ½) makes it normal. The real parts of all eigenvalues are then −½.
    """
    n = torch.arange(size, dtype=torch.float64)
    root = (2 * n + 1).sqrt()
    hippo = -torch.outer(root, root).tril(-1) - torch.diag(n + 1)
    normal = hippo + torch.outer((n + 0.5).sqrt(), (n + 0.5).sqrt())
    frequencies, vectors = torch.linalg.eigh(-1j * (normal + 0.5 * torch.eye(size)))
    return frequencies, vectors
