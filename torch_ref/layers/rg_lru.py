"""The RG-LRU in plain PyTorch (Griffin, arXiv 2402.19427)."""

__all__ = ["RGLRU"]

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.state import State


class Decay(torch.autograd.Function):
    """`p = a^e` and `m = √(1 − p²)` for a in [0, 1] and e ≥ 0, without cancellation near p = 1.

    ∂p/∂a = e a^{e−1} is infinite at a = 0, and ∂m = −(p/m) ∂p at m = 0. The derivatives therefore
    use at least ε for a and at least √ε for m, where ε is the spacing of the dtype at 1.
    """

    @staticmethod
    def forward(ctx, a: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        log = torch.where(e == 0, 0, e * a.log())  # 0⁰ = 1
        p, m = log.exp(), (-torch.expm1(2 * log)).sqrt()
        ctx.save_for_backward(a, e, p, m)
        return p, m

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor]:
        p_grad, m_grad = grads
        a, e, p, m = ctx.saved_tensors
        epsilon = torch.finfo(p.dtype).eps
        grad = p_grad - m_grad * p / m.clamp_min(epsilon**0.5)
        a = a.clamp_min(epsilon)
        return (grad * e * a ** (e - 1)).sum_to_size(a.shape), grad * p * a.log()


class SquareRoot(torch.autograd.Function):
    """`√x`, whose derivative is at most 1000."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        root = x.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        [root] = ctx.saved_tensors
        return grads[0] / (2 * root).clamp_min(1e-3)


def block_diagonal(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`x W + b`, where the weight (blocks, in, out) holds the diagonal blocks of W."""
    blocks = x.unflatten(-1, weight.shape[:2])
    return (torch.einsum("...hi,hij->...hj", blocks, weight) + bias).flatten(-2)


def initial_a_param(features: int) -> Tensor:
    """Draws a_param as recurrentgemma: a² = e^{−2 softplus(a_param)} uniform in [0.9², 0.999²]."""
    a = torch.empty(features).uniform_(0.9**2, 0.999**2).sqrt()
    return torch.expm1(-a.log()).log()


class RGLRU(nn.Module):
    """The real-gated linear recurrent unit.

        i_t = σ(x_t W_i)
        r_t = σ(x_t W_r)
        a_t = a^(c·r_t)
        h_t = a_t ⊙ h_{t−1} + √(1 − a_t²) ⊙ (i_t ⊙ x_t)

    x and y = h are (batch, time, features), and the state is (h,) with h (batch, features). The
    parameter is a_param, and a = e^{−softplus(a_param)}.

    With `parameterization="direct"`, the parameter is a. a^c is drawn uniformly from [0.9, 0.999],
    as in the paper. The gradients at a = 0 and a = 1 are finite.

    With `num_blocks`, W_i and W_r are block-diagonal and have biases, the parameterization is
    "softplus", and the parameter is called recurrent_param. RecurrentGemma's RG-LRU also has
    `scale_first_step=False`: at the first step of a document, the factor √(1 − a_t²) is 1. The
    state is then (h, position), where position counts the steps of each row so far.
    """

    def __init__(
        self,
        features: int,
        *,
        num_blocks: int | None = None,
        parameterization: str = "softplus",
        scale_first_step: bool = True,
        c: float = 8.0,
    ):
        super().__init__()
        self.features, self.num_blocks, self.c = features, num_blocks, c
        self.scale_first_step = scale_first_step
        # Dense gates have no bias, as in the paper; blocks have one, as in recurrentgemma.
        if num_blocks is None:
            self.input_gate = nn.Linear(features, features, bias=False)
            self.recurrence_gate = nn.Linear(features, features, bias=False)
            if parameterization == "direct":
                self.a = nn.Parameter(torch.empty(features).uniform_(0.9, 0.999) ** (1 / c))
            else:
                self.a_param = nn.Parameter(initial_a_param(features))
        else:
            size = features // num_blocks
            self.recurrent_param = nn.Parameter(initial_a_param(features))
            self.input_gate_weight = nn.Parameter(torch.randn(num_blocks, size, size) / size**0.5)
            self.input_gate_bias = nn.Parameter(torch.zeros(num_blocks, size))
            self.recurrent_gate_weight = nn.Parameter(
                torch.randn(num_blocks, size, size) / size**0.5
            )
            self.recurrent_gate_bias = nn.Parameter(torch.zeros(num_blocks, size))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        h, *position = self.init_state(x.shape[0]) if state is None else state
        outputs = []
        for x_t in x.unbind(1):
            # The gates and the decay depend on the current input alone.
            i_t, r_t = self.gates(x_t)
            a_t, multiplier = self.decay(self.c * r_t)
            # The first step of a document is not scaled, because nothing precedes it.
            if position:
                multiplier = torch.where(position[0][:, None] == 0, 1, multiplier)
                position = [position[0] + 1]
            h = a_t * h + multiplier * (i_t * x_t)
            outputs.append(h)
        return torch.stack(outputs, dim=1), (h, *position)

    def gates(self, x_t: Tensor) -> tuple[Tensor, Tensor]:
        if self.num_blocks is None:
            i, r = self.input_gate(x_t), self.recurrence_gate(x_t)
        else:
            i = block_diagonal(x_t, self.input_gate_weight, self.input_gate_bias)
            r = block_diagonal(x_t, self.recurrent_gate_weight, self.recurrent_gate_bias)
        return torch.sigmoid(i), torch.sigmoid(r)

    def decay(self, exponent: Tensor) -> tuple[Tensor, Tensor]:
        """`a^e` and `√(1 − a^{2e})`."""
        if hasattr(self, "a"):
            return Decay.apply(self.a, exponent)
        a_param = self.a_param if self.num_blocks is None else self.recurrent_param
        log = -exponent * F.softplus(a_param)
        return log.exp(), SquareRoot.apply(-torch.expm1(2 * log))

    def init_state(self, batch_size: int) -> State:
        h = next(self.parameters()).new_zeros(batch_size, self.features)
        position = torch.zeros(batch_size, dtype=torch.int32, device=h.device)
        return (h,) if self.scale_first_step else (h, position)
