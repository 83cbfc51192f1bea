"""Write DreamerV3's block GRU with `ops.recurrence`, and prove that it equals a PyTorch twin.

    python examples/dreamer_gru.py

DreamerV3 (arXiv 2301.04104) carries its latent state h in a GRU whose large matrices V and G have
8 blocks. x_t holds the embedded code and action, and f(x) = silu(RMSNorm(x)):

    u = f(h_{t−1} W + b)
    v = f([h_{t−1}, u, x_t] V + b_v)    each block of V reads its part of h_{t−1}, all of u and x_t
    r, c, g = v G + b_g
    h_t = h_{t−1} + σ(g − 1) ⊙ (tanh(σ(r) ⊙ c) − h_{t−1})
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.functional import silu

from jax_models.ops import GRUState, Product, Step, recurrence
from parity_tests import compare

BLOCKS, SIZE, FEATURES, UNITS, INPUTS = 8, 8, 64, 16, 32  # FEATURES = BLOCKS · SIZE


def f(x, scale):
    return jax.nn.silu(x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-4) * scale)


def step(state: GRUState, now: Step) -> GRUState:
    u = f(now.product("W", state.h), now.params[0])
    v = now.product("V of h", state.h) + now.product("V of u and x", u)
    gates = now.product("G", f(v, now.params[1])).reshape(-1, BLOCKS, 3, SIZE)
    r, c, g = (gates[:, :, i].reshape(v.shape) for i in range(3))
    return GRUState(state.h + jax.nn.sigmoid(g - 1) * (jnp.tanh(jax.nn.sigmoid(r) * c) - state.h))


def block_gru(w: dict, x, reset):
    """Maps x (batch, time, INPUTS) to h (batch, time, FEATURES). Restarts where `reset` is true."""
    V_h, V_rest = jnp.split(w["V.weight"], [SIZE], axis=1)
    V_rest = jnp.concatenate([*V_rest], axis=1)  # all blocks read u and x: one dense matrix
    products = {
        "W": Product(w["W.weight"].T, w["W.bias"]),
        "V of h": Product(V_h, w["V.bias"].reshape(-1)),
        "V of u and x": Product(V_rest[:UNITS], kernel_x=V_rest[UNITS:]),
        "G": Product(w["G.weight"], w["G.bias"].reshape(-1)),
    }
    start, scales = GRUState(jnp.zeros((len(x), FEATURES))), (w["f_u.weight"], w["f_v.weight"])
    h, _ = recurrence(step, start, products, x, params=scales, reset=reset)
    return h.astype(x.dtype)


class BlockLinear(torch.nn.Module):
    def __init__(self, in_features: int, out_features: int):  # of each block
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(BLOCKS, in_features, out_features) / 8)
        self.bias = torch.nn.Parameter(torch.randn(BLOCKS, out_features))

    def forward(self, x):  # (batch, BLOCKS, in_features)
        return torch.einsum("bki,kio->bko", x, self.weight) + self.bias


class Twin(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.W, self.f_u = torch.nn.Linear(FEATURES, UNITS), torch.nn.RMSNorm(UNITS, eps=1e-4)
        self.V, self.G = BlockLinear(SIZE + UNITS + INPUTS, SIZE), BlockLinear(SIZE, 3 * SIZE)
        self.f_v = torch.nn.RMSNorm(FEATURES, eps=1e-4)

    def forward(self, x, reset):
        h, outputs = x.new_zeros(len(x), FEATURES), []
        for x_t, reset_t in zip(x.unbind(1), reset.unbind(1), strict=True):
            h = h * ~reset_t[:, None]
            ux = torch.cat([silu(self.f_u(self.W(h))), x_t], dim=1)[:, None]
            v = self.V(torch.cat([h.view(-1, BLOCKS, SIZE), ux.expand(-1, BLOCKS, -1)], dim=2))
            gates = self.G(silu(self.f_v(v.flatten(1))).view(-1, BLOCKS, SIZE))
            r, c, g = (gate.flatten(1) for gate in gates.chunk(3, dim=2))
            h = h + torch.sigmoid(g - 1) * (torch.tanh(torch.sigmoid(r) * c) - h)
            outputs.append(h)
        return torch.stack(outputs, dim=1)


def main():
    rng = np.random.default_rng(0)
    x, reset = rng.standard_normal((3, 20, INPUTS)), rng.random((3, 20)) < 0.1
    print(compare(Twin(), block_gru, x, reset, weights=dict, locate=True))


if __name__ == "__main__":
    main()
