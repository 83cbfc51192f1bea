"""The mLSTM in float32, with large gates over a long sequence."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_models import MLSTM

TIME = 500
UP, DOWN = np.ones(TIME), -np.ones(TIME)
IN_TURN = np.where(np.arange(TIME) % 2, UP, DOWN)
RARELY = np.where(np.arange(TIME) % 200 == 10, UP, DOWN)
RANDOM = np.random.default_rng(0).choice([-1.0, 1.0], TIME)
SIGNS = np.stack(
    [[UP, UP], [UP, DOWN], [DOWN, UP], [DOWN, DOWN], [IN_TURN, UP], [RARELY, UP], [RARELY, DOWN],
     [RANDOM, RANDOM[::-1]]], axis=0
)  # fmt: skip
"""The signs of i and f in each row."""
BIASES = np.array([60.0, 0.0])
"""In the padding, x is 0, and so i is large, while m may be −80."""
LENGTHS = np.full(2 * len(SIGNS), 450)


def test_large_gates_lose_no_digits_in_float32():
    """exp(80) would overflow, and a sum of all log σ(f) would leave m few digits."""
    # The caps make the gates ±14.8 and ±80.
    gates = np.concatenate([15 * SIGNS, 1e4 * SIGNS]).swapaxes(1, 2) - BIASES
    others = np.random.default_rng(1).standard_normal((len(gates), TIME, 6))
    inputs = np.concatenate([gates, others], axis=2)

    def results(dtype):
        layer = MLSTM(8, num_heads=1, gate_soft_cap=80.0, dtype=dtype, rngs=nnx.Rngs(0))
        for row, (gate, bias) in enumerate(zip([layer.i_proj, layer.f_proj], BIASES, strict=True)):
            gate.kernel[...] = gate.kernel[...].at[row].set(1)
            gate.bias[...] = jnp.full_like(gate.bias[...], bias)
        for matrix in (layer.q_proj, layer.k_proj, layer.v_proj):
            matrix.kernel[...] = matrix.kernel[...].at[:2].set(0)

        def loss(x):
            y, _ = layer(x, lengths=LENGTHS)
            y = y[:, : LENGTHS[0]]
            return jnp.sum(y**2), y

        return jax.jit(jax.grad(loss, has_aux=True))(jnp.asarray(inputs, dtype))

    found = results(jnp.float32)
    with jax.enable_x64(True):
        expected = results(jnp.float64)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
